"""Resolves the references of a JSON schema (``$id``, ``$anchor``, JSON pointers) within the document.

Never fetches anything: a reference to another document is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, final
from urllib.parse import quote, unquote, urldefrag, urljoin

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.json_schema import SchemaLocation

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
        self._root = root
        self._id_keyword = "id" if draft_of(root) <= 4 else "$id"
        self._legacy = draft_of(root) <= 7
        self._bases: dict[int, str] = {}  # URI of the resource of each schema, by identity
        self._resources: dict[str, SchemaLocation] = {}
        self._anchors: dict[tuple[str, str], SchemaLocation] = {}
        self._resources[""] = SchemaLocation("", root)
        self._scan(SchemaLocation("", root), "")
        self.dynamic = len({id(location.schema) for location in self._resources.values()}) > 1
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
        base = _join(base, uri) if uri else base
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            anchored = self._anchors.get((base, fragment))
            return None if anchored is None else (_reference(anchored.pointer), anchored.schema)
        resource = self._resources.get(base)
        if resource is None:
            return None
        target: Any = resource.schema
        for step in fragment.split("/")[1:]:
            target = _child(target, step.replace("~1", "/").replace("~0", "~"))
        pointer = resource.pointer + fragment
        if isinstance(target, dict) and id(target) not in self._bases:  # under a keyword that is not of JSON Schema
            self._scan(SchemaLocation(pointer, target), base)
        return _reference(pointer), target

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
        if isinstance(identifier, str) and not (self._legacy and "$ref" in location.schema):
            uri, fragment = urldefrag(identifier)
            if uri:
                base = _join(base, uri)
                self._resources.setdefault(base, location)
            elif fragment:
                self._anchors.setdefault((base, fragment), location)
        for keyword in ("$anchor", "$dynamicAnchor"):
            anchor = location.schema.get(keyword)
            if isinstance(anchor, str) and not self._legacy:
                self._anchors.setdefault((base, anchor), location)
        return base


def _join(base: str, uri: str) -> str:
    return urldefrag(urljoin(base, uri))[0]


def _child(value: Any, step: str) -> Any:
    if isinstance(value, dict):
        return value.get(step)
    if isinstance(value, list) and step.isascii() and step.isdigit() and int(step[:9]) < len(value):
        return value[int(step[:9])]
    return None


def _reference(pointer: str) -> str:
    return "#" + quote(pointer, safe="/~!$&'()*+,;=:@")
