"""Structural tags: text with structured sections, as a tree of formats, which is parsed from a JSON document.

The document is XGrammar's ``{"type": "structural_tag", "format": ...}``, or the older
``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``. Errors name the place in the document.
``tag_compiler`` translates the tree to a grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

from nucleate.parameters.converters import shown
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
    for value in vars(form).values():
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Format):
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


T = TypeVar("T")


class Fields:
    """The fields of one object. Reading a field removes it; ``done`` rejects the others. null counts as absent."""

    def __init__(self, value: Any, at: str) -> None:
        if not isinstance(value, Mapping):
            reject(at, f"must be an object, got {shown(value)}")
        self.given = {name: item for name, item in value.items() if item is not None}
        self.at = at

    def place(self, name: str) -> str:
        return f"{self.at}.{name}" if self.at else name

    def expect_type(self, name: str) -> None:
        if self.given.get("type") != name:
            reject(self.place("type"), f"must be {name!r}, got {shown(self.given.get('type'))}")
        del self.given["type"]

    def take(self, name: str) -> Any:
        if name not in self.given:
            reject(self.at, f"needs {name}")
        return self.given.pop(name)

    def text(self, name: str, *, empty: bool = False) -> str:
        return check_text(self.take(name), self.place(name), empty=empty)

    def flag(self, name: str) -> bool:
        value = self.given.pop(name, False)
        if not isinstance(value, bool):
            reject(self.place(name), f"must be true or false, got {shown(value)}")
        return value

    def number(self, name: str, minimum: int) -> int:
        value = self.take(name)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= 10**9:
            reject(self.place(name), f"must be an integer >= {minimum}, got {shown(value)}")
        return value

    def items(self, name: str, *, empty: bool = False) -> list[tuple[Any, str]]:
        """Return the items of a list with their places."""
        value = self.take(name)
        if not isinstance(value, list | tuple) or not (value or empty):
            reject(self.place(name), f"must be a non-empty list, got {shown(value)}")
        return [(item, f"{self.place(name)}[{index}]") for index, item in enumerate(value)]

    def texts(self, name: str, *, optional: bool = False) -> tuple[str, ...]:
        if optional and name not in self.given:
            return ()
        return tuple(check_text(item, at) for item, at in self.items(name, empty=optional))

    def done(self, kind: Callable[..., T], **values: Any) -> T:
        """Reject the fields that were not read, and return the format."""
        for name in self.given:
            reject(self.at, f"unknown field {shown(name)}")
        return kind(self.at, **values)


def check_text(value: Any, at: str, *, empty: bool = False) -> str:
    """Return a value if it is a string of valid Unicode without NUL."""
    if not isinstance(value, str) or not (value or empty):
        reject(at, f"must be a {'' if empty else 'non-empty '}string, got {shown(value)}")
    if fault := fault_of(value):
        reject(at, fault)
    return str.__str__(value)


def fault_of(text: str) -> str | None:
    """Return why a text has characters that no output has, or None."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"is not valid Unicode: {error.reason} at {error.start}"
    return "must not contain the character NUL" if "\0" in text else None


MAX_NESTING: Final = 32
"""Maximum nesting of formats."""


def parse_structural_tag(document: Any) -> Format:
    """Return the format of a document. Raises ParameterError, which names the place of the error."""
    fields = Fields(document, "")
    if "structures" in fields.given or "triggers" in fields.given:
        fields.given.setdefault("type", FIELD)
        fields.expect_type(FIELD)
        tags = tuple(_structure(item, at) for item, at in fields.items("structures"))
        return fields.done(TriggeredTags, triggers=fields.texts("triggers"), tags=tags)
    fields.expect_type(FIELD)
    if "format" not in fields.given:
        reject("", "needs a format, or structures and triggers")
    found = _format(fields.given.pop("format"), "format", 1)
    fields.done(Format)
    return found


