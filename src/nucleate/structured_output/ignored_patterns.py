"""Finds patterns in a schema that token masks do not support, and removes them."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any, Final, cast

from nucleate.structured_output.json_schema import PreparedSchema, SchemaLocation
from nucleate.structured_output.llguidance_loader import library, raise_unless_panic
from nucleate.structured_output.schema_soundness import unsupported_pattern

MAX_COMPARED_PATTERNS: Final = 40
"""Maximum number of ``patternProperties`` that are compared in pairs: about 0.1 s."""

_PREFIX = re.compile(r"\^([A-Za-z0-9_]+)(?![*+?{])")


def remove_unsupported_patterns(prepared: PreparedSchema, *, overlapping: bool) -> tuple[tuple[str, str], ...]:
    """Remove unsupported patterns from a schema, in place. Returns them as ``unsupported_keywords`` does.

    Without ``patternProperties``, every additional property is allowed. overlapping: also remove those that may match
    the same names; to compare them takes time.
    """
    removed: list[tuple[str, str]] = []
    for location in prepared.locations:
        if "pattern" not in location.schema and "patternProperties" not in location.schema:
            continue
        schema = cast("dict[str, Any]", location.schema)
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and (found := unsupported_pattern("pattern", pattern, location)):
            del schema["pattern"]
            removed.append(found)
        if found := _unsupported_names(location, overlapping):
            del schema["patternProperties"]
            schema.pop("additionalProperties", None)
            removed.append(found)
    if removed:
        prepared.update_locations()
    return tuple(removed)


def _unsupported_names(location: SchemaLocation, overlapping: bool) -> tuple[str, str] | None:
    patterns = [*location.mapping("patternProperties")]
    for pattern in patterns:
        if found := unsupported_pattern("patternProperties", pattern, location):
            return found
    if overlapping and len(patterns) > 1 and _may_overlap(patterns):
        return f"patternProperties with overlapping patterns{location.message_suffix}", ""
    return None


def _may_overlap(patterns: list[str]) -> bool:
    """Return whether two patterns may match the same name, or it is hard to tell."""
    prefixes = sorted(
        found[1] if (found := _PREFIX.match(pattern)) and "|" not in pattern else "" for pattern in patterns
    )
    if not any(after.startswith(before) for before, after in pairwise(prefixes)):
        return False
    if len(patterns) > MAX_COMPARED_PATTERNS:
        return True
    schema = {"type": "object", "patternProperties": dict.fromkeys(patterns, True), "additionalProperties": False}
    matcher = library().LLMatcher
    try:
        message = matcher.validate_grammar(matcher.grammar_from_json_schema(json.dumps(schema)))
        return "not disjoint" in message or "determine if patternProperty" in message
    except BaseException as error:  # noqa: BLE001 - a panic is no Exception
        raise_unless_panic(error)
        return False
