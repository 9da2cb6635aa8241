"""How much memory keys and values may take. Knows no model."""

from __future__ import annotations

import os
import re
from pathlib import Path

UNKNOWN = 4 << 30
"""Taken for what is free where nobody says."""


def free() -> int:
    """Bytes of main memory that can be had without taking them from anybody."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text("ascii"), re.MULTILINE)
        if found:
            return int(found[1]) << 10
    except OSError:  # no Linux
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return UNKNOWN
