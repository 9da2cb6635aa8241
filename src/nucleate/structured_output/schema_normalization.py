"""Normalizes JSON schemas: the keywords of older drafts, references, counts, and keywords with an equivalent.

The result has the same meaning in the keywords of draft 2020-12. Its references are JSON pointers into the original
document; the root has their targets under ``TARGETS``. References (``$id``, ``$anchor``, JSON pointers) are resolved
within the document. Nothing is ever fetched: a reference to another document is an error. Keywords that remain but
cannot be enforced are found by ``unsupported_keywords``.

llguidance counts properties only if all declared ones are required. So ``minProperties`` and ``maxProperties`` become
alternatives, in each of which the declared properties are required or forbidden as far as it matters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, islice
from typing import Any, Final, NamedTuple, cast, final
from urllib.parse import quote, unquote, urldefrag, urljoin

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.disjoint_schemas import types_of
from nucleate.structured_output.json_schema import BUDGET, KEYWORDS, TARGETS, SchemaLocation, subschemas
from nucleate.structured_output.terminal_automata import Budget

_LEGACY: Final = re.compile(r"draft-0(\d)")


def draft_of(root: Mapping[str, Any]) -> int:
    """Return the draft that ``$schema`` names: 3 to 7, 2019 or 2020 (also without ``$schema``)."""
    name = root.get("$schema")
    if not isinstance(name, str):
        return 2020
    legacy = _LEGACY.search(name)
    return int(legacy[1]) if legacy else 2019 if "2019-09" in name else 2020


_IDENTIFIERS: Final = frozenset(("id", "$id", "$anchor", "$dynamicAnchor"))


@final
class References:
    """The identifiers of a schema document and the targets of its references."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._id_keyword = "id" if draft_of(root) <= 4 else "$id"
        self._legacy = draft_of(root) <= 7
        self._bases: dict[int, str] = {}  # URI of the resource of each schema, by identity
        whole = SchemaLocation("", root)
        self._named = {("", ""): whole}  # resources by URI, and anchors by URI and name
        self._scan(whole, "")
        self.dynamic = len({id(each.schema) for (_, name), each in self._named.items() if not name}) > 1
        """Whether the document has several resources, so that dynamic references may have several targets."""

    def target(self, location: SchemaLocation, keyword: str = "$ref") -> tuple[str, Any]:
        """Return the JSON pointer (``#/...``) and the schema to which a reference refers. Raises ParameterError."""
        reference = location.schema[keyword]
        found = self._find(location, reference) if isinstance(reference, str) else None
        if found is None or not isinstance(found[1], dict | bool):
            required = "must refer to a schema in this document"
            message = f"json_schema: {keyword}{location.message_suffix} {required}, got {shown(reference)}"
            raise ParameterError("json_schema", message)
        return found

    def _find(self, location: SchemaLocation, reference: str) -> tuple[str, Any] | None:
        base = self._bases.get(id(location.schema), "")
        uri, fragment = urldefrag(reference)
        base, fragment = _join(base, uri) if uri else base, unquote(fragment)
        name, *steps = fragment.split("/") if fragment[:1] in ("", "/") else [fragment]
        found = self._named.get((base, name))
        if found is None:
            return None
        target: Any = found.schema
        for step in steps:
            target = _child(target, step.replace("~1", "/").replace("~0", "~"))
        pointer = "/".join([found.pointer, *steps])
        if isinstance(target, dict) and id(target) not in self._bases:  # under a keyword that is not of JSON Schema
            self._scan(SchemaLocation(pointer, target), base)
        return "#" + quote(pointer, safe="/~!$&'()*+,;=:@"), target

    def _scan(self, start: SchemaLocation, base: str) -> None:
        """Record the identifiers of a schema and of its subschemas."""
        stack = [(start, base)]
        while stack:
            location, base = stack.pop()
            if id(location.schema) in self._bases:
                continue
            base = self._record(location, base)
            self._bases[id(location.schema)] = base
            stack += [(child, base) for child in location.children(every=True, definitions=True)]

    def _record(self, location: SchemaLocation, base: str) -> str:
        """Record the identifiers of one schema. Returns the URI of its resource."""
        if _IDENTIFIERS.isdisjoint(location.schema):
            return base
        identifier = location.schema.get(self._id_keyword)
        names = [] if self._legacy else [location.schema.get(name) for name in ("$anchor", "$dynamicAnchor")]
        if isinstance(identifier, str) and not (self._legacy and "$ref" in location.schema):
            uri, fragment = urldefrag(identifier)
            base = _join(base, uri) if uri else base
            names += ["" if uri else fragment or None]
        for name in names:
            if isinstance(name, str):
                self._named.setdefault((base, name), location)
        return base


