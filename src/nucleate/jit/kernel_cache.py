"""The cache of compiled kernels on disk. An entry is valid for its exact sources and versions only.

The folder is NUCLEATE_CACHE, or nucleate in XDG_CACHE_HOME, or ~/.cache/nucleate.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

logger = logging.getLogger("nucleate")


def folder(versions: str, sources: Iterable[Path]) -> Path:
    """Where the kernels made of these sources, by these versions of a compiler, are kept."""
    base = os.environ.get("NUCLEATE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "nucleate"
    digest = hashlib.sha256(versions.encode() + b"".join(path.read_bytes() for path in sources))
    return Path(base).expanduser() / digest.hexdigest()[:16]


def writable(place: Path) -> bool:
    """Whether kernels can be kept in a folder, which is made."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(place, os.W_OK)


@cache
def say(message: str) -> None:
    """Log, once."""
    logger.warning("%s", message)