def format_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format of a valid document as JSON; that of the older form as ``triggered_tags``."""
    if "structures" not in document:
        return dict(document["format"])
    tags = []
    for one in document["structures"]:
        content = {"type": "json_schema", "json_schema": one["schema"]}
        tags.append({"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]})
    return {"type": "triggered_tags", "triggers": document["triggers"], "tags": tags}


def _format(value: Any, at: str, depth: int) -> Format:
    if depth > MAX_NESTING:
        reject("", f"formats are nested more than {MAX_NESTING} levels deep")
    fields = Fields(value, at)
    kind = fields.given.pop("type", None)
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        reject(fields.place("type"), f"must be one of {', '.join(_READERS)}, got {shown(kind)}")
    return read(fields, depth + 1)


def _formats(fields: Fields, depth: int) -> tuple[Format, ...]:
    return tuple(_format(item, at, depth) for item, at in fields.items("elements"))


def _tags(fields: Fields, depth: int) -> tuple[Tag, ...]:
    found = []
    for item, at in fields.items("tags"):
        tag = Fields(item, at)
        tag.given.setdefault("type", "tag")
        tag.expect_type("tag")
        found.append(_tag(tag, depth))
    return tuple(found)


def _json_schema(fields: Fields, _depth: int) -> Format:
    schema = _schema(fields, "json_schema")
    if (style := fields.given.pop("style", "json")) != "json":
        reject(fields.place("style"), f"must be 'json', got {shown(style)}")
    if fields.flag("any_order"):
        reject(fields.place("any_order"), "must be false: properties are in the order of the schema")
    return fields.done(JsonSchema, schema=schema)


def _schema(fields: Fields, name: str) -> Mapping[str, Any] | bool:
    schema = fields.take(name)
    if not isinstance(schema, Mapping | bool):
        reject(fields.place(name), f"must be an object, true or false, got {shown(schema)}")
    return schema


def _repeat(low: int, high: int | None) -> Callable[[Fields, int], Format]:
    def read(fields: Fields, depth: int) -> Format:
        content = _format(fields.take("content"), fields.place("content"), depth)
        return fields.done(Repeat, content=content, low=low, high=high)

    return read


def _repeat_counted(fields: Fields, depth: int) -> Format:
    low, high = fields.number("min", 0), fields.number("max", -1)
    if high != -1 and high < max(low, 1):
        reject(fields.place("max"), f"must be -1 or at least {max(low, 1)}, got {high}")
    return _repeat(low, None if high == -1 else high)(fields, depth)


def _tag(fields: Fields, depth: int) -> Tag:
    begin = _text_or_token(fields.take("begin"), fields.place("begin"))
    content = _format(fields.take("content"), fields.place("content"), depth)
    return fields.done(Tag, begin=begin, content=content, ends=_ends(fields))


def _ends(fields: Fields) -> tuple[str | Token, ...]:
    value, at = fields.take("end"), fields.place("end")
    given = value if isinstance(value, list | tuple) else [value]
    ends = tuple(_text_or_token(item, f"{at}[{index}]" if given is value else at) for index, item in enumerate(given))
    if not ends or ("" in ends and len(ends) > 1):
        reject(at, 'must be a string, a token, or a list of them; "" only alone')
    return ends


def _text_or_token(value: Any, at: str) -> str | Token:
    if isinstance(value, Mapping):
        fields = Fields(value, at)
        fields.expect_type("token")
        return _token(fields, 0)
    return check_text(value, at, empty=True)


def _token(fields: Fields, _depth: int) -> Token:
    value = fields.take("token")
    if not isinstance(value, int | str) or isinstance(value, bool) or value == "" or value in range(-100, 0):
        reject(fields.place("token"), f"must be a token id or the text of a token, got {shown(value)}")
    found: Token = fields.done(Token, token=value)
    return found


def _token_triggered(fields: Fields, depth: int) -> Format:
    given = [(Fields({"token": item}, at), at) for item, at in fields.items("trigger_tokens")]
    return _triggered(fields, depth, tuple(Token(at, _token(token, 0).token) for token, at in given))


def _triggered(fields: Fields, depth: int, triggers: tuple[str | Token, ...] | None = None) -> Format:
    triggers = fields.texts("triggers") if triggers is None else triggers
    options = _options_of_tags(fields, depth)
    excludes = fields.texts("excludes", optional=True)
    return fields.done(TriggeredTags, triggers=triggers, excludes=excludes, **options)


def _separated(fields: Fields, depth: int) -> Format:
    options = _options_of_tags(fields, depth)
    return fields.done(TagsWithSeparator, separator=fields.text("separator", empty=True), **options)


def _options_of_tags(fields: Fields, depth: int) -> dict[str, Any]:
    flags = {name: fields.flag(name) for name in ("at_least_one", "stop_after_first")}
    return {"tags": _tags(fields, depth), **flags}


def _structure(value: Any, at: str) -> Tag:
    """Read one of the ``structures`` of the older form."""
    fields = Fields(value, at)
    return fields.done(
        Tag,
        content=JsonSchema(fields.place("schema"), _schema(fields, "schema")),
        begin=fields.text("begin"),
        ends=(fields.text("end", empty=True),),
    )


_READERS: Final[Mapping[str, Callable[[Fields, int], Format]]] = {
    "const_string": lambda fields, _: fields.done(ConstString, value=fields.text("value", empty=True)),
    "json_schema": _json_schema,
    "regex": lambda fields, _: fields.done(Regex, pattern=fields.text("pattern")),
    "grammar": lambda fields, _: fields.done(Grammar, grammar=fields.text("grammar")),
    "any_text": lambda fields, _: fields.done(AnyText, excludes=fields.texts("excludes", optional=True)),
    "token": _token,
    "sequence": lambda fields, depth: fields.done(Sequence, elements=_formats(fields, depth)),
    "or": lambda fields, depth: fields.done(Or, elements=_formats(fields, depth)),
    "optional": _repeat(0, 1),
    "star": _repeat(0, None),
    "plus": _repeat(1, None),
    "repeat": _repeat_counted,
    "tag": _tag,
    "triggered_tags": _triggered,
    "token_triggered_tags": _token_triggered,
    "tags_with_separator": _separated,
}
