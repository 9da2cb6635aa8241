"""Parses the structured-output constraint of a request body: ``response_format``, ``structured_outputs``, ``grammar``.

``response_format`` is OpenAI's field, ``structured_outputs`` has vLLM's fields and those of ``StructuredOutputs``, and
``grammar`` is llama.cpp's. A body may set one of the three. null counts as absent, also inside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError, invalid_value
from nucleate.server.openai.fields import (
    ANY,
    ARRAY,
    BOOLEAN,
    OBJECT,
    TEXT,
    Field,
    json_equal,
    present_fields,
    unsupported,
)
from nucleate.structured_output.spec import KINDS, MAX_TRIGGERS, StructuredOutputs

RESPONSE_FORMAT, STRUCTURED_OUTPUTS = "response_format", "structured_outputs"
GRAMMAR, GRAMMAR_LAZY, GRAMMAR_TRIGGERS = GRAMMAR_FIELDS = ("grammar", "grammar_lazy", "grammar_triggers")
FORMAT_FIELDS = (RESPONSE_FORMAT, STRUCTURED_OUTPUTS, *GRAMMAR_FIELDS)
"""The body fields that set a constraint."""
DECLARED_FORMATS: Mapping[str, Field] = {
    RESPONSE_FORMAT: Field(OBJECT, "Structured output as in OpenAI's API; strict by default."),
    GRAMMAR: Field(TEXT, "A grammar in GBNF or Lark, as in llama.cpp.", "a non-empty string"),
    GRAMMAR_LAZY: Field(BOOLEAN, "Apply the grammar from a trigger on only."),
    GRAMMAR_TRIGGERS: Field(
        {**ARRAY, "items": OBJECT, "maxItems": MAX_TRIGGERS}, "With grammar_lazy: objects with type and value."
    ),
}
"""Those of them that ``SamplingParams`` does not have."""
TYPES = ("text", "json_object", "json_schema", "structural_tag")
JSON, COMPACT = "json", "disable_any_whitespace"
"""vLLM's names for ``json_schema`` and for ``whitespace="none"``."""
_SPEC_FIELDS = tuple(field.name for field in fields(StructuredOutputs))
OUTPUT_FIELDS: Mapping[str, Field] = {
    **dict.fromkeys((JSON, *_SPEC_FIELDS), ANY),
    COMPACT: Field(BOOLEAN),
    "disable_fallback": unsupported(False, True),  # there is no fallback
    "disable_additional_properties": unsupported(False),
    "whitespace_pattern": unsupported(),
}
RENAMED = {
    f"guided_{name}": f"{STRUCTURED_OUTPUTS}.{name}" for name in (JSON, "regex", "choice", "grammar", "json_object")
}
"""Fields of older versions of vLLM, and their current names."""
NAME = "[a-zA-Z0-9_-]{1,64}"
"""The pattern of a schema's name."""

_NO_PATHS: Mapping[str, str] = {}


class RequestedFormat(NamedTuple):
    """The constraint that a body sets, and where it is in the body."""

    field: str = STRUCTURED_OUTPUTS
    structured_outputs: StructuredOutputs | None = None  #: None: unconstrained, whatever the defaults are
    paths: Mapping[str, str] = _NO_PATHS  #: names inside the field that differ from those of ``StructuredOutputs``


UNCONSTRAINED = RequestedFormat()


def read_format(given: Mapping[str, Any]) -> RequestedFormat | None:
    """Return the constraint of a body, or None. Raises ParameterError, whose field is one of ``FORMAT_FIELDS``."""
    formats = [read(given[name]) for name, read in _READERS.items() if name in given]
    if not given.keys().isdisjoint(GRAMMAR_FIELDS) and (grammar := _grammar(given)):
        formats.append(grammar)
    constrained = [one for one in formats if one.structured_outputs is not None]
    if len(constrained) > 1:
        last, first = constrained[-1].field, constrained[0].field
        raise ParameterError(last, f"{last} and {first} cannot be combined")
    return next(iter([*constrained, *formats]), None)


@contextmanager
def translate_errors(requested: RequestedFormat) -> Iterator[None]:
    """Within this context, change errors of ``StructuredOutputs`` to name the field and path in the body."""
    try:
        yield
    except ParameterError as error:
        if error.field not in (*_SPEC_FIELDS, STRUCTURED_OUTPUTS) or requested.field == GRAMMAR:
            raise
        raise ParameterError(requested.field, _message(requested, error)) from None


def _message(requested: RequestedFormat, error: ParameterError) -> str:
    part, text = error.field, str(error)
    if part == STRUCTURED_OUTPUTS:
        return text if text.startswith(requested.field) else f"{requested.field}: {text}"
    path = f"{requested.field}.{requested.paths.get(part, part)}".removesuffix(".")
    strict = requested.field == RESPONSE_FORMAT and part == "json_schema" and "; set on_unsup" in text
    hint = ' (in response_format: "strict": false)' if strict else ""
    return f"{path}{text[len(part) :] if text.startswith(part) else f': {text}'}{hint}"


