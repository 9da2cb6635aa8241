"""Triggers of lazy grammars, with the names of llama.cpp, and the words for which they stand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from typing import Any, Final, NamedTuple, NoReturn, final

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError

FIELD: Final = "grammar_triggers"
TYPES: Final = ("token", "word", "pattern", "pattern_full")
"""The types of triggers; llama.cpp also has their numbers in this order."""
MAX_TRIGGERS: Final = 64
MAX_WORDS: Final = 256
MAX_CHARACTERS: Final = 10_000
"""Maximum number of words that one pattern matches, and of the characters of all."""

_ANY_TEXT = re.compile(r"(?:\[\\s\\S\]|\[\\S\\s\]|\(\?s:\.\)|\[\\w\\W\]|\[\\d\\D\])\*\??")
_NAMED_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r"}
_COUNT = re.compile(r"\{(\d{1,3})(?:(,)(\d{1,3}))?\}", re.ASCII)


class GrammarTrigger(NamedTuple):
    """What begins a lazy grammar. ``value``: a word, a pattern, the text of a token, or the id of one."""

    type: str
    value: str | int

    @classmethod
    def read(cls, given: Any, at: str) -> GrammarTrigger:
        """Return the trigger of an object ``{"type", "value"}``; a token may have its id as ``token``."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            _reject(at, f"must be an object with type and value, got {shown(given)}")
        kind, value, token = given.get("type"), given.get("value"), given.get("token")
        for name in given:
            if name not in ("type", "value", "token"):
                _reject(at, f"unknown field {shown(name)}")
        if isinstance(kind, int) and not isinstance(kind, bool) and kind in range(len(TYPES)):
            kind = TYPES[kind]
        if kind not in TYPES:
            _reject(at, f"type must be one of {', '.join(TYPES)}, got {shown(kind)}")
        if kind == "token" and isinstance(token, int) and not isinstance(token, bool) and token >= 0:
            return cls(kind, token)
        if not isinstance(value, str) or not value or "\0" in value:
            _reject(at, f"value must be a non-empty string, got {shown(value)}")
        return cls(kind, value)

    def to_dict(self) -> dict[str, Any]:
        return {"type": self.type, ("token" if isinstance(self.value, int) else "value"): self.value}

    def words(self, at: str) -> list[str]:
        """Return the words that a word or pattern stands for. Raises ParameterError if there is no end of them."""
        text = str(self.value)
        if self.type == "word":
            return [text]
        if self.type == "pattern_full":
            text = text.removeprefix("^").removesuffix("$")
            before, after = _ANY_TEXT.match(text), re.search(_ANY_TEXT.pattern + "$", text)
            if before is None or after is None:
                _reject(at, r"a pattern_full must begin and end with any text: [\s\S]*?(...)[\s\S]*")
            text = text[before.end() : after.start()]
        elif (before := _ANY_TEXT.match(text)) is not None:
            text = text[before.end() :]
            after = re.search(_ANY_TEXT.pattern + "$", text)
            text = text if after is None else text[: after.start()]
        words = _Pattern(text, at).words()
        # The shortest match comes first, so words that begin with others are never reached.
        return [word for word in words if not any(word != other and word.startswith(other) for other in words)]


def read_triggers(name: str, value: object) -> tuple[GrammarTrigger, ...] | None:
    """Return the triggers of a list. An empty list counts as absent. Raises ParameterError."""
    if value is None or value in ([], ()):
        return None
    if not isinstance(value, list | tuple) or len(value) > MAX_TRIGGERS:
        _reject(name, f"must be a list of at most {MAX_TRIGGERS} triggers, got {shown(value)}")
    return tuple(GrammarTrigger.read(item, f"{name}[{index}]") for index, item in enumerate(value))


def _reject(at: str, reason: str) -> NoReturn:
    raise ParameterError(FIELD, f"{at}: {reason}" if at != FIELD else f"{at} {reason}")


@final
class _Pattern:
    """The words of a regular expression: characters, escapes, groups, alternatives, classes, ? and counts."""

    def __init__(self, text: str, at: str) -> None:
        self._text, self._at, self._position = text, at, 0

    def words(self) -> list[str]:
        found = self._alternatives(0)
        if self._position < len(self._text):
            self._unsupported()
        if "" in found:
            _reject(self._at, "must not match the empty text")
        return found

    def _alternatives(self, depth: int) -> list[str]:
        if depth > 16:
            self._unsupported()
        found = self._sequence(depth)
        while self._next("|"):
            found = self._limited([*found, *self._sequence(depth)])
        return found

    def _sequence(self, depth: int) -> list[str]:
        found = [""]
        while self._position < len(self._text) and self._text[self._position] not in "|)":
            part = self._repeated(self._item(depth))
            found = self._limited(["".join(pair) for pair in product(found, part)])
        return found

    def _repeated(self, part: list[str]) -> list[str]:
        if self._next("?"):
            return self._limited(["", *part])
        count = _COUNT.match(self._text, self._position)
        if count is None:
            return part
        self._position = count.end()
        low, high = int(count[1]), int(count[3] if count[2] else count[1])
        if len(part) ** min(high, 99) > MAX_WORDS or low > high:
            self._unsupported()
        return self._limited(["".join(each) for size in range(low, high + 1) for each in product(part, repeat=size)])

    def _item(self, depth: int) -> list[str]:
        if self._next("(?:") or (self._text[self._position : self._position + 2] != "(?" and self._next("(")):
            found = self._alternatives(depth + 1)
            if not self._next(")"):
                self._unsupported()
            return found
        if self._next("["):
            found = []
            while not self._next("]"):
                found.append(self._character("-^[&~"))
            return found or self._unsupported()
        return [self._character("^$.*+?()[]{}|")]

    def _character(self, special: str) -> str:
        if self._next("\\"):
            escaped = self._text[self._position : self._position + 1]
            if not escaped or (escaped.isalnum() and escaped not in _NAMED_ESCAPES) or not escaped.isascii():
                self._unsupported()
            self._position += 1
            return _NAMED_ESCAPES.get(escaped, escaped)
        character = self._text[self._position : self._position + 1]
        if not character or character in special:
            self._unsupported()
        self._position += 1
        return character

    def _next(self, text: str) -> bool:
        found = self._text.startswith(text, self._position)
        self._position += len(text) if found else 0
        return found

    def _limited(self, words: list[str]) -> list[str]:
        if len(words) > MAX_WORDS:
            _reject(self._at, f"must match at most {MAX_WORDS} words, not {len(words)} or more")
        if (characters := sum(map(len, words))) > MAX_CHARACTERS:
            _reject(self._at, f"must match words of at most {MAX_CHARACTERS} characters in total, not {characters}")
        return list(dict.fromkeys(words))

    def _unsupported(self) -> NoReturn:
        rest = shown(self._text[self._position :][:20])
        _reject(self._at, f"a pattern must match a fixed set of words, but here it does not: {rest}")
