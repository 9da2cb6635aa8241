"""Walks JSON schemas: subschemas, references, and keywords that cannot be enforced."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.spec import OnUnsupported


def _split(text: str) -> frozenset[str]:
    return frozenset(text.split())


SUPPORTED = _split(
    "type enum const anyOf oneOf allOf $ref properties patternProperties additionalProperties required minProperties "
    "maxProperties items prefixItems additionalItems minItems maxItems minLength maxLength pattern format minimum "
    "maximum exclusiveMinimum exclusiveMaximum multipleOf"
)
"""Keywords that token masks enforce."""
ANNOTATIONS = _split(
    "$schema $id id $anchor $comment $defs definitions $vocabulary title description default examples example readOnly "
    "writeOnly deprecated contentEncoding contentMediaType contentSchema discriminator externalDocs xml"
)
"""Keywords without effect on validation."""
UNSUPPORTED = _split(
    "not if then else contains minContains maxContains uniqueItems propertyNames dependentRequired dependentSchemas "
    "dependencies unevaluatedProperties unevaluatedItems $dynamicRef $dynamicAnchor $recursiveRef $recursiveAnchor "
    "nullable x-guidance"
)
FORMATS = _split("date-time date time duration email hostname ipv4 ipv6 uri uuid")
"""String formats that token masks enforce."""

_ONE = ("additionalProperties", "items", "additionalItems")
_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties")


@dataclass(frozen=True)
class SchemaLocation:
    """A subschema and its JSON pointer."""

    pointer: str
    schema: Mapping[str, Any]

    @property
    def message_suffix(self) -> str:
        """`` at POINTER`` for messages; empty for the root."""
        return f" at {shown(self.pointer)[1:-1]}" if self.pointer else ""

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.schema.get(name)
        return value if isinstance(value, dict) else {}

    def list_of(self, name: str) -> list[Any]:
        value = self.schema.get(name)
        return value if isinstance(value, list) else []

    def patterns(self) -> list[str]:
        """The regular expressions of this subschema."""
        own = self.schema.get("pattern")
        return [*self.mapping("patternProperties"), *([own] if isinstance(own, str) else [])]

    def patterns_and_formats(self) -> list[str]:
        """The regular expressions and the format of this subschema."""
        format_name = self.schema.get("format")
        return [*self.patterns(), *([format_name] if isinstance(format_name, str) else [])]

    @property
    def intersects(self) -> bool:
        """Whether several schemas apply to one value: by ``allOf``, or by ``$ref`` with other keywords."""
        return bool(self.list_of("allOf")) or (
            "$ref" in self.schema and bool(self.schema.keys() - ANNOTATIONS - {"$ref"})
        )

    def children(self) -> Iterator[SchemaLocation]:
        """Yield the direct subschemas under enforced keywords."""
        for name in _NAMED:
            for key, child in self.mapping(name).items():
                yield from self._child(child, name, key)
        for name in _ONE:
            yield from self._child(self.schema.get(name), name)
        for name in _LIST:
            for index, child in enumerate(self.list_of(name)):
                yield from self._child(child, name, str(index))

    def _child(self, child: object, *path: str) -> Iterator[SchemaLocation]:
        if isinstance(child, dict):
            steps = (step.replace("~", "~0").replace("/", "~1") for step in path)
            yield SchemaLocation("/".join([self.pointer, *steps]), child)

    def ref_target(self, root: Mapping[str, Any]) -> SchemaLocation | None:
        """The target of ``$ref`` in the same document, if it is an object; otherwise None."""
        pointer = self.schema.get("$ref")
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            return None
        target: Any = root
        for step in pointer.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict):
                target = target.get(key)
            elif isinstance(target, list) and key.isascii() and key.isdigit() and int(key[:9]) < len(target):
                target = target[int(key[:9])]
            else:
                return None
        return SchemaLocation(pointer[1:], target) if isinstance(target, dict) else None


def subschemas(root: Mapping[str, Any]) -> Iterator[SchemaLocation]:
    """Yield each schema in use once: the root, its subschemas and referenced schemas."""
    yield from _reachable([SchemaLocation("", root)], root)


def _reachable(stack: list[SchemaLocation], root: Mapping[str, Any]) -> Iterator[SchemaLocation]:
    visited: set[int] = set()
    while stack:
        location = stack.pop()
        if id(location.schema) in visited:
            continue
        visited.add(id(location.schema))
        yield location
        ref_target = location.ref_target(root)
        stack += [*reversed(list(location.children())), *([ref_target] if ref_target else [])]


def num_intersected_patterns(location: SchemaLocation, root: Mapping[str, Any]) -> int:
    """Return how many different patterns may be intersected at a location that ``intersects``."""
    return len({text for schema in _reachable([location], root) for text in schema.patterns_and_formats()})


def unsupported_keywords(root: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the unsupported keywords of a schema as (``keyword at pointer``, hint), where the hint may be empty."""
    containers = _containers(root)
    for location in subschemas(root):
        for keyword in location.schema:
            if keyword in SUPPORTED or keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
                continue
            if not location.pointer and keyword in containers:
                continue
            similar = (
                []
                if keyword in UNSUPPORTED | SUPPORTED
                else difflib.get_close_matches(keyword[:40], [*SUPPORTED, *ANNOTATIONS], n=1)
            )
            yield f"{shown(keyword)[1:-1]}{location.message_suffix}", f"; did you mean {similar[0]}?" if similar else ""
        format_name = location.schema.get("format")
        if format_name is not None and _applies_to_strings(location.schema) and format_name not in FORMATS:
            yield f"format {shown(format_name)}{location.message_suffix}", f" (known: {', '.join(sorted(FORMATS))})"


def _containers(root: Mapping[str, Any]) -> set[str]:
    """Return the root keys that contain referenced schemas, such as ``components`` in OpenAPI."""
    pointers = [location.schema.get("$ref") for location in subschemas(root)]
    return {pointer.split("/")[1] for pointer in pointers if isinstance(pointer, str) and pointer.startswith("#/")}


def _applies_to_strings(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type", "string")
    return "string" in kind if isinstance(kind, list | str) else False


def check_unsupported(unsupported: Iterable[tuple[str, str]], on_unsupported: OnUnsupported) -> tuple[str, ...]:
    """Return the ignored keywords. Raises ParameterError for the first one unless ``on_unsupported`` is "ignore"."""
    if on_unsupported == "ignore":
        return tuple(dict.fromkeys(what for what, _ in unsupported))
    for what, hint in unsupported:
        message = f'json_schema: cannot enforce {what}{hint}; set on_unsupported="ignore" to ignore it'
        raise ParameterError("json_schema", message)
    return ()


def keyword_locations(root: Mapping[str, Any], keyword: str) -> str:
    """Return the first three locations of a keyword, for messages."""
    pointers = [location.pointer or "the root" for location in subschemas(root) if keyword in location.schema]
    return ", ".join(shown(pointer)[1:-1] for pointer in pointers[:3]) + (" and more" if len(pointers) > 3 else "")
