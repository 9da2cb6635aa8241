"""Where compiled kernels are kept on disk, so that none can be stale; when they are worth it. Knows no compiler.

The folder is NUCLEATE_CACHE, or nucleate in XDG_CACHE_HOME, or ~/.cache/nucleate.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

logger = logging.getLogger("nucleate")


def folder(versions: str, sources: Iterable[Path], prefix: str = "") -> Path:
    """Where the kernels made of these sources, by these versions of a compiler, are kept."""
    base = os.environ.get("NUCLEATE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "nucleate"
    digest = hashlib.sha256(versions.encode() + b"".join(path.read_bytes() for path in sources))
    return Path(base).expanduser() / f"{prefix}{digest.hexdigest()[:16]}"


def holds(place: Path) -> bool:
    """Whether kernels are kept in a folder."""
    return any(place.rglob("*.nbi"))


class Patience:
    """Work is done without kernels until it has taken as long as it takes to get them.

    place: where they are kept, asked for when it matters. loading, compiling: so much work takes as long as to load
    those that are kept, and as to compile them where none are, which is no less.
    """

    def __init__(self, place: Callable[[], Path], loading: int, compiling: int) -> None:
        self.done = 0
        self._place, self._loading, self._enough = place, loading, compiling

    def ends(self, work: int) -> bool:
        """Whether kernels are worth their time, after some more work without them."""
        before = self.done
        self.done += work
        if before < self._loading <= self.done and holds(self._place()):
            self._enough = self._loading
        return self.done >= self._enough


def writable(place: Path) -> bool:
    """Whether kernels can be kept in a folder, which is made."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(place, os.W_OK)


def prepared(place: Path, what: str, seconds: int) -> Path | None:
    """The folder that kernels are read from, and kept in; None if there is none. Says, once, that they are compiled.

    Of a folder that cannot be written it is a copy, as compilers want to write: kernels that one user has compiled,
    such as in the image of a container, serve another.
    """
    if writable(place):
        if not holds(place):
            say(f"compiling {what}, once: about {seconds} seconds (kept in {place})")
        return place
    if holds(place) and (copy := copied(place)) is not None:
        return copy
    say(f"compiling {what}: about {seconds} seconds ({place} cannot be written: not kept)")
    return None


@cache
def copied(place: Path) -> Path | None:
    """A copy of a folder, for as long as this process lives; None if there is no room for one."""
    try:
        copy = Path(tempfile.mkdtemp(prefix="nucleate-"))
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        for path in place.rglob("*"):
            if path.is_file():
                target = copy / path.relative_to(place)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())  # without the rights of the original
    except OSError:
        return None
    return copy


@cache
def say(message: str) -> None:
    """Log, once."""
    logger.warning("%s", message)
