"""Rewrites property counts and ``uniqueItems`` as alternatives that llguidance enforces.

llguidance counts properties only if all declared ones are required. So ``minProperties`` and ``maxProperties`` become
alternatives, in each of which the declared properties are required or forbidden as far as it matters. ``uniqueItems``
of arrays whose items have few values becomes alternatives for each place in the array.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice, product
from math import ceil, floor
from typing import Any, Final, cast

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

MAX_ALTERNATIVES: Final = 32
"""Maximum number of alternatives for the counts of one object."""
_COUNTS: Final = frozenset(("minProperties", "maxProperties"))


def rewrite_property_counts(location: SchemaLocation, schema: dict[str, Any]) -> None:
    """Rewrite the counts of an object in place, if there are few alternatives. ``schema`` is the location's."""
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    if not _counts_objects(schema) or not isinstance(least, int) or not isinstance(most, int | None):
        return
    required, optional = declared_names(location)
    closed = schema.get("additionalProperties", True) is False and not location.mapping("patternProperties")
    if least <= len(required):
        schema.pop("minProperties", None)
        least = 0
    if closed and most is not None and most >= len(required) + len(optional):
        del schema["maxProperties"]
        most = None
    if not optional or (not least and most is None):
        return
    more = max(0, least - len(required))  # required of the optional ones
    room = None if most is None else most - len(required)
    if room is not None and (room < 0 or room < more):
        return  # without a valid value, which llguidance finds
    if not closed and more > 1:
        return  # additional names may be repeated
    found = _closed(optional, more, room) if closed else _open(required, optional, more, room, least, most)
    alternatives = list(islice(found, MAX_ALTERNATIVES + 1))
    if len(alternatives) > MAX_ALTERNATIVES:
        return
    schema.pop("minProperties", None)
    schema.pop("maxProperties", None)
    if not alternatives:
        schema["allOf"] = [*schema.get("allOf", ()), False]
    elif "anyOf" in schema:
        schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": alternatives}]
    else:
        schema["anyOf"] = alternatives


def unsupported_counts(location: SchemaLocation) -> Iterator[tuple[str, str]]:
    """Yield the counts that llguidance does not enforce as (``keyword at pointer``, hint)."""
    schema = location.schema
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    if not _counts_objects(schema) or not isinstance(least, int) or not isinstance(most, int | None):
        return
    required, optional = declared_names(location)
    is_open = schema.get("additionalProperties", True) is not False or location.mapping("patternProperties")
    if is_open and least > max(1, len(required) + 1):
        yield f"minProperties{location.message_suffix}", ", because names can be repeated"
    elif optional and least:
        yield f"minProperties{location.message_suffix}", f" with {len(optional)} optional properties"
    if optional and most is not None and len(required) <= most >= least:
        yield f"maxProperties{location.message_suffix}", f" with {len(optional)} optional properties"


def remove_unsupported_counts(location: SchemaLocation) -> None:
    """Remove the counts of ``unsupported_counts``, in place."""
    for keyword in [what.split(" ", 1)[0] for what, _ in unsupported_counts(location)]:
        cast("dict[str, Any]", location.schema).pop(keyword, None)


def declared_names(location: SchemaLocation) -> tuple[list[str], list[str]]:
    """Return the required names, and the names of the optional properties."""
    names = location.schema.get("required")
    required = [*dict.fromkeys(name for name in names if isinstance(name, str))] if isinstance(names, list) else []
    possible = [name for name, child in location.mapping("properties").items() if child is not False]
    return required, [name for name in possible if name not in set(required)]


def _counts_objects(schema: Mapping[str, Any]) -> bool:
    if _COUNTS.isdisjoint(schema):
        return False
    kind = schema.get("type", "object")
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def _alternative(required: tuple[str, ...], forbidden: list[str], **counts: int) -> dict[str, Any]:
    made: dict[str, Any] = {"properties": dict.fromkeys(forbidden, False)} if forbidden else {}
    return made | ({"required": [*required]} if required else {}) | counts


def _closed(optional: list[str], more: int, room: int | None) -> Iterator[dict[str, Any]]:
    """Yield alternatives: the first ``more`` of the properties that are present, and those that are absent."""
    for first in combinations(optional, more):
        end = optional.index(first[-1]) + 1 if first else 0
        before, after = [name for name in optional[:end] if name not in first], optional[end:]
        absent = 0 if room is None else max(0, len(after) - (room - more))
        for forbidden in combinations(after, absent):
            yield _alternative(first, [*before, *forbidden])


def _open(
    required: list[str], optional: list[str], more: int, room: int | None, least: int, most: int | None
) -> Iterator[dict[str, Any]]:
    """Like ``_closed``, where other properties may follow; ``more`` is 0 or 1."""
    if room is None or most is None:
        yield from (_alternative((name,), optional[:index]) for index, name in enumerate(optional))
        yield _alternative((*required,), optional, minProperties=least)
        return
    for size in range(min(room, len(optional)) + 1):
        for present in combinations(optional, size):
            counts = {"maxProperties": most} | ({"minProperties": least} if size < more else {})
            yield _alternative((*required, *present), [name for name in optional if name not in present], **counts)


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
