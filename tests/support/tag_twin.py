"""A slow reference for structural tags: it splits a text at the triggers, and looks for the first end of each section.

A special token is one character of ``SPECIAL``, so that texts with special tokens are plain strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import regex

SPECIAL = {"<|T|>": "\ue000", "<|E|>": "\ue001"}


@dataclass(frozen=True)
class Content:
    """The texts of a section: a finite set, or those of a regular expression."""

    texts: tuple[str, ...] = ()
    pattern: str | None = None

    def complete(self, text: str) -> bool:
        return text in self.texts or (self.pattern is not None and regex.fullmatch(self.pattern, text) is not None)

    def viable(self, text: str) -> bool:
        if any(character in text for character in SPECIAL.values()):
            return False
        found = self.pattern is not None and regex.fullmatch(self.pattern, text, partial=True) is not None
        return found or any(whole.startswith(text) for whole in self.texts)


@dataclass(frozen=True)
class Section:
    begin: str
    content: Content
    ends: tuple[str, ...]


@dataclass(frozen=True)
class Twin:
    """Free text with sections that begin with triggers. ``check`` says what a text is."""

    triggers: tuple[str, ...]
    sections: tuple[Section, ...]
    at_least_one: bool = False
    stop_after_first: bool = False

    def check(self, text: str) -> tuple[bool, bool]:
        """Return whether a text is the beginning of a valid text, and whether it is one."""
        if self.at_least_one:
            return self._sections(text, 0, self.sections)
        return self._free_text(text, 0)

    def _free_text(self, text: str, start: int) -> tuple[bool, bool]:
        triggers = [(spelled, trigger) for trigger in self.triggers for spelled in spellings(trigger)]
        found = [
            (position + len(spelled), position, trigger)
            for spelled, trigger in triggers
            if (position := text.find(spelled, start)) >= 0
        ]
        if not found:
            rest = text[start:]
            begun = max((_overlap(rest, spelled) for spelled, _ in triggers), default=0)
            free = rest[: len(rest) - begun] if _special(rest) else rest
            return not _special(free), not _special(rest)
        _, position, trigger = min(found)
        if _special(text[start:position]):
            return False, False
        return self._sections(text, position, [each for each in self.sections if each.begin.startswith(trigger)])

    def _sections(self, text: str, start: int, sections: Iterable[Section]) -> tuple[bool, bool]:
        viable = complete = False
        for section in sections:
            for begin in spellings(section.begin):
                if not text.startswith(begin, start):
                    viable |= begin.startswith(text[start:])
                    continue
                more, end = self._content(text, start + len(begin), section)
                viable |= more
                if end is not None:
                    found = self._after(text, end)
                    viable, complete = viable | found[0], complete | found[1]
        return viable, complete

    def _after(self, text: str, end: int) -> tuple[bool, bool]:
        if self.stop_after_first:
            return end == len(text), end == len(text)
        return self._free_text(text, end)

    @staticmethod
    def _content(text: str, start: int, section: Section) -> tuple[bool, int | None]:
        """Return whether the content may go on at the end of the text, or where the first end of it ends."""
        ends = [spelled for end in section.ends for spelled in spellings(end)]
        found = [
            position + len(end)
            for position in range(start, len(text) + 1)
            if section.content.complete(text[start:position])
            for end in ends
            if text.startswith(end, position)
        ]
        if found:
            return False, min(found)
        begun = any(
            section.content.complete(text[start:position]) and any(end.startswith(text[position:]) for end in ends)
            for position in range(start, len(text) + 1)
        )
        return begun or section.content.viable(text[start:]), None


def spellings(text: str) -> list[str]:
    """Return a text with each name of a special token as the token, or spelled."""
    parts = regex.split("(" + "|".join(map(regex.escape, SPECIAL)) + ")", text)
    return ["".join(each) for each in product(*({part, SPECIAL.get(part, part)} for part in parts))]


def _special(text: str) -> bool:
    return any(character in text for character in SPECIAL.values())


def _overlap(text: str, begun: str) -> int:
    """Return the length of the longest end of a text that is a proper beginning of another."""
    return max((size for size in range(len(begun)) if size and text.endswith(begun[:size])), default=0)


def texts_of(tokens: Sequence[str]) -> str:
    return "".join(SPECIAL.get(token, token) for token in tokens)
