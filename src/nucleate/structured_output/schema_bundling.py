"""Copies the enforced part of a prepared schema, as the grammar engine reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nucleate.structured_output.json_schema import LIST, NAMED, ONE, SUPPORTED, TARGETS, subschemas

_OBJECT_KEYWORDS: Final = (
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "minProperties",
    "maxProperties",
)


def bundle(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a prepared schema with enforced keywords only, and with referenced schemas under ``$defs``."""
    used = dict.fromkeys(location.schema["$ref"] for location in subschemas(root) if "$ref" in location.schema)
    targets = {pointer: root[TARGETS][pointer] for pointer in used}
    names = {pointer: f"d{index}" for index, pointer in enumerate(targets)}
    references = {pointer: "#" if targets[pointer] is root else f"#/$defs/{name}" for pointer, name in names.items()}
    made: dict[str, Any] = _copy(root, references)
    definitions = {
        name: _copy(targets[pointer], references) for pointer, name in names.items() if targets[pointer] is not root
    }
    return {**made, "$defs": definitions} if definitions else made


def _copy(schema: Any, references: Mapping[str, str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for keyword in _ordered(schema):
        value = schema[keyword]
        if keyword == "$ref":
            made[keyword] = references[value]
        elif keyword in NAMED and isinstance(value, dict):
            made[keyword] = {name: _copy(child, references) for name, child in value.items()}
        elif keyword in LIST and isinstance(value, list):
            made[keyword] = [_copy(child, references) for child in value]
        elif keyword in SUPPORTED:
            made[keyword] = _copy(value, references) if keyword in ONE else value
    return made


def _ordered(schema: Mapping[str, Any]) -> list[str]:
    """Return the keywords in their order, except that those of objects are together.

    llguidance applies the keywords before and after ``anyOf`` separately, but those of objects depend on each other.
    """
    of_objects = [keyword for keyword in _OBJECT_KEYWORDS if keyword in schema]
    found: list[str] = []
    for keyword in schema:
        if keyword not in _OBJECT_KEYWORDS:
            found.append(keyword)
        elif of_objects:
            found += of_objects
            of_objects = []
    return found