def _response_format(value: Any) -> RequestedFormat:
    if isinstance(value, Mapping) and value.get("type") == "structural_tag":
        found = RequestedFormat(RESPONSE_FORMAT, None, {"structural_tag": ""})
        with translate_errors(found):
            return found._replace(structured_outputs=StructuredOutputs(structural_tag=value))  # type: ignore[arg-type]
    known = ("type", "json_schema", "schema")
    given = present_fields(value, known, RESPONSE_FORMAT, RESPONSE_FORMAT, strict=True)
    kind = given.get("type")
    if kind not in TYPES:
        raise invalid_value(f"{RESPONSE_FORMAT}.type", f"one of {', '.join(TYPES)}", kind, RESPONSE_FORMAT)
    if kind == "json_schema":
        return _json_schema(given.get("json_schema"))
    if "json_schema" in given:
        message = "response_format.json_schema needs response_format.type to be json_schema"
        raise ParameterError(RESPONSE_FORMAT, message)
    if "schema" in given:  # as of llama.cpp, Together and Fireworks
        if kind != "json_object":
            raise ParameterError(RESPONSE_FORMAT, "response_format.schema needs response_format.type to be json_object")
        return _schema(Field(OBJECT).check("schema", given["schema"], RESPONSE_FORMAT), "schema")
    return RequestedFormat(RESPONSE_FORMAT, StructuredOutputs(json_object=True) if kind == "json_object" else None)


def _schema(schema: Any, path: str, *, strict: bool = True) -> RequestedFormat:
    """The constraint of a schema in ``response_format``. path: its place there."""
    found = RequestedFormat(RESPONSE_FORMAT, None, {"json_schema": path})
    with translate_errors(found):
        made = StructuredOutputs(json_schema=schema, on_unsupported="error" if strict else "ignore")
    return found._replace(structured_outputs=made)


_JSON_SCHEMA: Mapping[str, Field] = {
    "name": ANY,
    "schema": Field(OBJECT),
    "strict": Field(BOOLEAN),
    "description": Field(TEXT),
}


def _json_schema(value: Any) -> RequestedFormat:
    at = f"{RESPONSE_FORMAT}.json_schema"
    given = present_fields(value, _JSON_SCHEMA, at, RESPONSE_FORMAT, strict=True)
    name, schema, strict = given.get("name"), given.get("schema"), given.get("strict", True)
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise invalid_value(f"{at}.name", "1 to 64 letters, digits, - and _", name, RESPONSE_FORMAT)
    if schema is None:
        raise invalid_value(f"{at}.schema", "an object", schema, RESPONSE_FORMAT)
    return _schema(schema, "json_schema.schema", strict=strict)


def _structured_outputs(value: Any) -> RequestedFormat:
    given = present_fields(value, OUTPUT_FIELDS, STRUCTURED_OUTPUTS, STRUCTURED_OUTPUTS, strict=True)
    given = {name: value for name, value in given.items() if OUTPUT_FIELDS[name].is_supported}
    kinds = [name for name in (JSON, *KINDS) if name in given and not (name == "json_object" and given[name] is False)]
    if len(kinds) != 1:
        got = f"got {' and '.join(kinds)}" if kinds else "got none"
        message = f"structured_outputs must have exactly one of {', '.join((JSON, *KINDS))}; {got}"
        raise ParameterError(STRUCTURED_OUTPUTS, message)
    paths = {}
    if JSON in given:
        given["json_schema"], paths["json_schema"] = given.pop(JSON), JSON
    if given.pop(COMPACT, False):
        if given.get("whitespace", "none") != "none":
            message = f"structured_outputs.{COMPACT} contradicts whitespace {shown(given['whitespace'])}"
            raise ParameterError(STRUCTURED_OUTPUTS, message)
        given["whitespace"], paths["whitespace"] = "none", COMPACT
    found = RequestedFormat(STRUCTURED_OUTPUTS, None, paths)
    with translate_errors(found):
        return found._replace(structured_outputs=StructuredOutputs(**given))


def _grammar(given: Mapping[str, Any]) -> RequestedFormat | None:
    """Return the constraint of llama.cpp's fields; None if their values request nothing."""
    nothing: tuple[Any, ...] = ("", False, [])
    values = {
        name: given[name]
        for name, empty in zip(GRAMMAR_FIELDS, nothing, strict=True)
        if name in given and not json_equal(given[name], empty)
    }
    if values and GRAMMAR not in values:
        name = next(iter(values))
        raise ParameterError(name, f"{name} needs {GRAMMAR}")
    return RequestedFormat(GRAMMAR, StructuredOutputs(**values)) if values else None


_READERS = {RESPONSE_FORMAT: _response_format, STRUCTURED_OUTPUTS: _structured_outputs}
