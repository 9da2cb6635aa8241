r"""Rewrites or rejects schemas for which llguidance would accept invalid texts.

Known cases (llguidance 1.9.1):

- An additional property may be spelled with \u escapes, so that a declared name passes as an additional one. Names that
  must match a pattern cannot be escaped. So additional properties are rewritten as ``patternProperties``.
- Repeated names are not detected: each occurrence counts as a property.
- A character class that contains every control character (or all but \n), but neither " nor \, also matches these two
  when escaped. So most control characters are removed from classes.

Formats become patterns, and the enforced part of the schema is copied in the order in which llguidance reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, cast

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.json_schema import (
    FORMATS,
    SUPPORTED,
    TARGETS,
    PreparedSchema,
    SchemaLocation,
    with_children,
)
from nucleate.structured_output.llguidance_library import library, raise_unless_panic
from nucleate.structured_output.pattern_syntax import (
    NO_CONTROL,
    pattern_excluding,
    pattern_parts,
    unsupported_syntax,
    with_explicit_classes,
)
from nucleate.structured_output.schema_normalization import all_of, unsupported_counts

MAX_PATTERN_CHARACTERS: Final = 1_000_000
"""Maximum characters of all patterns of formats that are not shared: about a second of compilation."""

_FORMAT_PREFIX: Final = "#format-"
_BESIDE_SHARED: Final = frozenset(("type", "title", "description", "default", "examples"))


def replace_formats(root: dict[str, Any], schemas: Iterable[dict[str, Any]]) -> None:
    """Replace the formats of some subschemas, in place, by patterns and maximum lengths; remove unknown formats.

    Subschemas without other keywords share one referenced schema, because each pattern takes milliseconds to compile.
    Raises ParameterError if the others have too many patterns.
    """
    targets: dict[str, Any] = root.setdefault(TARGETS, {})
    characters = 0
    for schema in schemas:
        if not isinstance(schema.get("format"), str):
            continue
        name = schema.pop("format")
        kinds: Any = schema.get("type")
        if (found := FORMATS.get(name)) is None:
            continue
        rules: dict[str, Any] = {"pattern": found.search_pattern}
        if found.max_length is not None:
            rules["maxLength"] = found.max_length
        only_strings = kinds == "string" or (isinstance(kinds, list) and "string" in kinds and len(kinds) <= 7)
        if schema is not root and only_strings and schema.keys() <= _BESIDE_SHARED:
            pointer = _FORMAT_PREFIX + name
            targets.setdefault(pointer, {"type": "string", **rules})
            reference = {"$ref": pointer}
            others = [kind for kind in kinds if kind != "string"] if kinds != "string" else []
            schema.clear()
            schema.update({"anyOf": [reference, {"type": others}]} if others else reference)
            continue
        characters += len(found.pattern)
        if schema.keys().isdisjoint(rules):
            schema.update(rules)
        else:
            all_of(schema, rules)
    if characters > MAX_PATTERN_CHARACTERS:
        what = f"{characters} characters in the patterns of formats beside other keywords"
        message = f"json_schema is too large: {what}; the maximum is {MAX_PATTERN_CHARACTERS}"
        raise ParameterError("json_schema", message)


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
    references: dict[str, str] = {}  # by JSON pointer into the document
    referenced: list[Any] = []  # in the order of their first use

    def copied(schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        kept = {keyword: schema[keyword] for keyword in _ordered(schema) if keyword in SUPPORTED}
        if "$ref" in kept:
            kept["$ref"] = reference(kept["$ref"])
        return with_children(kept, copied)

    def reference(pointer: str) -> str:
        if pointer not in references:
            target = root[TARGETS][pointer]
            references[pointer] = "#" if target is root else f"#/$defs/d{len(referenced)}"
            if target is not root:
                referenced.append(target)
        return references[pointer]

    made: dict[str, Any] = copied(root)
    definitions = {f"d{number}": copied(target) for number, target in enumerate(referenced)}  # grows meanwhile
    return {**made, "$defs": definitions} if definitions else made


def _ordered(schema: Mapping[str, Any]) -> list[str]:
    """Return the keywords in their order, except that those of objects are together.

    llguidance applies the keywords before and after ``anyOf`` separately, but those of objects depend on each other.
    """
    given = [*schema]
    first = next((index for index, keyword in enumerate(given) if keyword in _OBJECT_KEYWORDS), 0)
    of_objects = [keyword for keyword in _OBJECT_KEYWORDS if keyword in schema]
    return [*given[:first], *of_objects, *(keyword for keyword in given[first:] if keyword not in _OBJECT_KEYWORDS)]


MAX_NAME_CHARACTERS: Final = 2_000
"""Maximum characters of all declared names for a pattern that excludes them."""
MAX_NAME_LENGTH: Final = 64
"""Maximum characters of one such name; each adds a level of nesting."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SAFE_CLASS = re.compile(r"\[(?!\^)(?:\\[dws]|\\[nrtfv](?!-)|\\[^a-zA-Z0-9]|[^\[\\\x00-\x1f])*\]", re.DOTALL)
_CONTROL_ESCAPE = re.compile(r"[\x00-\x1f]|\\(?:x\{?|u\{?|U\{?)[0-9a-fA-F]+|\\a", re.DOTALL)
_MAX_CONTROL_ESCAPES: Final = 20


def unsupported_combinations(locations: Iterable[SchemaLocation]) -> Iterator[tuple[str, str]]:
    """Like ``unsupported_keywords``, for what llguidance does not enforce and ``rewrite_schema`` cannot fix.

    Counts are removed from the schema, in place.
    """
    for location in locations:
        schema, suffix = cast("dict[str, Any]", location.schema), location.message_suffix
        additional = schema.get("additionalProperties", True)
        patterns, names = location.mapping("patternProperties"), _declared_names(location)
        if additional is not False and patterns:
            kind = " with patterns of this kind or size, unless additionalProperties is false"
            yield f"patternProperties{suffix}", kind
        elif additional is not False and location.mapping("properties") and not _can_exclude_names(additional, names):
            longest, total = max(map(len, names)), sum(map(len, names))
            limit = f"the maximum is {MAX_NAME_LENGTH}, {MAX_NAME_CHARACTERS} in total"
            hint = f" with declared names of {longest} characters, {total} in total; {limit}"
            yield f"additionalProperties{suffix}", hint
        if (patterns or _needs_name_pattern(location)) and any(map(_CONTROL.search, names)):
            yield f"properties{suffix}", " with control characters in names, unless additionalProperties is false"
        for keyword, reason in unsupported_counts(location).items():
            del schema[keyword]
            yield f"{keyword}{suffix}", reason
        for pattern in location.patterns():
            count = len(set(_CONTROL_ESCAPE.findall(pattern)))
            if count > _MAX_CONTROL_ESCAPES:
                limit = f" with {count} different control characters or escapes; the maximum is {_MAX_CONTROL_ESCAPES}"
                yield f"pattern{suffix}", limit
        if len(set(map(_llguidance_pattern, patterns))) < len(patterns):
            yield f"patternProperties{suffix}", " that match the same names"


def rewrite_schema(prepared: PreparedSchema) -> dict[str, Any]:
    """Return a prepared schema so that llguidance accepts no invalid text, with enforced keywords only.

    Changes the schema. References point to ``$defs``.
    """
    root = prepared.root
    open_to_escapes = _open_to_escapes(root)
    replace_formats(root, [cast("dict[str, Any]", location.schema) for location in prepared.locations])
    for location in prepared.locations:
        schema = cast("dict[str, Any]", location.schema)
        if isinstance(schema.get("pattern"), str):
            schema["pattern"] = _llguidance_pattern(schema["pattern"])
        if patterns := location.mapping("patternProperties"):
            schema["patternProperties"] = {_llguidance_pattern(each): child for each, child in patterns.items()}
        elif _needs_name_pattern(location) and id(schema) in open_to_escapes:
            additional = schema.get("additionalProperties", True)
            pattern = "^"
            if not _allows_anything(additional):
                pattern = f"^(?s:{pattern_excluding(location.mapping('properties'))})$"
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
    written, begun, depth = list[str](), list[str](), 0
    for part in pattern_parts(pattern):
        depth += (part.text in ("[", "[^")) - (part.negated is not None and part.text == "]")
        begun.append(part.text)
        if depth == 0:
            text = "".join(begun)
            if text[:2] in (r"\p", r"\P") or (text[0] == "[" and not _SAFE_CLASS.fullmatch(text)):
                text = f"[{text}&&{NO_CONTROL}]"
            written.append(text)
            begun.clear()
    return "".join([*written, *begun])


def _declared_names(location: SchemaLocation) -> list[str]:
    return [*location.mapping("properties"), *(name for name in location.list_of("required") if isinstance(name, str))]


def _needs_name_pattern(location: SchemaLocation) -> bool:
    """Whether additional properties are allowed and must be rewritten as a pattern."""
    additional = location.schema.get("additionalProperties", True)
    if additional is False or location.mapping("patternProperties") or not location.mapping("properties"):
        return False
    return _can_exclude_names(additional, _declared_names(location))


def _can_exclude_names(additional: object, names: list[str]) -> bool:
    """Whether a pattern can exclude the declared names (they are short enough), or need not."""
    short = sum(map(len, names)) <= MAX_NAME_CHARACTERS and max(map(len, names)) <= MAX_NAME_LENGTH
    return short or _allows_anything(additional)


def _allows_anything(schema: object) -> bool:
    return schema is True or schema == {}


def remove_unsupported_patterns(prepared: PreparedSchema, *, overlapping: bool) -> tuple[tuple[str, str], ...]:
    """Remove unsupported patterns from a schema, in place. Returns them as ``unsupported_keywords`` does.

    Without ``patternProperties``, every additional property is allowed. overlapping: also remove those that may match
    the same names; to compare them takes time.
    """
    removed: list[tuple[str, str]] = []
    for location in prepared.locations:
        schema = cast("dict[str, Any]", location.schema)
        for keyword in [each for each in ("pattern", "patternProperties") if each in schema]:
            if found := _unsupported_patterns(keyword, location, overlapping):
                removed.append(found)
                del schema[keyword]
                if keyword == "patternProperties":
                    schema.pop("additionalProperties", None)
    if removed:
        prepared.update_locations()
    return tuple(removed)


def _unsupported_patterns(keyword: str, location: SchemaLocation, overlapping: bool) -> tuple[str, str] | None:
    """Return the first unsupported pattern under a keyword. Raises ParameterError for an invalid one."""
    given, suffix = location.schema[keyword], location.message_suffix
    patterns = [given] if isinstance(given, str) else [*location.mapping(keyword)]
    for found in filter(None, map(unsupported_syntax, patterns)):
        if found.invalid:
            where = f"{keyword}{suffix}: at offset {found.position}"
            raise ParameterError("json_schema", f"json_schema: {where}: {found}")
        return f"{keyword} with {found.kind}{suffix}", f": {found.text} at offset {found.position}; {found.hint}"
    if overlapping and len(patterns) > 1 and _may_overlap(patterns):
        return f"patternProperties with overlapping patterns{suffix}", ""
    return None


def _may_overlap(patterns: list[str]) -> bool:
    """Return whether two patterns may match the same name, or it is hard to tell."""
    schema = {"type": "object", "patternProperties": dict.fromkeys(patterns, True), "additionalProperties": False}
    matcher = library().LLMatcher
    try:
        message = matcher.validate_grammar(matcher.grammar_from_json_schema(json.dumps(schema)))
        return "not disjoint" in message or "determine if patternProperty" in message
    except BaseException as error:  # noqa: BLE001 - a panic is no Exception
        raise_unless_panic(error)
        return False
