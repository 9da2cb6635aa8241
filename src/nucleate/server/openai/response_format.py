"""The form that an answer is to have, by each of the names that bodies have for it. Knows no grammar and no limits.

``response_format`` is OpenAI's, ``structured_outputs`` vLLM's, ``structured`` has the fields of ``StructuredOutputs``.
A body says at most one of them. null is, within them too, as if the field were not there."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NamedTuple

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.server.openai.fields import same, unknown_field, wrong
from nucleate.structured_output.spec import StructuredOutputs

RESPONSE, OUTPUTS, OWN = "response_format", "structured_outputs", "structured"
NAMES = (RESPONSE, OUTPUTS, OWN)
"""The fields of bodies that say a form."""
PARTS = tuple(field.name for field in fields(StructuredOutputs))
"""The fields of ``structured``."""
TYPES = ("text", "json_object", "json_schema")
"""What ``response_format.type`` may be."""
KINDS: Mapping[str, str] = MappingProxyType(
    {"json": "json_schema", **{name: name for name in ("regex", "choice", "grammar", "json_object")}}
)
"""Fields of ``structured_outputs``, one of which must be there, and what we call them."""
COMPACT = "disable_any_whitespace"
"""The field of ``structured_outputs`` for JSON without whitespace."""
IDLE: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "disable_fallback": (False, True),  # there is nothing to fall back to
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
        "structural_tag": (),
    }
)
"""Those that are refused, but for values that ask for nothing."""
OLDER = {f"guided_{name}": f"{OUTPUTS}.{name}" for name in KINDS}
"""Fields that vLLM had once, and what they are called now."""
NAME = "[a-zA-Z0-9_-]{1,64}"
"""What a schema may be called."""

_PATHS = {RESPONSE: {"json_schema": "json_schema.schema"}, OUTPUTS: {"json_schema": "json", "whitespace": COMPACT}}
_HINTS = {RESPONSE: ', which is "strict": false here', OUTPUTS: f", which the field {OWN} can say"}


class RequestedFormat(NamedTuple):
    """What a body says of the form. None: that it is free, whatever the defaults are."""

    field: str  #: of the body
    structured: StructuredOutputs | None


def read_form(given: Mapping[str, Any]) -> RequestedFormat | None:
    """What a body says of the form; None if nothing. Raises ParameterError, whose field is one of ``NAMES``."""
    said = [read(given[name]) for name, read in _READERS.items() if name in given]
    busy = [one for one in said if one.structured is not None]
    if len(busy) > 1:
        raise ParameterError(busy[1].field, f"{busy[1].field} and {busy[0].field} must not both be there")
    return next(iter([*busy, *said]), None)


@contextmanager
def named(field: str) -> Iterator[None]:
    """Within this, errors of a form are those of the field of the body that says it. All others stay as they are."""
    try:
        yield
    except ParameterError as error:
        if error.field not in (*PARTS, OWN):
            raise
        raise ParameterError(field, _told(field, error)) from None


def _told(field: str, error: ParameterError) -> str:
    """The message with the place as the body has it."""
    part, text = error.field, str(error)
    if part == OWN:
        return f"{field}: {text}"
    path = f"{field}.{_PATHS.get(field, {}).get(part, part)}"
    hint = _HINTS.get(field, "") if "; policy " in text else ""
    return f"{path}{text[len(part) :] if text.startswith(part) else f': {text}'}{hint}"


def _response(value: Any) -> RequestedFormat:
    given = _object(value, RESPONSE, ("type", "json_schema"))
    kind = given.get("type")
    if kind not in TYPES:
        raise ParameterError(RESPONSE, f"{RESPONSE}.type must be one of {', '.join(TYPES)}, got {shown(kind)}")
    if kind == "json_schema":
        return RequestedFormat(RESPONSE, _of_schema(given.get("json_schema")))
    if "json_schema" in given:
        raise ParameterError(RESPONSE, f"{RESPONSE}.json_schema needs {RESPONSE}.type to be json_schema")
    return RequestedFormat(RESPONSE, StructuredOutputs(json_object=True) if kind == "json_object" else None)


def _of_schema(value: Any) -> StructuredOutputs:
    at = f"{RESPONSE}.json_schema"
    given = _object(value, RESPONSE, ("name", "schema", "strict", "description"), at)
    name, schema, strict = given.get("name"), given.get("schema"), given.get("strict", True)
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise wrong(f"{at}.name", "1 to 64 letters, digits, - and _", name, RESPONSE)
    if not isinstance(strict, bool):
        raise wrong(f"{at}.strict", "true or false", strict, RESPONSE)
    if not isinstance(given.get("description", ""), str):
        raise wrong(f"{at}.description", "a string", given["description"], RESPONSE)
    if not isinstance(schema, Mapping):
        raise wrong(f"{at}.schema", "an object", schema, RESPONSE)
    with named(RESPONSE):
        return StructuredOutputs(json_schema=schema, policy="strict" if strict else "lenient")  # type: ignore[arg-type]


def _outputs(value: Any) -> RequestedFormat:
    given = _object(value, OUTPUTS, (*KINDS, COMPACT, *IDLE))
    for name, idle in IDLE.items():
        if name in given and not any(same(given[name], one) for one in idle):
            raise ParameterError(OUTPUTS, f"{OUTPUTS}.{name} is not supported, got {shown(given[name])}")
    for name in ("json_object", COMPACT):
        if not isinstance(given.get(name, False), bool):
            raise wrong(f"{OUTPUTS}.{name}", "true or false", given[name], OUTPUTS)
    kinds = [name for name in KINDS if name in given and not (name == "json_object" and not given[name])]
    if len(kinds) != 1:
        got = f"got {' and '.join(kinds)}" if kinds else "got none"
        raise ParameterError(OUTPUTS, f"{OUTPUTS} must have exactly one of {', '.join(KINDS)}; {got}")
    said = {KINDS[kinds[0]]: given[kinds[0]]}
    with named(OUTPUTS):
        return RequestedFormat(
            OUTPUTS, StructuredOutputs(**said, whitespace="compact" if given.get(COMPACT) else "bounded")
        )


def _own(value: Any) -> RequestedFormat:
    given = _object(value, OWN, PARTS)
    with named(OWN):
        return RequestedFormat(OWN, StructuredOutputs(**given))


_READERS = {RESPONSE: _response, OUTPUTS: _outputs, OWN: _own}


def _object(value: Any, field: str, known: Collection[str], at: str = "") -> dict[str, Any]:
    """Those fields of an object that say something. at: its place, if it is not the field itself."""
    if not isinstance(value, Mapping):
        raise wrong(at or field, "an object", value, field)
    for name in value:
        if name not in known:
            raise ParameterError(field, str(unknown_field(name, known, at or field)))
    return {name: item for name, item in value.items() if item is not None}
