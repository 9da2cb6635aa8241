"""``python -m nucleate`` is ``nucleate``."""

import sys

from nucleate.cli.main import main

sys.exit(main())
