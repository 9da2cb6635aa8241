"""Parses the structured-output constraint of a request body: ``response_format``, ``structured_outputs``, ``grammar``.

``response_format`` is OpenAI's field, ``structured_outputs`` has vLLM's fields and those of ``StructuredOutputs``, and
``grammar`` is llama.cpp's. A body may set one of the three. null counts as absent, also inside them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NamedTuple

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.server.openai.fields import invalid_value, json_equal, unknown_field
from nucleate.structured_output.spec import KINDS, StructuredOutputs

RESPONSE_FORMAT, STRUCTURED_OUTPUTS = "response_format", "structured_outputs"
GRAMMAR, GRAMMAR_LAZY, GRAMMAR_TRIGGERS = GRAMMAR_FIELDS = ("grammar", "grammar_lazy", "grammar_triggers")
FORMAT_FIELDS = (RESPONSE_FORMAT, STRUCTURED_OUTPUTS, *GRAMMAR_FIELDS)
"""The body fields that set a constraint."""
TYPES = ("text", "json_object", "json_schema", "structural_tag")
"""The values of ``response_format.type``."""
JSON, COMPACT = "json", "disable_any_whitespace"
"""vLLM's names for ``json_schema`` and for ``whitespace="none"``."""
OUTPUT_FIELDS = (JSON, *(field.name for field in fields(StructuredOutputs)), COMPACT)
"""The supported fields of ``structured_outputs``."""
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "disable_fallback": (False, True),  # there is no fallback
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
    }
)
"""Unsupported fields of vLLM's ``structured_outputs``, and the no-op values that are accepted."""
RENAMED = {
    f"guided_{name}": f"{STRUCTURED_OUTPUTS}.{name}" for name in (JSON, "regex", "choice", "grammar", "json_object")
}
"""Fields of older versions of vLLM, and their current names."""
NAME = "[a-zA-Z0-9_-]{1,64}"
"""The pattern of a schema's name."""

_SPEC_FIELDS = tuple(field.name for field in fields(StructuredOutputs))
_NO_PATHS: Mapping[str, str] = MappingProxyType({})


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
    given = _object(value, RESPONSE_FORMAT, ("type", "json_schema"))
    kind = given.get("type")
    if kind not in TYPES:
        raise ParameterError(
            RESPONSE_FORMAT, f"{RESPONSE_FORMAT}.type must be one of {', '.join(TYPES)}, got {shown(kind)}"
        )
    if kind == "json_schema":
        return _json_schema(given.get("json_schema"))
    if "json_schema" in given:
        raise ParameterError(
            RESPONSE_FORMAT, f"{RESPONSE_FORMAT}.json_schema needs {RESPONSE_FORMAT}.type to be json_schema"
        )
    return RequestedFormat(RESPONSE_FORMAT, StructuredOutputs(json_object=True) if kind == "json_object" else None)


def _json_schema(value: Any) -> RequestedFormat:
    at = f"{RESPONSE_FORMAT}.json_schema"
    given = _object(value, RESPONSE_FORMAT, ("name", "schema", "strict", "description"), at)
    name, schema, strict = given.get("name"), given.get("schema"), given.get("strict", True)
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise invalid_value(f"{at}.name", "1 to 64 letters, digits, - and _", name, RESPONSE_FORMAT)
    if not isinstance(strict, bool):
        raise invalid_value(f"{at}.strict", "true or false", strict, RESPONSE_FORMAT)
    if not isinstance(given.get("description", ""), str):
        raise invalid_value(f"{at}.description", "a string", given["description"], RESPONSE_FORMAT)
    if not isinstance(schema, Mapping):
        raise invalid_value(f"{at}.schema", "an object", schema, RESPONSE_FORMAT)
    found = RequestedFormat(RESPONSE_FORMAT, None, {"json_schema": "json_schema.schema"})
    with translate_errors(found):
        made = StructuredOutputs(json_schema=schema, on_unsupported="error" if strict else "ignore")  # type: ignore[arg-type]
    return found._replace(structured_outputs=made)


def _structured_outputs(value: Any) -> RequestedFormat:
    given = _object(value, STRUCTURED_OUTPUTS, (*OUTPUT_FIELDS, *UNSUPPORTED))
    for name, accepted in UNSUPPORTED.items():
        if name in given and not any(json_equal(given[name], one) for one in accepted):
            raise ParameterError(
                STRUCTURED_OUTPUTS, f"{STRUCTURED_OUTPUTS}.{name} is not supported, got {shown(given[name])}"
            )
        given.pop(name, None)
    if not isinstance(given.get(COMPACT, False), bool):
        raise invalid_value(f"{STRUCTURED_OUTPUTS}.{COMPACT}", "true or false", given[COMPACT], STRUCTURED_OUTPUTS)
    kinds = [name for name in (JSON, *KINDS) if name in given and not (name == "json_object" and given[name] is False)]
    if len(kinds) != 1:
        got = f"got {' and '.join(kinds)}" if kinds else "got none"
        raise ParameterError(
            STRUCTURED_OUTPUTS, f"{STRUCTURED_OUTPUTS} must have exactly one of {', '.join((JSON, *KINDS))}; {got}"
        )
    paths = {}
    if JSON in given:
        given["json_schema"], paths["json_schema"] = given.pop(JSON), JSON
    if given.pop(COMPACT, False):
        if given.get("whitespace", "none") != "none":
            raise ParameterError(
                STRUCTURED_OUTPUTS,
                f"{STRUCTURED_OUTPUTS}.{COMPACT} contradicts whitespace {shown(given['whitespace'])}",
            )
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


def _object(value: Any, field: str, known: Collection[str], at: str = "") -> dict[str, Any]:
    """Return the entries of an object that are not null. at: its place in the body, if not the field itself."""
    if not isinstance(value, Mapping):
        raise invalid_value(at or field, "an object", value, field)
    for name in value:
        if name not in known:
            raise ParameterError(field, str(unknown_field(name, known, at or field)))
    return {name: item for name, item in value.items() if item is not None}
