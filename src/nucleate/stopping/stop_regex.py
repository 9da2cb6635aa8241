"""Finds a stop regex in streamed text, within a time limit.

The result equals a search of all text so far after each part: ``a+`` matches as soon as there is an ``a``, and ``$``
matches at the end of each part. Text is released when no match can start in it any more; lookbehind still sees its last
``CONTEXT`` characters.
"""

from __future__ import annotations

import re
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from nucleate.stopping.stop_strings import StringMatch

if TYPE_CHECKING:
    import regex  # type: ignore[import-untyped]

CONTEXT: Final = 4096  # characters
# The regex compiler unrolls repetitions with a lower bound, and compiles nested repeated groups once per level:
# (((a{1000}){1000}){1000}) would take all memory, and ((((a+)+)+)+)+ with 30 levels would take hours. An upper bound of
# the work is the product of all lower bounds, at least 2 (3 if unrolled) for a group, times the length of the pattern.
MAX_UNROLLED: Final = 500_000
_REPEAT = re.compile(r"(\)?)(?:[*+]|\{(\d*))")
_VERBOSE = re.compile(r"\(\?\w*x")


def unrolled(pattern: str) -> int:
    """An upper bound of the size of the compiled pattern."""
    if _VERBOSE.search(pattern) and "#" in pattern:
        return MAX_UNROLLED + 1  # a comment may be inside a number
    size = max(len(pattern), 1)
    for group, digits in _REPEAT.findall("".join(pattern.split())):
        count = int(digits[:10] or 0)  # ten digits exceed the limit anyway
        size *= max(count, 1 if not group else 2 if count < 2 else 3)
    return size


@lru_cache(maxsize=256)
def compiled(pattern: str) -> regex.Pattern[str]:
    """The compiled pattern. Raises ValueError with the reason if it is invalid or too large."""
    import regex

    if unrolled(pattern) > MAX_UNROLLED:
        raise ValueError("too many repetitions")
    try:
        return regex.compile(pattern, cache_pattern=False)
    except regex.error as error:
        raise ValueError(f"{error.msg} at position {error.pos}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (OverflowError, ValueError, KeyError, IndexError) as error:
        raise ValueError(str(error) or "it cannot be compiled") from None


class RegexSearch:
    """A search for one pattern in one text. ``open``: how many characters at the end may be part of a match."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._compiled = compiled(pattern)
        self._text = ""  # all text from self._base on
        self._base = 0
        self._from = 0  # the first index in self._text at which a match may still start
        self._ignored: set[int] = set()  # indices after it at which no match may start
        self.open = 0

    def push(self, text: str, seconds: float, ignore: bool = False) -> StringMatch | None:
        """Add text. Returns the match that starts earliest. Raises TimeoutError after ``seconds``.

        With ``ignore``, no match may start any more where the pattern matches now.
        """
        deadline = time.monotonic() + seconds
        self._text += text
        if not ignore and not self._ignored:
            found = self._compiled.search(self._text, self._from, partial=True, timeout=seconds)
            if found is not None and not found.partial:
                return self._match(found)
            self._release(len(self._text) if found is None else found.start())
            return None
        return self._push_with_ignored(deadline, ignore)

    def _push_with_ignored(self, deadline: float, ignore: bool) -> StringMatch | None:
        """The same, for one start index at a time: a search would stop at an ignored match."""
        first_open: int | None = None
        for start in range(self._from, len(self._text) + 1):
            if start in self._ignored:
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            found = self._compiled.match(self._text, start, partial=True, timeout=left)
            if found is None:
                continue
            if found.partial:
                first_open = start if first_open is None else first_open
            elif ignore:
                self._ignored.add(start)
            else:
                return self._match(found)
        self._release(len(self._text) if first_open is None else first_open)
        return None

    def _match(self, found: regex.Match[str]) -> StringMatch:
        return StringMatch(self._base + found.start(), self._base + found.end(), self.pattern)

    def _release(self, start: int) -> None:
        self.open = len(self._text) - start
        self._from = start
        if start > 2 * CONTEXT:  # rarely, so that copying has a constant amortised cost
            cut = start - CONTEXT
            self._text, self._base, self._from = self._text[cut:], self._base + cut, CONTEXT
            self._ignored = {ignored - cut for ignored in self._ignored}
        self._ignored = {ignored for ignored in self._ignored if ignored >= self._from}
