"""What a request may ask of the form of its text, as a value. Knows no engine, and not whether it can be done."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, cast, get_args

from nucleate.parameters.converters import register, shown
from nucleate.parameters.parameter import ParameterError, read_json, unknown

Policy = Literal["strict", "coerce", "lenient"]
Whitespace = Literal["bounded", "compact"]
FORMS = ("json_schema", "json_object", "regex", "choice", "grammar")
"""The fields of which a request says exactly one."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The form of an answer: frozen, hashable, equal if it was written the same. Exactly one of the first five is set.

    ``json_schema``: a JSON schema, an object or its JSON text; kept as text, since the order of its properties is the
    order in which they are written. ``json_object``: any JSON object. ``regex``: an expression that the whole text
    matches, in the syntax of Rust's ``regex`` crate, without look-around. ``choice``: the texts there are.
    ``grammar``: Lark, in the dialect of llguidance, or GBNF (which has ``::=``).

    ``policy`` says what to do with keywords of a schema that cannot be held: ``strict`` refuses them; ``coerce`` is
    strict but takes ``oneOf`` for ``anyOf``; ``lenient`` ignores and lists them. ``whitespace`` between the tokens of
    JSON: ``bounded`` is a space, or a line break and up to 16 spaces or 8 tabs; ``compact`` is none.

    Raises ParameterError, which names the field, for values that have no such form. What can be compiled is not checked
    here.
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    policy: Policy = "strict"
    whitespace: Whitespace = "bounded"

    def __post_init__(self) -> None:
        for name, convert in _CONVERT.items():
            object.__setattr__(self, name, convert(name, getattr(self, name)))
        said = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(said) != 1:
            got = f"got {' and '.join(said)}" if said else "got none"
            raise ParameterError(said[1] if said else "structured", f"say exactly one of {', '.join(FORMS)}; {got}")
        if self.policy != "strict" and self.form != "json_schema":
            raise ParameterError("policy", f"policy {self.policy} is for json_schema, not for {self.form}")
        if self.whitespace != "bounded" and not self.form.startswith("json"):
            raise ParameterError("whitespace", f"whitespace is for JSON, not for {self.form}")

    @property
    def form(self) -> str:
        """Which of FORMS is set."""
        return next(name for name in FORMS if getattr(self, name) not in (None, False))

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema as an object; of ``json_object``, the one that any object fulfils."""
        if self.json_schema is None:
            return {"type": "object"}
        return cast("dict[str, Any]", json.loads(self.json_schema))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values of what is said."""
        said = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if self.json_schema is not None:
            said["json_schema"] = self.schema
        return {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()}

    def to_json(self) -> str:
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
        values = read_json(text, "structured")
        if not isinstance(values, dict):
            raise ParameterError("structured", f"structured must be a JSON object, got {shown(values)}")
        return cls.from_dict(values)


def _schema(name: str, value: object) -> str | None:
    if value is None:
        return None
    given = read_json(_text(name, value) or "", name) if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise ParameterError(name, f"{name} must be a JSON object or its text, got {shown(value)}")
    try:
        text = json.dumps(given, allow_nan=False, separators=(",", ":"))
        same = json.loads(text) == given
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ParameterError(name, f"{name} must be JSON: {str(error)[:100]}") from None
    if not same:  # keys that are no strings, tuples
        raise ParameterError(name, f"{name} must be of JSON's own types: objects with string keys, lists")
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
    """A plain string that can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(name, f"{name} is not valid Unicode: {error.reason} at {error.start}") from None
    if "\0" in text:
        raise ParameterError(name, f"{name} must not contain the character NUL")
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


_CONVERT: Mapping[str, Callable[[str, Any], Any]] = {
    "json_schema": _schema,
    "json_object": _switch,
    "regex": _text,
    "choice": _texts,
    "grammar": _text,
    "policy": partial(_one_of, Policy),
    "whitespace": partial(_one_of, Whitespace),
}


def _from_mapping(value: Any) -> StructuredOutputs:
    if not isinstance(value, Mapping):
        raise TypeError
    return StructuredOutputs.from_dict(value)


register(StructuredOutputs, _from_mapping, "a Structured or a mapping of its fields")