def _join(base: str, uri: str) -> str:
    return urldefrag(urljoin(base, uri))[0]


def _child(value: Any, step: str) -> Any:
    if isinstance(value, dict):
        return value.get(step)
    if isinstance(value, list) and step.isascii() and step.isdigit() and int(step[:9]) < len(value):
        return value[int(step[:9])]
    return None


COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_IN_PLACE: Final = frozenset(("allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas"))
_BOUNDS: Final = (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum"))


def normalize(root: dict[str, Any], budget: Budget) -> dict[str, Any]:
    """Normalize a schema in place and return it. Raises ParameterError for a reference without a target."""
    references, draft = References(root), draft_of(root)
    root[TARGETS], root[BUDGET] = {}, budget
    schemas: list[dict[str, Any]] = []
    for location in subschemas(root, every=True):
        schema = cast("dict[str, Any]", location.schema)
        if draft <= 7 and "$ref" in schema:  # its siblings have no effect
            for keyword in (schema.keys() & KEYWORDS) - {"$ref"}:
                del schema[keyword]
        _resolve(location, references, root[TARGETS])
        schemas.append(schema)
    for schema in schemas:  # after all references are resolved, because keywords move
        for step in _STEPS:
            step(schema)
    return root


def _resolve(location: SchemaLocation, references: References, targets: dict[str, Any]) -> None:
    """Rewrite references as JSON pointers, and record their targets; dynamic ones too, if they have one target only."""
    schema = cast("dict[str, Any]", location.schema)
    if "$ref" in schema:
        schema["$ref"], target = references.target(location)
        targets[schema["$ref"]] = target
    for keyword in ("$dynamicRef", "$recursiveRef"):
        if keyword in schema and not references.dynamic:
            pointer, target = references.target(location, keyword)
            targets[pointer] = target
            del schema[keyword]
            if "$ref" in schema:
                all_of(schema, {"$ref": pointer})
            else:
                schema["$ref"] = pointer


def all_of(schema: dict[str, Any], *others: Any) -> None:
    """Add schemas that apply to the same value."""
    schema["allOf"] = [*(schema.get("allOf") or ()), *others]


def any_of(schema: dict[str, Any], alternatives: list[Any]) -> None:
    """Add schemas of which any applies to the same value."""
    if "anyOf" in schema:
        all_of(schema, {"anyOf": alternatives})
    else:
        schema["anyOf"] = alternatives


def is_true(schema: object) -> bool:
    """Whether a schema obviously allows everything."""
    return schema is True or (isinstance(schema, dict) and not schema.keys() & KEYWORDS)


def _numbers(schema: dict[str, Any]) -> None:
    """Write counts and constants such as 2.0 as integers."""
    for keyword in (*COUNTS, "minContains", "maxContains", "const", "enum"):
        if keyword in schema:
            schema[keyword] = _integers(schema[keyword])


def _integers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_integers(item) for item in value]
    if isinstance(value, dict):
        return {name: _integers(item) for name, item in value.items()}
    return value


def _bounds(schema: dict[str, Any]) -> None:
    """Rewrite the exclusive bounds of draft 4, which were booleans."""
    for exclusive, inclusive in _BOUNDS:
        value = schema.get(exclusive)
        if isinstance(value, bool):
            del schema[exclusive]
            if value and inclusive in schema:
                schema[exclusive] = schema.pop(inclusive)


def _items(schema: dict[str, Any]) -> None:
    """Rewrite the tuples of drafts before 2020-12."""
    rest = schema.pop("additionalItems", True)
    if isinstance(schema.get("items"), list):
        schema["prefixItems"] = schema.pop("items")
        schema["items"] = rest


