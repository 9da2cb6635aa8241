"""What obviously holds for all values of a schema, and whether two schemas have no value in common.

So ``uniqueItems`` of arrays whose items have few values becomes alternatives for each place in the array.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice, product
from math import ceil, floor, inf
from typing import Any, Final

from nucleate.structured_output.json_schema import BUDGET, KEYWORDS, SchemaLocation, original
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


class CannotNegateError(Exception):
    """A schema has no negation in keywords that can be enforced."""


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
    if len(properties) != 1 or not given.keys() & KEYWORDS <= {"properties", "required", "type"}:
        return None
    [(name, child)] = properties.items()
    if not isinstance(child, dict) or original(child).keys() & KEYWORDS not in ({"const"}, {"enum"}):
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
        for part, keyword in product(parts, ("anyOf", "oneOf")):
            alternatives = SchemaLocation("", part).list_of(keyword)
            if alternatives and all(disjoint(each, against, root, depth + 1) for each in alternatives):
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
    if kind == "string":
        patterns = product(_texts(first, "pattern"), _texts(second, "pattern"))
        return any(disjoint_patterns(*each, root[BUDGET]) for each in patterns)
    if kind == "array":
        indices = range(int(min(max(least, default=0), _MAX_ITEMS)))
        children = ((_item(one, index), _item(other, index)) for index in indices for one, other in pairs)
    else:
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


MAX_ORDERS: Final = 128
"""Maximum number of alternatives for one array: 5 values in any order, or 9 in one order."""
MAX_ALL_ORDERS: Final = 512
"""Maximum number of alternatives for all arrays of a document: about 0.1 s of compilation."""
MAX_VALUES: Final = 64
_MAX_TUPLE: Final = 8
"""Maximum number of items whose schemas differ: they are compared in pairs."""
_MAX_STEPS: Final = 10_000
"""Maximum number of steps to find the alternatives for one array: about 10 ms."""
_KNOWN: Final = frozenset(
    (
        *("type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    )
)

_Values = dict[str, Any]
"""Values by their keys."""
_Boxes = Iterator[dict[int, _Values]]
"""Alternatives: the values of each place, which are disjoint."""


def unique_arrays(schema: Schema, root: Schema) -> list[dict[str, Any]] | None:
    """Return schemas of which one holds for each array of different items, or None if there would be too many.

    Where all orders are too many, the arrays have their items in the order of the values.
    """
    first, rest = SchemaLocation("", schema).list_of("prefixItems"), schema.get("items", True)
    least, most = schema.get("minItems", 0), schema.get("maxItems", MAX_VALUES)
    more = _values(rest, root) if most > len(first) else {}
    length = min(most, len(first) + (MAX_VALUES if more is None else len(more)))
    if length > (_MAX_TUPLE if first else MAX_VALUES) or (not first and more is None and length > _MAX_TUPLE):
        return None
    places = [*first, *[rest] * length][:length]
    if not first and more is not None:
        return _same_places(rest, more, length, least)
    return _places(places, root)


def _same_places(item: Any, values: _Values, length: int, least: int) -> list[dict[str, Any]] | None:
    """Return the alternatives of an array with the same values in each place."""
    places = [item] * length
    if not values:
        return [{"type": "array", "maxItems": 0}]
    allowed = [values] * length
    found = [*islice(_boxes(range(length), values, allowed, ordered=False), MAX_ORDERS + 1)]
    if len(found) <= MAX_ORDERS:  # each shorter array is the beginning of one of these
        return [_array(places, box) for box in found]
    if least >= length:
        return None  # the order is all that such an array says
    sizes = range(max(least, 1), length + 1)
    ordered = (box for size in sizes for box in _boxes(range(size), values, allowed, ordered=True))
    found = [*islice(ordered, MAX_ORDERS)]
    empty = [{"type": "array", "maxItems": 0}] if least == 0 else []
    if len(found) == MAX_ORDERS:
        return None
    return [*empty, *({**_array(places[: len(box)], box), "minItems": len(box)} for box in found)]


def _places(places: list[Any], root: Schema) -> list[dict[str, Any]] | None:
    """Return the alternatives of an array with other items in each place."""
    pairs = combinations(range(len(places)), 2)
    equal = {place for pair in pairs if not disjoint(places[pair[0]], places[pair[1]], root) for place in pair}
    known = {place: _values(places[place], root) for place in equal}
    allowed = [known.get(place) or {} for place in range(len(places))]
    if None in known.values():
        return None
    values = {key: value for each in allowed for key, value in each.items()}
    found: list[dict[str, Any]] = []
    for size in range(len(places) + 1):
        shared = [place for place in range(size) if place in equal]
        for box in _boxes(shared, values, allowed, ordered=False):
            found.append({**_array(places[:size], box), "minItems": size})
            if len(found) > MAX_ORDERS:
                return None
    return found if equal else [_array(places, {})]


def _array(places: Sequence[Any], box: dict[int, _Values]) -> dict[str, Any]:
    items = [{"enum": [*box[place].values()]} if place in box else each for place, each in enumerate(places)]
    return {"type": "array", "prefixItems": items, "items": False}


def _boxes(
    places: Sequence[int], values: _Values, allowed: list[_Values], *, ordered: bool, steps: list[int] | None = None
) -> _Boxes:
    """Yield the ways to give places disjoint sets of values that together have each choice of different values once.

    Each place is in one half of the values, and so on. ordered: only choices in the order of the values. steps: how
    many are left; raises CannotNegateError.
    """
    steps = [_MAX_STEPS] if steps is None else steps
    steps[0] -= 1
    if steps[0] < 0:
        raise CannotNegateError
    if len(places) <= 1:
        kept = {key: value for key, value in values.items() if not places or key in allowed[places[0]]}
        if not places or kept:
            yield dict.fromkeys(places, kept)
        return
    keys = [*values]
    middle = len(keys) // 2
    left, right = ({key: values[key] for key in half} for half in (keys[:middle], keys[middle:]))
    for size in range(max(0, len(places) - len(right)), min(len(places), len(left)) + 1):
        for chosen in [tuple(places[:size])] if ordered else combinations(places, size):
            others = [place for place in places if place not in chosen]
            for one in _boxes(chosen, left, allowed, ordered=ordered, steps=steps):
                for other in _boxes(others, right, allowed, ordered=ordered, steps=steps):
                    yield one | other


def _values(schema: Any, root: Schema, depth: int = 0) -> _Values | None:
    """Return the values that a schema allows, or None if there are too many or it has other keywords."""
    if isinstance(schema, bool) or depth > _MAX_DEPTH:
        return {} if schema is False else None
    parts = [SchemaLocation("", part) for part in conjuncts(schema, root)]
    if len(parts) == MAX_CONJUNCTS or not all(_is_known(part, root) for part in parts):
        return None
    choices: list[set[str]] = []
    given: list[Any] | None = None
    for part, keyword in product(parts, ("anyOf", "oneOf")):
        members = [_values(member, root, depth + 1) for member in part.list_of(keyword)]
        known = [values for values in members if values is not None]
        if len(known) < len(members):
            return None
        if members:
            counts = Counter(key for values in known for key in values)
            choices.append({key for key, count in counts.items() if keyword == "anyOf" or count == 1})
            given = [value for values in known for value in values.values()] if given is None else given
    schemas = [part.schema for part in parts]
    constants = values_of(schemas)
    given = given if constants is None else constants
    given = _values_of_types(schemas) if given is None else given
    if given is None:
        return None
    found = {value_key(value): value for value in given if not any(rejects(part, value, root) for part in schemas)}
    kept = {key: value for key, value in found.items() if all(key in choice for choice in choices)}
    return kept if len(kept) <= MAX_VALUES else None


def _is_known(part: SchemaLocation, root: Schema) -> bool:
    """Whether a schema has only keywords whose values ``_values`` finds."""
    known = part.schema.keys() & KEYWORDS <= _KNOWN
    members = all(isinstance(member, dict) for member in part.list_of("allOf"))
    return known and members and ("$ref" not in part.schema or part.ref_target(root) is not None)


def _values_of_types(parts: list[Schema]) -> list[Any] | None:
    """Return the values that schemas allow by their types, or bounds of integers, and perhaps others."""
    types = common_types(parts)
    if types <= {"null", "boolean"}:
        return [*([None] if "null" in types else []), *([True, False] if "boolean" in types else [])]
    low = [part[name] for part in parts for name in ("minimum", "exclusiveMinimum") if name in part]
    high = [part[name] for part in parts for name in ("maximum", "exclusiveMaximum") if name in part]
    integers = types == {"number"} and any(part.get("type") == "integer" for part in parts)
    if not integers or not low or not high or floor(min(high)) - ceil(max(low)) > MAX_VALUES:
        return None
    return [*range(ceil(max(low)), floor(min(high)) + 1)]
