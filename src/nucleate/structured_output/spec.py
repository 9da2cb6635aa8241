"""``StructuredOutputs``: the structured-output constraint of a request, as a validated value.

``GrammarTrigger``, with the names of llama.cpp, begins a lazy grammar. ``GrammarCompiler`` checks later whether the
constraint can be enforced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain, product
from typing import Any, Final, Literal, NamedTuple, NoReturn, get_args

from nucleate.parameters.converters import register, shown
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError, read_json, unknown
from nucleate.structured_output.grammar_expressions import Characters, Choice, Expression, Repetition
from nucleate.structured_output.pattern_parser import UnknownPatternError, whole_texts
from nucleate.structured_output.structural_tag import fault_of, parse_structural_tag

TRIGGERS: Final = "grammar_triggers"
TRIGGER_TYPES: Final = ("token", "word", "pattern", "pattern_full")
"""The types of triggers; llama.cpp also has their numbers in this order."""
MAX_TRIGGERS: Final = 64
MAX_WORDS: Final = 256
MAX_CHARACTERS: Final = 10_000
"""Maximum number of words that one pattern matches, and of the characters of all."""

_ANY_TEXT = re.compile(r"(?:\[\\s\\S\]|\[\\S\\s\]|\(\?s:\.\)|\[\\w\\W\]|\[\\d\\D\])\*\??")
_ANY_TEXT_LAST = re.compile(_ANY_TEXT.pattern + "$")


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
        if isinstance(kind, int) and not isinstance(kind, bool) and kind in range(len(TRIGGER_TYPES)):
            kind = TRIGGER_TYPES[kind]
        if kind not in TRIGGER_TYPES:
            _reject(at, f"type must be one of {', '.join(TRIGGER_TYPES)}, got {shown(kind)}")
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
        is_full = self.type == "pattern_full"
        if is_full:
            text = text.removeprefix("^").removesuffix("$")
        before, after = _ANY_TEXT.match(text), _ANY_TEXT_LAST.search(text)
        if is_full and (before is None or after is None):
            _reject(at, r"a pattern_full must begin and end with any text: [\s\S]*?(...)[\s\S]*")
        if before is not None:
            text = text[before.end() : len(text) if after is None else after.start()]
        try:
            words = _limited(_words(whole_texts(text), at), at)
        except UnknownPatternError:
            _reject(at, f"has syntax that a pattern of words cannot have: {shown(text[:100])}")
        if "" in words:
            _reject(at, "must not match the empty text")
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
    raise ParameterError(TRIGGERS, f"{at}: {reason}" if at != TRIGGERS else f"{at} {reason}")


def _words(expression: Expression, at: str) -> list[str]:
    """Return the texts of a regular expression. Raises ParameterError if they are too many."""
    if isinstance(expression, Characters):
        if sum(high - low + 1 for low, high in expression.ranges) > MAX_WORDS:
            _reject(at, f"must match at most {MAX_WORDS} words")
        return [chr(code) for low, high in expression.ranges for code in range(low, high + 1)]
    parts = [_limited(_words(part, at), at) for part in expression.parts]
    if isinstance(expression, Choice):
        return [*chain.from_iterable(parts)]
    if isinstance(expression, Repetition):
        [part], low, high = parts, expression.low, expression.high
        if high is None or high - low >= MAX_WORDS or len(part) ** high > MAX_WORDS:
            _reject(at, f"must match at most {MAX_WORDS} words")
        if high * max(map(len, part), default=0) > MAX_CHARACTERS:
            _reject(at, f"must match words of at most {MAX_CHARACTERS} characters in total")
        return ["".join(each) for size in range(low, high + 1) for each in product(part, repeat=size)]
    found = [""]
    for part in parts:
        found = _limited(["".join(pair) for pair in product(found, part)], at)
    return found


def _limited(words: list[str], at: str) -> list[str]:
    if len(words) > MAX_WORDS:
        _reject(at, f"must match at most {MAX_WORDS} words")
    if sum(map(len, words)) > MAX_CHARACTERS:
        _reject(at, f"must match words of at most {MAX_CHARACTERS} characters in total")
    return list(dict.fromkeys(words))


OnUnsupported = Literal["error", "approximate", "ignore"]
Whitespace = Literal["flexible", "none"]
MAX_DIGITS: Final = 16
"""Default limit of the consecutive digits of a number in JSON."""
KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
"""The kinds of constraints. Exactly one of these fields is set."""


@with_suggestions
@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """A constraint on the output: a JSON schema, any JSON object, a regex, choices, a grammar or a structural tag.

    Frozen and hashable. Exactly one of the first six fields is set:

    - ``json_schema``: a JSON schema, as an object, true, false or a JSON text. It is kept as text, because properties
      are written in the order of the schema.
    - ``json_object``: any JSON object.
    - ``regex``: a regular expression that the whole output matches, in the syntax of Rust's ``regex`` crate, without
      look-around.
    - ``choice``: the output is one of these strings.
    - ``grammar``: a grammar in Lark (llguidance's dialect) or GBNF (detected by ``::=``).
    - ``structural_tag``: free text with structured sections, as an object ``{"type": "structural_tag", "format": ...}``
      or its JSON text; see ``structural_tag.py``. It is kept as text.

    ``grammar_lazy``: the output is any text until one of ``grammar_triggers``, and from there on a text of the grammar,
    which begins with the trigger, as in llama.cpp. Triggers are objects ``{"type", "value"}`` with the type "word",
    "token" or "pattern".

    ``on_unsupported`` selects what happens to schema keywords that cannot be enforced: ``"error"`` rejects the schema;
    ``"approximate"`` also rejects it, but treats ``oneOf`` as ``anyOf``; ``"ignore"`` skips these keywords and lists
    them in the output's ``validation``. ``strict_keywords``: an unknown keyword that looks like a misspelled one
    rejects the schema; otherwise it is ignored, as JSON Schema says, and listed there too. ``whitespace`` between JSON
    tokens: ``"flexible"`` allows a space, or a line break and up to 16 spaces or 8 tabs; ``"none"`` allows none; None
    is the default of the engine, which is flexible unless its ``json_whitespace`` says otherwise.
    ``max_digits``: maximum number of consecutive digits of a number in JSON, unless the schema requires more; 0 for no
    limit.

    Raises ParameterError, which names the field.
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    grammar_lazy: bool = False
    grammar_triggers: tuple[GrammarTrigger, ...] | None = None
    on_unsupported: OnUnsupported = "error"
    strict_keywords: bool = False
    whitespace: Whitespace | None = None
    max_digits: int = MAX_DIGITS

    def __post_init__(self) -> None:
        for name, convert in _CONVERT.items():
            object.__setattr__(self, name, convert(name, getattr(self, name)))
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = f"got {' and '.join(given)}" if given else "got none"
            message = f"structured_outputs must have exactly one of {', '.join(KINDS)}; {got}"
            raise ParameterError(given[1] if given else "structured_outputs", message)
        for name, default, kinds in _OPTIONS:
            if getattr(self, name) != default and self.kind not in kinds:
                raise ParameterError(name, f"{name} needs {' or '.join(kinds)}, got {self.kind}")
        if self.grammar_lazy and self.grammar_triggers is None:
            raise ParameterError("grammar_lazy", "grammar_lazy needs grammar_triggers")
        if self.grammar_triggers is not None and not self.grammar_lazy:
            raise ParameterError("grammar_triggers", "grammar_triggers need grammar_lazy")

    @property
    def kind(self) -> str:
        """The field that is set, one of ``KINDS``."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def schema(self) -> Any:
        """The JSON schema as an object, true or false; for ``json_object``, the schema of any object."""
        return {"type": "object"} if self.json_schema is None else json.loads(self.json_schema)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults as JSON values."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        for name in ("json_schema", "structural_tag"):
            if name in given:
                given[name] = json.loads(given[name])
        if self.grammar_triggers is not None:
            given["grammar_triggers"] = [trigger.to_dict() for trigger in self.grammar_triggers]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}

    def to_json(self) -> str:
        """Return ``to_dict`` as JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StructuredOutputs:
        """The inverse of to_dict. Raises ParameterError for a field that does not exist."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise unknown(str(name), known, "field")
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> StructuredOutputs:
        """The inverse of to_json."""
        values = read_json(text, "structured_outputs")
        if not isinstance(values, dict):
            raise ParameterError("structured_outputs", f"structured_outputs must be a JSON object, got {shown(values)}")
        return cls.from_dict(values)


_OPTIONS: Final = (
    ("on_unsupported", "error", ("json_schema", "structural_tag")),
    ("strict_keywords", False, ("json_schema", "structural_tag")),
    ("whitespace", None, ("json_schema", "json_object", "structural_tag")),
    ("grammar_lazy", False, ("grammar",)),
    ("grammar_triggers", None, ("grammar",)),
    ("max_digits", MAX_DIGITS, ("json_schema", "json_object")),
)
"""Options: their name, default, and the kinds of constraints to which they apply."""


def _tag(name: str, value: object) -> str | None:
    text = None if value is None else _schema(name, value)
    if text is not None:
        parse_structural_tag(json.loads(text))
    return text


def _schema(name: str, value: object) -> str | None:
    if value is None:
        return None
    given = read_json(_text(name, value) or "", name) if isinstance(value, str) else value
    if not isinstance(given, Mapping | bool):
        hint = ""
        if isinstance(value, type) and hasattr(value, "model_json_schema"):
            hint = f"; pass {value.__name__}.model_json_schema()"
        raise ParameterError(name, f"{name} must be a JSON object, a boolean, or its text, got {shown(value)}{hint}")
    try:
        text = json.dumps(given, allow_nan=False, separators=(",", ":"))
        same = json.loads(text) == given
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ParameterError(name, f"{name} must be JSON: {str(error)[:100]}") from None
    if not same:  # non-string keys, tuples
        raise ParameterError(name, f"{name} must have JSON types only: objects with string keys, and lists")
    return text


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ParameterError(name, f"{name} must be true or false, got {shown(value)}")
    return value


def _text(name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise ParameterError(name, f"{name} must be a non-empty string, got {shown(value)}")
    return _whole(name, value)


def _whole(name: str, text: str) -> str:
    """Check that a string can be encoded as UTF-8 and has no NUL, and return it as a plain str."""
    if fault := fault_of(text):
        raise ParameterError(name, f"{name} {fault}")
    return str.__str__(text)


def _texts(name: str, value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value or not all(isinstance(item, str) and item for item in value):
        raise ParameterError(name, f"{name} must be a non-empty list of non-empty strings, got {shown(value)}")
    return tuple(_whole(name, item) for item in value)


def _one_of(kinds: Any, name: str, value: object) -> str:
    if not isinstance(value, str) or value not in get_args(kinds):
        raise ParameterError(name, f"{name} must be one of {', '.join(get_args(kinds))}, got {shown(value)}")
    return str.__str__(value)


def _whitespace(name: str, value: object) -> str | None:
    return None if value is None else _one_of(Whitespace, name, value)


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ParameterError(name, f"{name} must be an integer >= 0, got {shown(value)}")
    return int(value)


_CONVERT: Mapping[str, Callable[[str, Any], Any]] = {
    "json_schema": _schema,
    "json_object": _switch,
    "regex": _text,
    "choice": _texts,
    "grammar": _text,
    "structural_tag": _tag,
    "grammar_lazy": _switch,
    "grammar_triggers": read_triggers,
    "on_unsupported": partial(_one_of, OnUnsupported),
    "strict_keywords": _switch,
    "whitespace": _whitespace,
    "max_digits": _count,
}


def _from_mapping(value: Any) -> StructuredOutputs:
    if not isinstance(value, Mapping):
        raise TypeError
    return StructuredOutputs.from_dict(value)


register(StructuredOutputs, _from_mapping, "a StructuredOutputs or a mapping of its fields")
