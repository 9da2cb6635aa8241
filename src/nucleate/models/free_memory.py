"""How much memory is free for the KV cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

DEFAULT = 4 << 30
"""Assumed if the free memory cannot be determined."""


def free() -> int:
    """Bytes of main memory available without swapping."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text("ascii"), re.MULTILINE)
        if found:
            return int(found[1]) << 10
    except OSError:  # not Linux
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return DEFAULT
