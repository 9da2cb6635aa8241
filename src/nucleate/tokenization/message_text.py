"""Keeps special tokens out of the text of messages: ``<|end|>`` in a message is text, and does not end its turn.

Before a chat template runs, ``mark_messages`` puts a mark into each special token in its variables. Afterwards,
``take_marks`` removes the marks. The prompt is encoded in parts that end where they were, so that no special token is
found there. A prompt without special tokens in its messages is encoded as a whole, to the same ids as ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

from nucleate.parameters.parameter import ParameterError
from nucleate.tokenization.tokenizer import Tokenizer

_FIRST_MARK, _LAST_MARK = 0xE100, 0xF8FF  # private use: the mark is the first character that no message has
_CHUNK: Final = 50_000  # characters
_MARKS: Final = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}]|\\\\u[ef][0-9a-f]{{3}}")  # also as JSON writes them


class SpecialTexts:
    """Finds the texts of special tokens. Those of one character are left out: they cannot be split."""

    def __init__(self, tokens: Collection[str]) -> None:
        self._tokens = frozenset(token for token in tokens if len(token) > 1)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(f"(?={_alternatives(self._tokens)})")

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(token[:length] for token in self._tokens for length in range(1, len(token)))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._tokens))

    def starts(self, text: str) -> list[int]:
        """Return where a special token starts in a text, or may start at its end and go on in the next text."""
        if not self._tokens:
            return []
        found: list[int] = []
        for first in range(0, len(text), _CHUNK):  # other threads wait for a search
            end = min(first + _CHUNK, len(text))
            matches = self._pattern.finditer(text, first, end + self._longest - 1)
            found += [match.start() for match in matches if match.start() < end]
        room = range(max(len(text) - self._longest, 0), len(text))
        ends = [start for start in room if text[start:] in self._beginnings]
        return sorted({*found, *ends}) if ends else found

    def is_at(self, text: str, start: int) -> bool:
        """Whether a special token starts at a place."""
        return self._pattern.match(text, start) is not None


def _alternatives(tokens: Collection[str]) -> str:
    """Return a pattern for some texts that looks at each character once, however many texts there are."""
    by_first: dict[str, list[str]] = {}
    for token in sorted(filter(None, tokens)):
        by_first.setdefault(token[0], []).append(token)
    branches = []
    for group in by_first.values():
        first, last = group[0], group[-1]  # sorted: what these share, all share
        length = next((at for at, pair in enumerate(zip(first, last, strict=False)) if len({*pair}) > 1), len(first))
        shared = first[:length]
        branches.append(re.escape(shared) + _alternatives([token[len(shared) :] for token in group]))
    optional = "?" if "" in tokens else ""
    return f"(?:{'|'.join(branches)}){optional}" if branches else ""


def mark_messages(parts: Sequence[tuple[Any, SpecialTexts]]) -> tuple[list[Any], str]:
    """Return values with marks after the first character of each special token in their texts, and the mark.

    parts: values (objects, lists and texts in any nesting), each with its special tokens; keys and other values stay as
    they are. The mark is empty if there is none. Raises ParameterError for texts with every possible mark.
    """
    texts: list[str] = []
    starts: list[list[int]] = []
    for value, special in parts:

        def find(text: str, special: SpecialTexts = special) -> str:
            texts.append(text)
            starts.append(special.starts(text))
            return text

        _mapped(value, find)
    if not any(starts):
        return [value for value, _ in parts], ""
    used = {mark for text in texts for mark in _MARKS.findall(text)}
    free = (chr(code) for code in range(_FIRST_MARK, _LAST_MARK + 1))
    mark = next((mark for mark in free if used.isdisjoint((mark, _escaped(mark)))), None)
    if mark is None:
        raise ParameterError("messages", "messages have every character from U+E100 to U+F8FF; leave one out")
    rest = iter(starts)

    def marked(text: str) -> str:
        places = [start + 1 for start in next(rest)]
        return mark.join(text[start:end] for start, end in pairwise((0, *places, len(text)))) if places else text

    return [_mapped(value, marked) for value, _ in parts], mark


def take_marks(text: str, mark: str, special: SpecialTexts) -> tuple[str, tuple[int, ...]]:
    """Return a rendered text without the marks, and the places where a special token must be split."""
    if not mark:
        return text, ()
    parts = text.replace(_escaped(mark), mark).split(mark)  # a template may write its values as ASCII
    text, places, length = "".join(parts), [], 0
    for part in parts[:-1]:
        length += len(part)
        if length and special.is_at(text, length - 1):
            places.append(length)
    return text, tuple(places)


def _escaped(mark: str) -> str:
    return json.dumps(mark)[1:-1]


def encode_split(tokenizer: Tokenizer, text: str, places: Sequence[int], *, add_special_tokens: bool) -> list[int]:
    """Return the ids of a text whose special tokens at these places are text. Raises ParameterError."""
    if not places:
        return tokenizer.encode(text, add_special_tokens)
    first, *others = (text[start:end] for start, end in pairwise((0, *places, len(text))))
    ids = tokenizer.encode(first, add_special_tokens=False)
    before, after = _around(ids, tokenizer.encode(first, add_special_tokens=True)) if add_special_tokens else ([], [])
    rest = [token for part in tokenizer.encode_continuations(others) for token in part]
    return [*before, *ids, *rest, *after]


def _around(ids: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer adds before and after those of a text."""
    start = next((start for start in range(len(whole)) if whole[start : start + len(ids)] == ids), 0)
    return whole[:start], whole[start + len(ids) :]


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _mapped(item, change) for name, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, list | tuple) else value
