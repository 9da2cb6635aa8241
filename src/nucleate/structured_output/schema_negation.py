"""Negates JSON schemas: a schema of all values that another schema forbids, in keywords that can be enforced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from nucleate.structured_output.json_schema import SUPPORTED, UNSUPPORTED, SchemaLocation
from nucleate.structured_output.name_patterns import pattern_excluding

TYPES: Final = ("null", "boolean", "number", "string", "array", "object")
_MAX_DEPTH: Final = 12
_MAX_ALTERNATIVES: Final = 100
_OPPOSITES: Final = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
"""By keyword: its type, the opposite keyword and the difference of their values."""

Alternatives = list[dict[str, Any]]
"""Schemas of which any must hold."""


class CannotNegateError(Exception):
    """A schema has no negation in keywords that can be enforced."""


def negation(schema: Any, root: Mapping[str, Any], types: Iterable[str] = TYPES) -> Any:
    """Return the negation of a schema for values of these types: false, or a schema. Raises CannotNegateError."""
    alternatives = _alternatives(schema, root, 0)
    kept = [each for each in alternatives if _meets(each.get("type", TYPES), types)]
    return False if not kept else kept[0] if len(kept) == 1 else {"anyOf": kept}


def types_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types that the keyword ``type`` allows, with "number" for both kinds of numbers."""
    given = schema.get("type", TYPES)
    names = [name for name in (given if isinstance(given, list | tuple) else [given]) if isinstance(name, str)]
    return tuple(dict.fromkeys("number" if name == "integer" else name for name in names))


def _meets(one: Any, others: Iterable[str]) -> bool:
    return not set(types_of({"type": one})).isdisjoint(others)


def _alternatives(schema: Any, root: Mapping[str, Any], depth: int) -> Alternatives:
    if isinstance(schema, bool):
        return [] if schema else [{}]
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        raise CannotNegateError
    found: Alternatives = []
    for keyword, value in schema.items():
        if keyword in _RULES:
            found += _RULES[keyword](value, root, depth + 1)
        elif keyword in _OPPOSITES and isinstance(value, int | float):
            kind, opposite, offset = _OPPOSITES[keyword]
            if value + offset >= 0 or not offset:
                found.append({"type": kind, opposite: value + offset})
        elif keyword in SUPPORTED or keyword in UNSUPPORTED:
            raise CannotNegateError
    if len(found) > _MAX_ALTERNATIVES:
        raise CannotNegateError
    return found


def _type(value: Any, _root: Mapping[str, Any], _depth: int) -> Alternatives:
    names = types_of({"type": value})
    if "number" in names and "number" not in ([value] if isinstance(value, str) else value):
        raise CannotNegateError  # all numbers but integers
    others = [name for name in TYPES if name not in names]
    return [{"type": others}] if others else []


def _enum(values: Any, _root: Mapping[str, Any], _depth: int) -> Alternatives:
    if not isinstance(values, list) or any(isinstance(value, list | dict) for value in values):
        raise CannotNegateError
    texts = [value for value in values if isinstance(value, str)]
    numbers = sorted({value for value in values if isinstance(value, int | float) and not isinstance(value, bool)})
    booleans = {value for value in values if isinstance(value, bool)}
    kinds = {"string": texts, "number": numbers, "boolean": booleans, "null": None in values}
    found: Alternatives = [{"type": [name for name in TYPES if not kinds.get(name)]}]
    if texts:
        found.append({"type": "string", "pattern": f"^(?s:{pattern_excluding(texts)})$"})
    for low, high in zip([None, *numbers], [*numbers, None], strict=True):
        limits = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        if numbers:
            found.append({"type": "number", **{name: limit for name, limit in limits.items() if limit is not None}})
    if len(booleans) == 1:
        found.append({"const": not booleans.pop(), "type": "boolean"})
    return found


def _const(value: Any, root: Mapping[str, Any], depth: int) -> Alternatives:
    return _enum([value], root, depth)


def _required(names: Any, _root: Mapping[str, Any], _depth: int) -> Alternatives:
    return [{"type": "object", "properties": {name: False}} for name in names if isinstance(name, str)]


def _properties(children: Any, root: Mapping[str, Any], depth: int) -> Alternatives:
    return [
        {"type": "object", "properties": {name: each}, "required": [name]}
        for name, child in children.items()
        for each in _alternatives(child, root, depth)
    ]


def _additional(value: Any, _root: Mapping[str, Any], _depth: int) -> Alternatives:
    if value is True or value == {}:
        return []
    raise CannotNegateError


def _all_of(schemas: Any, root: Mapping[str, Any], depth: int) -> Alternatives:
    return [each for schema in schemas for each in _alternatives(schema, root, depth)]


def _any_of(schemas: Any, root: Mapping[str, Any], depth: int) -> Alternatives:
    parts = [_alternatives(schema, root, depth) for schema in schemas]
    return [{"allOf": [part[0] if len(part) == 1 else {"anyOf": part} for part in parts]}] if all(parts) else []


def _not(schema: Any, _root: Mapping[str, Any], _depth: int) -> Alternatives:
    return [] if schema is False else [{}] if schema is True else [schema]


def _ref(reference: Any, root: Mapping[str, Any], depth: int) -> Alternatives:
    target = SchemaLocation("", {"$ref": reference}).ref_target(root)
    if target is None:
        raise CannotNegateError
    return _alternatives(target.schema, root, depth)


_RULES: Final[Mapping[str, Callable[[Any, Mapping[str, Any], int], Alternatives]]] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "required": _required,
    "properties": _properties,
    "additionalProperties": _additional,
    "allOf": _all_of,
    "anyOf": _any_of,
    "not": _not,
    "$ref": _ref,
}
