"""Processes that tests start. They are killed when the test ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def begun(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a Python process with these arguments and options of ``Popen``."""
    with subprocess.Popen([sys.executable, *arguments], **options) as process:
        try:
            yield process
        finally:
            process.kill()
