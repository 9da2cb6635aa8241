"""Programs that tests start: none outlives its test, whatever the test comes to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def begun(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A Python program that runs: its arguments, and options of ``Popen``."""
    with subprocess.Popen([sys.executable, *arguments], **options) as process:
        try:
            yield process
        finally:
            process.kill()
