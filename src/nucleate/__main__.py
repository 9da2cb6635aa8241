"""``python -m nucleate`` is ``nucleate``."""

import signal
import sys

before = signal.getsignal(signal.SIGINT)
if before is signal.default_int_handler:  # Ctrl-C during the imports ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from nucleate.cli.main import main  # noqa: E402

if before is signal.default_int_handler:
    signal.signal(signal.SIGINT, before)
sys.exit(main())
