"""Replaces the formats in a prepared schema by patterns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.formats import FORMATS
from nucleate.structured_output.json_schema import TARGETS

MAX_PATTERN_CHARACTERS: Final = 1_000_000
"""Maximum characters of all patterns of formats that are not shared: about a second of compilation."""

_PREFIX: Final = "#format-"


def replace_formats(root: dict[str, Any], schemas: Iterable[dict[str, Any]]) -> None:
    """Replace the formats of some subschemas, in place, by patterns and maximum lengths; remove unknown formats.

    Subschemas without other keywords share one referenced schema, because each pattern takes milliseconds to compile.
    Raises ParameterError if the others have too many patterns.
    """
    targets: dict[str, Any] = root.setdefault(TARGETS, {})
    characters = 0
    for schema in schemas:
        name = schema.get("format")
        if not isinstance(name, str):
            continue
        del schema["format"]
        found = FORMATS.get(name)
        if found is None:
            continue
        rules: dict[str, Any] = {"pattern": found.search_pattern}
        if found.max_length is not None:
            rules["maxLength"] = found.max_length
        if schema is not root and _can_share(schema):
            pointer = _PREFIX + name
            targets.setdefault(pointer, {"type": "string", **rules})
            reference = {"$ref": pointer}
            others = [kind for kind in schema["type"] if kind != "string"] if schema["type"] != "string" else []
            schema.clear()
            schema.update({"anyOf": [reference, {"type": others}]} if others else reference)
            continue
        characters += len(found.pattern)
        if schema.keys().isdisjoint(rules):
            schema.update(rules)
        else:
            schema["allOf"] = [*schema.get("allOf", ()), rules]
    if characters > MAX_PATTERN_CHARACTERS:
        what = f"{characters} characters in the patterns of formats beside other keywords"
        raise ParameterError(
            "json_schema", f"json_schema is too large: {what}; the maximum is {MAX_PATTERN_CHARACTERS}"
        )


def _can_share(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    only_strings = kinds == "string" or (isinstance(kinds, list) and "string" in kinds and len(kinds) <= 7)
    return only_strings and schema.keys() <= {"type", "title", "description", "default", "examples"}
