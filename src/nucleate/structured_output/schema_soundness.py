r"""Rewrites or rejects schemas for which llguidance would accept invalid texts.

Known cases (llguidance 1.9.1):

- An additional property may be spelled with \u escapes, so that a declared name passes as an additional one. Names that
  must match a pattern cannot be escaped. So additional properties are rewritten as ``patternProperties``.
- Repeated names are not detected: each occurrence counts as a property.
- A character class that contains every control character (or all but \n), but neither " nor \, also matches these two
  when escaped. So most control characters are removed from classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.format_rewriting import replace_formats
from nucleate.structured_output.json_schema import PreparedSchema, SchemaLocation
from nucleate.structured_output.name_patterns import NO_CONTROL, pattern_excluding
from nucleate.structured_output.pattern_syntax import unsupported_syntax, with_explicit_classes
from nucleate.structured_output.property_counts import remove_unsupported_counts, unsupported_counts
from nucleate.structured_output.schema_bundling import bundle

MAX_NAME_CHARACTERS: Final = 2_000
"""Maximum characters of all declared names for a pattern that excludes them."""
MAX_NAME_LENGTH: Final = 64
"""Maximum characters of one such name; each adds a level of nesting."""

_CHECKED: Final = frozenset(
    (
        *("properties", "patternProperties", "additionalProperties", "required", "pattern"),
        *("minProperties", "maxProperties"),
    )
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ESCAPE_OR_CLASS = re.compile(r"\\(?:[pP](?:\{[^}]*\}|.)|.)|\[", re.DOTALL)
_SAFE_CLASS = re.compile(r"\[(?!\^)(?:\\[dws]|\\[nrtfv](?!-)|\\[^a-zA-Z0-9]|[^\[\\\x00-\x1f])*\]", re.DOTALL)
_CONTROL_ESCAPE = re.compile(r"[\x00-\x1f]|\\(?:x\{?|u\{?|U\{?)[0-9a-fA-F]+|\\a", re.DOTALL)
_MAX_CONTROL_ESCAPES: Final = 20


def unsupported_combinations(locations: Iterable[SchemaLocation]) -> Iterator[tuple[str, str]]:
    """Like ``unsupported_keywords``, for what llguidance does not enforce and ``rewrite_schema`` cannot fix."""
    for location in locations:
        if _CHECKED.isdisjoint(location.schema):
            continue
        additional = location.schema.get("additionalProperties", True)
        patterns, names = location.mapping("patternProperties"), _declared_names(location)
        if additional is not False and patterns:
            yield (
                f"patternProperties{location.message_suffix}",
                " with patterns of this kind or size, unless additionalProperties is false",
            )
        elif additional is not False and location.mapping("properties") and not _can_exclude_names(additional, names):
            longest, total = max(map(len, names)), sum(map(len, names))
            limit = f"the maximum is {MAX_NAME_LENGTH}, {MAX_NAME_CHARACTERS} in total"
            hint = f" with declared names of {longest} characters, {total} in total; {limit}"
            yield f"additionalProperties{location.message_suffix}", hint
        if (patterns or _needs_name_pattern(location)) and any(map(_CONTROL.search, names)):
            yield (
                f"properties{location.message_suffix}",
                " with control characters in names, unless additionalProperties is false",
            )
        yield from unsupported_counts(location)
        for pattern in location.patterns():
            keyword = "patternProperties" if pattern in patterns else "pattern"
            if found := unsupported_pattern(keyword, pattern, location):
                yield found
            count = len(set(_CONTROL_ESCAPE.findall(pattern)))
            if count > _MAX_CONTROL_ESCAPES:
                limit = f" with {count} different control characters or escapes; the maximum is {_MAX_CONTROL_ESCAPES}"
                yield f"pattern{location.message_suffix}", limit
        if len(set(map(_llguidance_pattern, patterns))) < len(patterns):
            yield f"patternProperties{location.message_suffix}", " that match the same names"


def unsupported_pattern(keyword: str, pattern: str, location: SchemaLocation) -> tuple[str, str] | None:
    """Like ``unsupported_keywords``, for one pattern. Raises ParameterError for an invalid one."""
    found = unsupported_syntax(pattern)
    if found is None:
        return None
    if found.invalid:
        where = f"{keyword}{location.message_suffix}"
        raise ParameterError("json_schema", f"json_schema: {where}: at offset {found.position}: {found}")
    what = f"{keyword} with {found.kind}{location.message_suffix}"
    return what, f": {found.text} at offset {found.position}; {found.hint}"


def rewrite_schema(prepared: PreparedSchema) -> dict[str, Any]:
    """Return a prepared schema so that llguidance accepts no invalid text, with enforced keywords only.

    Changes the schema. References point to ``$defs``.
    """
    root = prepared.root
    open_to_escapes = _open_to_escapes(root)
    replace_formats(root, [cast("dict[str, Any]", location.schema) for location in prepared.locations])
    for location in prepared.locations:
        if _CHECKED.isdisjoint(location.schema):
            continue
        schema = cast("dict[str, Any]", location.schema)
        remove_unsupported_counts(location)
        if isinstance(schema.get("pattern"), str):
            schema["pattern"] = _llguidance_pattern(schema["pattern"])
        if location.mapping("patternProperties"):
            schema["patternProperties"] = {
                _llguidance_pattern(pattern): child for pattern, child in location.mapping("patternProperties").items()
            }
        elif _needs_name_pattern(location) and id(schema) in open_to_escapes:
            additional = schema.get("additionalProperties", True)
            pattern = (
                "^" if _allows_anything(additional) else f"^(?s:{pattern_excluding(location.mapping('properties'))})$"
            )
            schema |= {"patternProperties": {pattern: additional}, "additionalProperties": False}
    return bundle(root)


def _open_to_escapes(root: dict[str, Any]) -> set[int]:
    """Return the identities of the schemas that allow additional names, unless another schema always limits them.

    The patterns of two schemas for the same object must not overlap, so only one of them may have a pattern for them.
    """
    found: set[int] = set()
    stack: list[tuple[SchemaLocation, bool]] = [(SchemaLocation("", root), False)]
    visited: set[tuple[int, bool]] = set()
    while stack:
        location, limited = stack.pop()
        if (id(location.schema), limited) in visited:
            continue
        visited.add((id(location.schema), limited))
        if _CHECKED.isdisjoint(location.schema) and not location.has_children:
            continue
        members = [SchemaLocation("", each) for each in location.list_of("allOf") if isinstance(each, dict)]
        target = location.ref_target(root)
        targets = [target, *(each.ref_target(root) for each in members)]
        limiting = [each for each in [location, *members, *targets] if each and _limits_names(each)]
        own_limited = limited or any(each is target and each.schema is not location.schema for each in limiting)
        if not own_limited or not _allows_anything(location.schema.get("additionalProperties", True)):
            found.add(id(location.schema))
        in_place = {id(each) for name in ("allOf", "anyOf", "oneOf") for each in location.list_of(name)}
        for child in location.children():
            inner = id(child.schema) in in_place and (
                limited or any(each.schema is not child.schema for each in limiting)
            )
            stack.append((child, inner))
        stack += [(target, False)] if target else []
    return found


def _limits_names(location: SchemaLocation) -> bool:
    """Whether a schema has patterns for all names of an object that it does not declare, or allows none of them."""
    additional = location.schema.get("additionalProperties", True)
    return additional is False or (bool(location.mapping("properties")) and not _allows_anything(additional))


def _llguidance_pattern(pattern: str) -> str:
    return remove_control_characters(with_explicit_classes(pattern))


def remove_control_characters(pattern: str) -> str:
    """Remove control characters except whitespace from the character classes of a regular expression."""
    parts, done = [], 0
    while found := _ESCAPE_OR_CLASS.search(pattern, done):
        end = _class_end(pattern, found.start()) if found[0] == "[" else found.end()
        text = pattern[found.start() : end]
        if text[:2] in (r"\p", r"\P") or (text[0] == "[" and not _SAFE_CLASS.fullmatch(text)):
            text = f"[{text}&&{NO_CONTROL}]"
        parts += [pattern[done : found.start()], text]
        done = end
    return "".join(parts) + pattern[done:]


def _class_end(pattern: str, start: int) -> int:
    """Return the end of the character class that begins at ``start``."""
    depth, position = 0, start
    while position < len(pattern):
        character = pattern[position]
        position += 1 + (character == "\\")
        if character == "[":
            depth += 1
            position += pattern.startswith("^", position)
            position += pattern.startswith("]", position)  # a leading ] is a literal
        elif character == "]":
            depth -= 1
            if depth == 0:
                return position
    return len(pattern)


def _declared_names(location: SchemaLocation) -> list[str]:
    return [*location.mapping("properties"), *(name for name in location.list_of("required") if isinstance(name, str))]


def _needs_name_pattern(location: SchemaLocation) -> bool:
    """Whether additional properties are allowed and must be rewritten as a pattern."""
    additional = location.schema.get("additionalProperties", True)
    is_open = additional is not False and not location.mapping("patternProperties")
    return (
        is_open and bool(location.mapping("properties")) and _can_exclude_names(additional, _declared_names(location))
    )


def _can_exclude_names(additional: object, names: list[str]) -> bool:
    """Whether a pattern can exclude the declared names (they are short enough), or need not."""
    return _allows_anything(additional) or (
        sum(map(len, names)) <= MAX_NAME_CHARACTERS and max(map(len, names)) <= MAX_NAME_LENGTH
    )


def _allows_anything(schema: object) -> bool:
    return schema is True or schema == {}
