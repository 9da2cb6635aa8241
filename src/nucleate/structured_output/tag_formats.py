"""The formats of structural tags: text with structured sections, as a tree that ``structural_tag`` reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from nucleate.parameters.parameter import ParameterError

FIELD: Final = "structural_tag"


@dataclass(frozen=True)
class Format:
    """A part of the output. ``at``: its place in the document, for messages."""

    at: str


@dataclass(frozen=True)
class ConstString(Format):
    """A fixed text."""

    value: str


@dataclass(frozen=True)
class JsonSchema(Format):
    """JSON that conforms to a schema: an object, true or false."""

    schema: Any


@dataclass(frozen=True)
class Regex(Format):
    """A text that matches a regular expression as a whole."""

    pattern: str


@dataclass(frozen=True)
class Grammar(Format):
    """A text of a grammar in Lark or GBNF."""

    grammar: str


@dataclass(frozen=True)
class AnyText(Format):
    """Any text without the ends of the tag around it, and without ``excludes``."""

    excludes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Token(Format):
    """One token, by its id or its text in the tokenizer."""

    token: int | str


@dataclass(frozen=True)
class Sequence(Format):
    """Several formats, one after the other."""

    elements: tuple[Format, ...]


@dataclass(frozen=True)
class Or(Format):
    """One of several formats."""

    elements: tuple[Format, ...]


@dataclass(frozen=True)
class Repeat(Format):
    """A format ``low`` to ``high`` times; None: any number of times."""

    content: Format
    low: int
    high: int | None


@dataclass(frozen=True)
class Tag(Format):
    """``begin``, the content, and one of ``ends``. A ``begin`` or end is a text, or a token."""

    begin: str | Token
    content: Format
    ends: tuple[str | Token, ...]


@dataclass(frozen=True)
class TriggeredTags(Format):
    """Free text in which each trigger begins a tag."""

    triggers: tuple[str | Token, ...]
    tags: tuple[Tag, ...]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TagsWithSeparator(Format):
    """Tags with a separator between them, and no other text."""

    tags: tuple[Tag, ...]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


def parts_of(form: Format) -> Iterator[Format]:
    """Yield a format and all formats in it."""
    yield form
    match form:
        case Sequence(elements=inner) | Or(elements=inner):
            pass
        case TriggeredTags(tags=inner) | TagsWithSeparator(tags=inner):
            pass
        case Repeat(content=content) | Tag(content=content):
            inner = (content,)
        case _:
            return
    for part in inner:
        yield from parts_of(part)


@contextmanager
def at_place(part: Format) -> Iterator[None]:
    """Within this context, change errors of another field to name the place of a format."""
    try:
        yield
    except ParameterError as error:
        if error.field == FIELD:
            raise
        text = str(error)
        reason = text[len(error.field) :].removeprefix(":").strip() if text.startswith(error.field) else text
        reject(part.at, reason)


def reject(at: str, reason: str) -> NoReturn:
    """Raise a ParameterError for a place in the document."""
    raise ParameterError(FIELD, f"{FIELD}{f'.{at}' if at else ''}: {reason}")
