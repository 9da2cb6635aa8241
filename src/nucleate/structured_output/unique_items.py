"""Rewrites ``uniqueItems`` of arrays whose items have few values as alternatives for each place in the array."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, islice, product
from math import ceil, floor
from typing import Any, Final

from nucleate.structured_output.disjoint_schemas import (
    MAX_CONJUNCTS,
    Schema,
    common_types,
    conjuncts,
    disjoint,
    rejects,
    value_key,
    values_of,
)
from nucleate.structured_output.json_schema import SUPPORTED, UNSUPPORTED, SchemaLocation
from nucleate.structured_output.schema_negation import CannotNegateError

MAX_ORDERS: Final = 128
"""Maximum number of alternatives for one array: 5 values in any order, or 9 in one order."""
MAX_ALL_ORDERS: Final = 512
"""Maximum number of alternatives for all arrays of a document: about 0.1 s of compilation."""
MAX_VALUES: Final = 64
_MAX_TUPLE: Final = 8
"""Maximum number of items whose schemas differ: they are compared in pairs."""
_MAX_STEPS: Final = 10_000
"""Maximum number of steps to find the alternatives for one array: about 10 ms."""
_MAX_DEPTH: Final = 8
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
    known = part.schema.keys() & (SUPPORTED | UNSUPPORTED) <= _KNOWN
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
