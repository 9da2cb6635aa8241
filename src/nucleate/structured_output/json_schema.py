"""Finds the subschemas of a JSON schema, and the keywords that cannot be enforced."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.spec import OnUnsupported


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SUPPORTED = _words(
    "type enum const anyOf oneOf allOf $ref properties patternProperties additionalProperties required minProperties "
    "maxProperties items prefixItems additionalItems minItems maxItems minLength maxLength pattern format minimum "
    "maximum exclusiveMinimum exclusiveMaximum multipleOf"
)
"""Enforced keywords."""
ANNOTATIONS = _words(
    "$schema $id id $anchor $comment $defs definitions $vocabulary title description default examples example readOnly "
    "writeOnly deprecated contentEncoding contentMediaType contentSchema discriminator externalDocs xml"
)
"""Annotations, without effect."""
UNSUPPORTED = _words(
    "not if then else contains minContains maxContains uniqueItems propertyNames dependentRequired dependentSchemas "
    "dependencies unevaluatedProperties unevaluatedItems $dynamicRef $dynamicAnchor $recursiveRef $recursiveAnchor "
    "nullable x-guidance"
)
FORMATS = _words("date-time date time duration email hostname ipv4 ipv6 uri uuid")
"""Enforced string formats."""

_ONE = ("additionalProperties", "items", "additionalItems")
_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties")


@dataclass(frozen=True)
class SchemaLocation:
    """A subschema and its JSON pointer."""

    pointer: str
    schema: Mapping[str, Any]

    @property
    def where(self) -> str:
        """The place for messages; empty for the root."""
        return f" at {shown(self.pointer)[1:-1]}" if self.pointer else ""

    def objects(self, name: str) -> Mapping[str, Any]:
        value = self.schema.get(name)
        return value if isinstance(value, dict) else {}

    def listed(self, name: str) -> list[Any]:
        value = self.schema.get(name)
        return value if isinstance(value, list) else []

    def patterns(self) -> list[str]:
        """Return the regular expressions of this subschema."""
        own = self.schema.get("pattern")
        return [*self.objects("patternProperties"), *([own] if isinstance(own, str) else [])]

    def texts(self) -> list[str]:
        """Return the patterns and the format of this subschema."""
        form = self.schema.get("format")
        return [*self.patterns(), *([form] if isinstance(form, str) else [])]

    @property
    def joins(self) -> bool:
        """Whether several schemas apply to one value: by ``allOf``, or by ``$ref`` with other keywords."""
        return bool(self.listed("allOf")) or (
            "$ref" in self.schema and bool(self.schema.keys() - ANNOTATIONS - {"$ref"})
        )

    def children(self) -> Iterator[SchemaLocation]:
        """Yield the direct subschemas of enforced keywords."""
        for name in _NAMED:
            for key, child in self.objects(name).items():
                yield from self._child(child, name, key)
        for name in _ONE:
            yield from self._child(self.schema.get(name), name)
        for name in _LIST:
            for index, child in enumerate(self.listed(name)):
                yield from self._child(child, name, str(index))

    def _child(self, child: object, *path: str) -> Iterator[SchemaLocation]:
        if isinstance(child, dict):
            steps = (step.replace("~", "~0").replace("/", "~1") for step in path)
            yield SchemaLocation("/".join([self.pointer, *steps]), child)

    def referred(self, root: Mapping[str, Any]) -> SchemaLocation | None:
        """Return the target of ``$ref`` in the same document, if it is an object."""
        pointer = self.schema.get("$ref")
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            return None
        found: Any = root
        for step in pointer.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(key)
            elif isinstance(found, list) and key.isascii() and key.isdigit() and int(key[:9]) < len(found):
                found = found[int(key[:9])]
            else:
                return None
        return SchemaLocation(pointer[1:], found) if isinstance(found, dict) else None


def places(root: Mapping[str, Any]) -> Iterator[SchemaLocation]:
    """Yield every schema in use once: the root, its subschemas and referenced ones."""
    yield from _reached([SchemaLocation("", root)], root)


def _reached(waiting: list[SchemaLocation], root: Mapping[str, Any]) -> Iterator[SchemaLocation]:
    seen: set[int] = set()
    while waiting:
        place = waiting.pop()
        if id(place.schema) in seen:
            continue
        seen.add(id(place.schema))
        yield place
        referred = place.referred(root)
        waiting += [*reversed(list(place.children())), *([referred] if referred else [])]


def joined_patterns(place: SchemaLocation, root: Mapping[str, Any]) -> int:
    """Return how many different patterns may be intersected at a place that ``joins``."""
    return len({text for each in _reached([place], root) for text in each.texts()})


def unsupported_keywords(root: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the unsupported keywords of a schema, as (``keyword at pointer``, a hint or empty)."""
    containers = _containers(root)
    for place in places(root):
        for keyword in place.schema:
            if keyword in SUPPORTED or keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
                continue
            if not place.pointer and keyword in containers:
                continue
            near = (
                []
                if keyword in UNSUPPORTED | SUPPORTED
                else difflib.get_close_matches(keyword[:40], [*SUPPORTED, *ANNOTATIONS], n=1)
            )
            yield f"{shown(keyword)[1:-1]}{place.where}", f"; did you mean {near[0]}?" if near else ""
        form = place.schema.get("format")
        if form is not None and _concerns_strings(place.schema) and form not in FORMATS:
            yield f"format {shown(form)}{place.where}", f" (known: {', '.join(sorted(FORMATS))})"


def _containers(root: Mapping[str, Any]) -> set[str]:
    """Return root keys that only contain referenced schemas, such as ``components`` in OpenAPI."""
    pointers = [place.schema.get("$ref") for place in places(root)]
    return {pointer.split("/")[1] for pointer in pointers if isinstance(pointer, str) and pointer.startswith("#/")}


def _concerns_strings(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type", "string")
    return "string" in kind if isinstance(kind, list | str) else False


def check_unsupported(found: Iterable[tuple[str, str]], on_unsupported: OnUnsupported) -> tuple[str, ...]:
    """Return the ignored keywords. Raises ParameterError for the first one unless ``on_unsupported`` is "ignore"."""
    if on_unsupported == "ignore":
        return tuple(dict.fromkeys(what for what, _ in found))
    for what, hint in found:
        message = f'json_schema: cannot enforce {what}{hint}; set on_unsupported="ignore" to ignore it'
        raise ParameterError("json_schema", message)
    return ()


def places_of(root: Mapping[str, Any], keyword: str) -> str:
    """Return the first three places of a keyword, for messages."""
    found = [place.pointer or "the root" for place in places(root) if keyword in place.schema]
    return ", ".join(shown(pointer)[1:-1] for pointer in found[:3]) + (" and more" if len(found) > 3 else "")
