"""The cache of compiled kernels on disk. An entry is valid only for its exact sources and versions.

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
    """The cache folder of kernels with these sources, compiled by these versions."""
    base = os.environ.get("NUCLEATE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "nucleate"
    digest = hashlib.sha256(versions.encode() + b"".join(path.read_bytes() for path in sources))
    return Path(base).expanduser() / digest.hexdigest()[:16]


def writable(path: Path) -> bool:
    """Whether files can be written to a folder, which is created if necessary."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK)


@cache
def warn_once(message: str) -> None:
    """Log a warning, once per process."""
    logger.warning("%s", message)
