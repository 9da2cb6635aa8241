r"""The regular expressions of JSON schemas: translation for Python, and what token masks do not support.

Masks use Rust's syntax. There, ``\d`` and ``\w`` are ASCII, ``\s`` is Unicode's white space, and ``$`` is the end of
the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

_PARTS = re.compile(
    r"\\(?P<named>[dDwWsSz])|\\[xu]\{(?P<code>[0-9a-fA-F]{1,8})\}|\\(?P<property>[pP][A-Z])|\\.|(?P<end>\$)"
    r"|\[:(?P<posix>\^?[a-z]+):\]|\[(?:\^?\](?!\])|\^?)|(?P<close>\])",
    re.DOTALL,
)
_MULTILINE = re.compile(r"\(\?[a-zA-Z]*m")
_SPACE: Final = r"\t-\r\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_CLASSES: Final = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACE}
_POSIX: Final = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "digit": "0-9",
    "lower": "a-z",
    "upper": "A-Z",
    "space": r"\t-\r\x20",
    "word": "0-9A-Za-z_",
    "xdigit": "0-9A-Fa-f",
}
_UNSUPPORTED: Final = {
    "look-around": re.compile(r"\(\?<?[=!]"),
    "a backreference": re.compile(r"\\(?:[1-9]|k<)"),
    "a word boundary": re.compile(r"\\[bB]"),
}


def python_pattern(pattern: str) -> str:
    """Return a pattern for the package regex with the flag V1, which matches the same texts as in a mask."""
    multiline = _MULTILINE.search(pattern) is not None
    depth = 0

    def part(found: re.Match[str]) -> str:
        nonlocal depth
        kind = found.lastgroup
        if kind is None and found[0][0] == "[":
            depth += 1
        elif kind == "close":
            depth = max(0, depth - 1)
        return _WRITERS[kind](found, depth > 0) if kind in _WRITERS and not (kind == "end" and multiline) else found[0]

    return _PARTS.sub(part, pattern)


def _named(found: re.Match[str], _: bool) -> str:
    name = found["named"]
    return r"\Z" if name == "z" else f"[{'^' if name.isupper() else ''}{_CLASSES[name.lower()]}]"


def _posix(found: re.Match[str], _: bool) -> str:
    name = found["posix"].removeprefix("^")
    return f"[{'^' if found['posix'][0] == '^' else ''}{_POSIX[name]}]" if name in _POSIX else found[0]


_WRITERS: Final[dict[str | None, Callable[[re.Match[str], bool], str]]] = {
    "named": _named,
    "posix": _posix,
    "code": lambda found, _: f"\\U{int(found['code'], 16):08x}",
    "property": lambda found, _: f"\\{found['property'][0]}{{{found['property'][1]}}}",
    "end": lambda found, inside: found[0] if inside else r"\Z",
}


def unsupported_syntax(pattern: str) -> str | None:
    """Return the part of the syntax of a pattern that masks do not support, or None."""
    outside = re.sub(r"\\[^bBk1-9]|\[(?:\\.|[^\]\\])*\]", "", pattern, flags=re.DOTALL)
    return next((name for name, syntax in _UNSUPPORTED.items() if syntax.search(outside)), None)
