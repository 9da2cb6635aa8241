"""What obviously holds for all values of a schema, and whether two schemas have no value in common."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import product
from math import inf
from typing import Any, Final

from nucleate.structured_output.json_schema import BUDGET, SUPPORTED, UNSUPPORTED, SchemaLocation, original
from nucleate.structured_output.pattern_automata import disjoint_patterns, rejects_text

TYPES: Final = ("null", "boolean", "number", "string", "array", "object")
MAX_CONJUNCTS: Final = 64
_MAX_DEPTH: Final = 8
_MAX_ITEMS: Final = 8
"""How many of the first items of two arrays are compared."""
_SIZES: Final = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}

Schema = Mapping[str, Any]


def types_of(schema: Schema) -> tuple[str, ...]:
    """Return the types that the keyword ``type`` allows, with "number" for both kinds of numbers."""
    given = schema.get("type", TYPES)
    names = [name for name in (given if isinstance(given, list | tuple) else [given]) if isinstance(name, str)]
    return tuple(dict.fromkeys("number" if name == "integer" else name for name in names))


def common_types(parts: Iterable[Schema]) -> set[str]:
    """Return the types that all schemas allow."""
    return set.intersection(set(TYPES), *(set(types_of(part)) for part in parts))


def conjuncts(schema: Any, root: Schema) -> list[Schema]:
    """Return schemas that all hold where a schema holds: itself, and those under ``allOf`` and ``$ref``."""
    found: list[Schema] = []
    stack, seen = [schema], set()
    while stack and len(found) < MAX_CONJUNCTS:
        part = stack.pop()
        if not isinstance(part, dict) or id(part := original(part)) in seen:
            continue
        seen.add(id(part))
        found.append(part)
        location = SchemaLocation("", part)
        target = location.ref_target(root)
        stack += [*location.list_of("allOf"), *([target.schema] if target else [])]
    return found


def values_of(parts: Iterable[Schema]) -> list[Any] | None:
    """Return the values that ``const`` or ``enum`` allow, or None."""
    found: list[Any] | None = None
    for part in parts:
        given = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(given, list):
            keys = set(map(value_key, given))
            found = given if found is None else [value for value in found if value_key(value) in keys]
    return found


def value_key(value: Any) -> str:
    """Return a text that is equal for equal JSON values, if integers are written without a fraction."""
    return f'"{value}' if isinstance(value, str) else json.dumps(value, sort_keys=True)


def property_schema(schema: Schema, name: str) -> Any:
    """Return a schema that holds for a property of objects, or True."""
    declared = SchemaLocation("", schema).mapping("properties")
    if name in declared:
        return declared[name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)


def joined(schemas: list[Any]) -> list[Any]:
    """Join alternatives that differ in the constants of one property only, which makes the negation shorter."""
    groups: dict[Any, list[Any]] = {}
    found: list[Any] = []
    for schema in schemas:
        key = _name_of_constants(schema)
        if key is None:
            found.append(schema)
        else:
            groups.setdefault(key, []).append(schema)
    for (name, *_), members in groups.items():
        children = [original(original(member)["properties"][name]) for member in members]
        values = [value for child in children for value in values_of([child]) or ()]
        found.append({**original(members[0]), "properties": {name: {"enum": values}}})
    return found


def _name_of_constants(schema: Any) -> tuple[str, str, str] | None:
    """Return the name of the only property of a schema, if that allows constants only, and the keywords beside it."""
    if not isinstance(schema, dict):
        return None
    given = original(schema)
    properties = SchemaLocation("", given).mapping("properties")
    if len(properties) != 1 or not given.keys() & (SUPPORTED | UNSUPPORTED) <= {"properties", "required", "type"}:
        return None
    [(name, child)] = properties.items()
    if not isinstance(child, dict) or original(child).keys() & (SUPPORTED | UNSUPPORTED) not in ({"const"}, {"enum"}):
        return None
    return name, f"{given.get('required')}", f"{given.get('type')}"


def disjoint(one: Any, other: Any, root: Schema, depth: int = 0) -> bool:
    """Return whether two schemas obviously have no value in common."""
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > _MAX_DEPTH or not root[BUDGET].try_spend(2):
        return False
    first, second = conjuncts(one, root), conjuncts(other, root)
    for parts, against in ((first, other), (second, one)):
        for part in parts:
            for keyword in ("anyOf", "oneOf"):
                alternatives = part.get(keyword)
                given = isinstance(alternatives, list) and alternatives
                if given and all(disjoint(each, against, root, depth + 1) for each in given):
                    return True
    both = [*first, *second]
    values = values_of(both)
    if values is not None:
        return all(any(rejects(part, value, root) for part in both) for value in values)
    return all(_disjoint_type(kind, first, second, root, depth) for kind in common_types(both))


def _disjoint_type(kind: str, first: list[Schema], second: list[Schema], root: Schema, depth: int) -> bool:
    both, pairs = [*first, *second], [*product(first, second)]
    if kind == "number":
        return _empty_range(both)
    if kind not in _SIZES:
        return False
    least, most = (_numbers(both, keyword) for keyword in _SIZES[kind])
    if max(least, default=0) > min(most, default=inf):
        return True
    children: Iterable[tuple[Any, Any]] = ()
    if kind == "string":
        return any(
            disjoint_patterns(*texts, root[BUDGET])
            for texts in product(_texts(first, "pattern"), _texts(second, "pattern"))
        )
    if kind == "array":
        indices = range(int(min(max(least, default=0), _MAX_ITEMS)))
        children = ((_item(one, index), _item(other, index)) for index in indices for one, other in pairs)
    if kind == "object":
        names = {name for part in both for name in part.get("required", ()) if isinstance(name, str)}
        children = (
            (property_schema(one, name), property_schema(other, name)) for name in names for one, other in pairs
        )
    return any(disjoint(one, other, root, depth + 1) for one, other in children)


def _numbers(parts: Iterable[Schema], keyword: str) -> list[float]:
    given = [part.get(keyword) for part in parts]
    return [value for value in given if isinstance(value, int | float) and not isinstance(value, bool)]


def _texts(parts: Iterable[Schema], keyword: str) -> list[str]:
    return [part[keyword] for part in parts if isinstance(part.get(keyword), str)]


def _item(schema: Schema, index: int) -> Any:
    """Return a schema that holds for an item of arrays, or True."""
    first = SchemaLocation("", schema).list_of("prefixItems")
    return first[index] if index < len(first) else schema.get("items", True)


def _empty_range(parts: list[Schema]) -> bool:
    low, high = max(_numbers(parts, "minimum"), default=-inf), min(_numbers(parts, "maximum"), default=inf)
    above = max(_numbers(parts, "exclusiveMinimum"), default=-inf)
    below = min(_numbers(parts, "exclusiveMaximum"), default=inf)
    return low > high or low >= below or above >= high or above >= below


_KINDS: Final = (
    (bool, "boolean"),
    (int | float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)


def rejects(schema: Schema, value: Any, root: Schema) -> bool:
    """Return whether a schema obviously forbids a value."""
    kind = next(name for python_type, name in _KINDS if isinstance(value, python_type))
    given, allowed = schema.get("type", kind), values_of([schema])
    fractions = "integer" not in given or (isinstance(given, list) and "number" in given)
    if kind not in types_of(schema) or (isinstance(value, float) and not fractions):
        return True
    if allowed is not None and value_key(value) not in map(value_key, allowed):
        return True
    if kind not in _SIZES:
        return kind == "number" and _empty_range([schema, {"minimum": value, "maximum": value}])
    least, most = _SIZES[kind]
    if not schema.get(least, 0) <= len(value) <= schema.get(most, inf):
        return True
    if kind == "string":
        return any(rejects_text(pattern, value, root[BUDGET]) for pattern in _texts([schema], "pattern"))
    return kind == "object" and _rejects_object(schema, value, root)


def _rejects_object(schema: Schema, value: dict[str, Any], root: Schema) -> bool:
    return any(name not in value for name in schema.get("required", ())) or any(
        any(rejects(part, item, root) for part in conjuncts(child, root)) or child is False
        for name, item in value.items()
        for child in (property_schema(schema, name),)
    )
