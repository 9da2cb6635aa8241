"""The files of the inspector's page, as a server sends them."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final

from nucleate.inspector.bundle import offline_page

TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
OFFLINE: Final = "offline.html"
"""A page without a trace, which the page fills to save itself."""


def inspector_file(name: str) -> tuple[bytes, str] | None:
    """The content and the content type of a file; None if there is none of this name."""
    return _offline() if name == OFFLINE else _files().get(name)


@cache
def compressed_inspector_file(name: str) -> bytes:
    """The content of a file with gzip, about a third of its bytes. Raises KeyError if there is none of this name."""
    found = inspector_file(name)
    if found is None:
        raise KeyError(name)
    return gzip.compress(found[0], mtime=0)


@cache
def _offline() -> tuple[bytes, str]:
    return offline_page().encode(), TYPES["html"]


@cache
def _files() -> Mapping[str, tuple[bytes, str]]:
    return {
        file.name: (file.read_bytes(), TYPES[file.name.rpartition(".")[2]])
        for file in (files("nucleate.inspector") / "assets").iterdir()
        if file.name.rpartition(".")[2] in TYPES
    }
