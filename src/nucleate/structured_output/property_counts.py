"""Rewrites ``minProperties`` and ``maxProperties`` of objects with optional properties.

llguidance counts only if all declared properties are required. So the counts become alternatives, in each of which the
declared properties are required or forbidden as far as it matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, islice
from typing import Any, Final, cast

from nucleate.structured_output.json_schema import SchemaLocation

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
