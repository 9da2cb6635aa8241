"""Copies the enforced part of a prepared schema, as the grammar engine reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

from nucleate.structured_output.json_schema import LIST, NAMED, ONE, SUPPORTED, TARGETS

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
    copier = _Copier(root)
    made: dict[str, Any] = copier.copy(root)
    definitions = {name: copier.copy(target) for name, target in copier.referenced}  # grows meanwhile
    return {**made, "$defs": definitions} if definitions else made


@final
class _Copier:
    """Copies subschemas. referenced: the names and schemas of references, in the order of their first use."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.referenced: list[tuple[str, Any]] = []
        self._root = root
        self._references: dict[str, str] = {}  # by JSON pointer into the document

    def copy(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        made: dict[str, Any] = {}
        for keyword in _ordered(schema):
            value = schema[keyword]
            if keyword == "$ref":
                made[keyword] = self._references.get(value) or self._reference(value)
            elif keyword in NAMED and isinstance(value, dict):
                made[keyword] = {name: self.copy(child) for name, child in value.items()}
            elif keyword in LIST and isinstance(value, list):
                made[keyword] = [self.copy(child) for child in value]
            elif keyword in SUPPORTED:
                made[keyword] = self.copy(value) if keyword in ONE else value
        return made

    def _reference(self, pointer: str) -> str:
        target = self._root[TARGETS][pointer]
        if target is self._root:
            self._references[pointer] = "#"
        else:
            name = f"d{len(self.referenced)}"
            self.referenced.append((name, target))
            self._references[pointer] = f"#/$defs/{name}"
        return self._references[pointer]


def _ordered(schema: Mapping[str, Any]) -> list[str]:
    """Return the keywords in their order, except that those of objects are together.

    llguidance applies the keywords before and after ``anyOf`` separately, but those of objects depend on each other.
    """
    of_objects = [keyword for keyword in _OBJECT_KEYWORDS if keyword in schema]
    if len(of_objects) < 2:
        return [*schema]
    found: list[str] = []
    for keyword in schema:
        if keyword not in _OBJECT_KEYWORDS:
            found.append(keyword)
        elif of_objects:
            found += of_objects
            of_objects = []
    return found
