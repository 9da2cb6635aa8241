"""Regular expressions that match all texts except some."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_CONTROL: Final = r"\x00-\x08\x0e-\x1f"
NO_CONTROL: Final = f"[^{_CONTROL}]"
"""All characters except control characters other than whitespace: see ``schema_soundness``."""


def pattern_excluding(texts: Iterable[str]) -> str:
    """Return a regular expression that matches every text except these."""
    given = list(texts)
    if not any(given):
        return ".+" if given else ".*"
    branches: dict[str, dict[str, None]] = {}
    for text in given:
        if text:
            branches.setdefault(text[0], {})[text[1:]] = None
    excluded = "".join(rf"\u{{{ord(first):x}}}" for first in branches)
    more = [rf"\u{{{ord(first):x}}}(?:{pattern_excluding(rest)})" for first, rest in branches.items()]
    end = [] if "" in given else [""]
    return "|".join([*end, f"[^{excluded}{_CONTROL}].*", *more])
