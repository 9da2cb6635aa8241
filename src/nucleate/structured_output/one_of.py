"""Rewrites ``oneOf`` as ``anyOf``, if its alternatives are disjoint or can be made disjoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import combinations
from math import inf
from typing import Any, Final

from nucleate.structured_output.json_schema import SchemaLocation
from nucleate.structured_output.schema_negation import CannotNegateError, negation, types_of

_MAX_ALTERNATIVES: Final = 64
"""Maximum number of alternatives for comparing each with each other."""
_MAX_DEPTH: Final = 8
_SIZES: Final = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}

Schema = Mapping[str, Any]


def any_of_alternatives(schema: Schema, root: Schema) -> list[Any] | None:
    """Return alternatives for ``anyOf`` that are equivalent to ``oneOf`` of a schema, or None if there are none."""
    given = schema["oneOf"]
    if not isinstance(given, list) or not given:
        return None
    values = [_values(_conjuncts(each, root)) for each in given]
    keys = [_key(value) for each in values if each is not None for value in each]
    if None not in values and len(set(keys)) == len(keys):
        return given
    if len(given) > _MAX_ALTERNATIVES:
        return None
    rest = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
    overlaps = [
        (one, other)
        for one, other in combinations(range(len(given)), 2)
        if not disjoint({"allOf": [rest, given[one]]}, given[other], root)
    ]
    others: dict[int, list[Any]] = {index: [] for index in range(len(given))}
    try:
        for pair in overlaps:
            for one, other in (pair, pair[::-1]):
                types = _types(_conjuncts({"allOf": [rest, given[one]]}, root))
                others[one].append(negation(given[other], root, types))
    except CannotNegateError:
        return None
    return [
        {"allOf": [alternative, *others[index]]} if others[index] else alternative
        for index, alternative in enumerate(given)
    ]


def disjoint(one: Any, other: Any, root: Schema, depth: int = 0) -> bool:
    """Return whether two schemas obviously have no value in common."""
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > _MAX_DEPTH:
        return False
    first, second = _conjuncts(one, root), _conjuncts(other, root)
    for conjuncts, against in ((first, other), (second, one)):
        for part in conjuncts:
            for keyword in ("anyOf", "oneOf"):
                alternatives = part.get(keyword)
                given = isinstance(alternatives, list) and alternatives
                if given and all(disjoint(each, against, root, depth + 1) for each in given):
                    return True
    both = [*first, *second]
    values = _values(both)
    if values is not None:
        allowed = [set(map(_key, known)) for part in both if (known := _values([part])) is not None]
        common = [value for value in values if all(_key(value) in keys for keys in allowed)]
        return all(any(_rejects(part, value, root) for part in both) for value in common)
    return all(_disjoint_type(kind, first, second, root, depth) for kind in _types(both))


def _disjoint_type(kind: str, first: list[Schema], second: list[Schema], root: Schema, depth: int) -> bool:
    both = [*first, *second]
    if kind == "number":
        return _empty_range(both)
    if kind not in _SIZES:
        return False
    least, most = _SIZES[kind]
    if max(_numbers(both, least), default=0) > min(_numbers(both, most), default=inf):
        return True
    if kind != "object":
        return False
    names = {name for part in both for name in part.get("required", ()) if isinstance(name, str)}
    return any(
        disjoint(_property(one, name), _property(other, name), root, depth + 1)
        for name in names
        for one in first
        for other in second
    )


def _conjuncts(schema: Any, root: Schema) -> list[Schema]:
    """Return schemas that all hold where a schema holds: itself, and those under ``allOf`` and ``$ref``."""
    found: list[Schema] = []
    stack, seen = [schema], set()
    while stack and len(found) < 64:
        part = stack.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        found.append(part)
        location = SchemaLocation("", part)
        target = location.ref_target(root)
        stack += [*location.list_of("allOf"), *([target.schema] if target else [])]
    return found


def _types(parts: Iterable[Schema]) -> set[str]:
    return set.intersection(*(set(types_of(part)) for part in parts), set(types_of({})))


def _values(parts: Iterable[Schema]) -> list[Any] | None:
    """Return the values that ``const`` or ``enum`` allow, or None."""
    for part in parts:
        if "const" in part:
            return [part["const"]]
        if isinstance(part.get("enum"), list):
            return list(part["enum"])
    return None


def _key(value: Any) -> str:
    """Return a text that is equal for equal JSON values, if integers are written without a fraction."""
    return f'"{value}' if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _numbers(parts: Iterable[Schema], keyword: str) -> list[float]:
    given = [part.get(keyword) for part in parts]
    return [value for value in given if isinstance(value, int | float) and not isinstance(value, bool)]


def _empty_range(parts: list[Schema]) -> bool:
    low, high = max(_numbers(parts, "minimum"), default=-inf), min(_numbers(parts, "maximum"), default=inf)
    above = max(_numbers(parts, "exclusiveMinimum"), default=-inf)
    below = min(_numbers(parts, "exclusiveMaximum"), default=inf)
    return low > high or low >= below or above >= high or above >= below


def _property(schema: Schema, name: str) -> Any:
    """Return a schema that holds for a property of objects, or True."""
    declared = SchemaLocation("", schema).mapping("properties")
    if name in declared:
        return declared[name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)


_KINDS: Final = (
    (bool, "boolean"),
    (int | float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)


def _rejects(schema: Schema, value: Any, root: Schema) -> bool:
    """Return whether a schema obviously forbids a value."""
    kind = next(name for python_type, name in _KINDS if isinstance(value, python_type))
    given = schema.get("type")
    if kind not in types_of(schema) or (given == "integer" and isinstance(value, float)):
        return True
    allowed = _values([schema])
    if allowed is not None and _key(value) not in map(_key, allowed):
        return True
    if kind == "number":
        return _empty_range([schema, {"minimum": value, "maximum": value}])
    if kind in _SIZES:
        least, most = _SIZES[kind]
        if not schema.get(least, 0) <= len(value) <= schema.get(most, inf):
            return True
    if kind != "object":
        return False
    return any(name not in value for name in schema.get("required", ())) or any(
        any(_rejects(part, item, root) for part in _conjuncts(child, root)) or child is False
        for name, item in value.items()
        for child in (_property(schema, name),)
    )