def _dependencies(schema: dict[str, Any]) -> None:
    """Split the ``dependencies`` of draft 7 into those of later drafts."""
    given = schema.get("dependencies")
    if not isinstance(given, dict):
        return
    del schema["dependencies"]
    for name, dependency in given.items():
        keyword = "dependentSchemas" if isinstance(dependency, dict | bool) else "dependentRequired"
        value = [dependency] if isinstance(dependency, str) else dependency
        schema[keyword] = {**(schema.get(keyword) or {}), name: value}


def _contains(schema: dict[str, Any]) -> None:
    """Rewrite ``contains`` if it counts all items, or none."""
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
        return
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    if is_true(schema["contains"]) and isinstance(least, int):
        schema["minItems"] = max(least, schema.get("minItems", 0))
        if isinstance(most, int):
            schema["maxItems"] = min(most, schema.get("maxItems", most))
    elif not (least == 0 and most is None):
        return
    for keyword in ("contains", "minContains", "maxContains"):
        schema.pop(keyword, None)


def _without_effect(schema: dict[str, Any]) -> None:
    """Remove keywords that have no effect here."""
    if schema.get("uniqueItems") is False or (schema.get("maxItems", 2) in (0, 1) and "uniqueItems" in schema):
        del schema["uniqueItems"]
    for keyword in ("propertyNames", "unevaluatedItems", "unevaluatedProperties"):
        if keyword in schema and is_true(schema[keyword]):
            del schema[keyword]
    if schema.get("nullable") is False:
        del schema["nullable"]
    if "if" not in schema or ("then" not in schema and "else" not in schema):
        for keyword in ("if", "then", "else"):
            schema.pop(keyword, None)


def _unevaluated(schema: dict[str, Any]) -> None:
    """Rewrite unevaluated properties and items where no other schema evaluates any."""
    if not _IN_PLACE.isdisjoint(schema):
        return
    for unevaluated, additional in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "items"),
    ):
        if unevaluated in schema and not (unevaluated == "unevaluatedItems" and "contains" in schema):
            schema.setdefault(additional, schema[unevaluated])
            del schema[unevaluated]


_STEPS: Final[tuple[Callable[[dict[str, Any]], None], ...]] = (
    _numbers,
    _bounds,
    _items,
    _dependencies,
    _contains,
    _unevaluated,
    _without_effect,
)


MAX_ALTERNATIVES: Final = 32
"""Maximum number of alternatives for the counts of one object."""
_COUNTS: Final = frozenset(("minProperties", "maxProperties"))


class _Counts(NamedTuple):
    """The counts of an object, its required names, its optional properties, and whether it has no others."""

    least: int
    most: int | None
    required: list[str]
    optional: list[str]
    closed: bool


def _counts_of(location: SchemaLocation) -> _Counts | None:
    schema = location.schema
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    known = isinstance(least, int) and isinstance(most, int | None) and not _COUNTS.isdisjoint(schema)
    if not known or "object" not in types_of(schema):
        return None
    required = [*dict.fromkeys(name for name in location.list_of("required") if isinstance(name, str))]
    needed, declared = {*required}, location.mapping("properties").items()
    optional = [name for name, child in declared if child is not False and name not in needed]
    closed = schema.get("additionalProperties", True) is False and not location.mapping("patternProperties")
    return _Counts(least, most, required, optional, closed)


def rewrite_property_counts(location: SchemaLocation, schema: dict[str, Any]) -> None:
    """Rewrite the counts of an object in place, if there are few alternatives. ``schema`` is the location's."""
    if (counts := _counts_of(location)) is None:
        return
    least, most, required, optional, closed = counts
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
    if alternatives:
        any_of(schema, alternatives)
    else:
        all_of(schema, False)


def unsupported_counts(location: SchemaLocation) -> dict[str, str]:
    """Return the counts that llguidance does not enforce, with the reasons."""
    if (counts := _counts_of(location)) is None:
        return {}
    found, (least, most, required, optional, closed) = dict[str, str](), counts
    if not closed and least > max(1, len(required) + 1):
        found["minProperties"] = ", because names can be repeated"
    elif optional and least:
        found["minProperties"] = f" with {len(optional)} optional properties"
    if optional and most is not None and len(required) <= most >= least:
        found["maxProperties"] = f" with {len(optional)} optional properties"
    return found


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
