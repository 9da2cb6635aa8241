"""Removes the parts of a schema that no finite text satisfies, such as an array of at least one array of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.json_schema import PreparedSchema, SchemaLocation, subschemas


def remove_endless(root: dict[str, Any]) -> PreparedSchema:
    """Replace subschemas without a finite text by false, in place. Raises ParameterError if the whole schema is one."""
    prepared = PreparedSchema(root, list(subschemas(root)))
    locations = prepared.locations
    if not any("$ref" in location.schema for location in locations):
        return prepared  # only references can be endless
    finite = _finite(locations, root)
    if id(root) not in finite:
        raise ParameterError("json_schema", "json_schema: no finite text conforms to the schema: it refers to itself")
    if len(finite) < len(locations):
        for location in locations:
            _replace(cast("dict[str, Any]", location.schema), finite)
        prepared.update_locations()
    return prepared


def _finite(locations: list[SchemaLocation], root: Mapping[str, Any]) -> set[int]:
    """Return the identities of the schemas that may have a finite text: a least fixed point."""
    finite: set[int] = set()
    undecided, before = locations[::-1], -1
    while len(finite) > before:
        before, left = len(finite), list[SchemaLocation]()
        for location in undecided:
            if not location.has_children or _has_finite_text(location, root, finite):
                finite.add(id(location.schema))
            else:
                left.append(location)
        undecided = left
    return finite


def _has_finite_text(location: SchemaLocation, root: Mapping[str, Any], finite: set[int]) -> bool:
    schema = location.schema
    target = location.ref_target(root)
    if target is not None and id(target.schema) not in finite:
        return False
    if not all(_is_finite(each, finite) for each in location.list_of("allOf")):
        return False
    for keyword in ("anyOf", "oneOf"):
        if location.list_of(keyword) and not any(_is_finite(each, finite) for each in location.list_of(keyword)):
            return False
    kinds = schema.get("type", "null")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "array" in kinds and len(kinds) == 1:
        return _finite_array(location, finite)
    if "object" in kinds and len(kinds) == 1:
        return _finite_object(location, finite)
    return True


def _finite_array(location: SchemaLocation, finite: set[int]) -> bool:
    least, first = location.schema.get("minItems", 0), location.list_of("prefixItems")
    if not isinstance(least, int):
        return True
    needed = [*first[:least], *([location.schema.get("items", True)] if least > len(first) else [])]
    return all(_is_finite(each, finite) for each in needed)


def _finite_object(location: SchemaLocation, finite: set[int]) -> bool:
    declared, patterns = location.mapping("properties"), location.mapping("patternProperties")
    rest = True if patterns else location.schema.get("additionalProperties", True)
    names = [name for name in location.list_of("required") if isinstance(name, str)]
    return all(_is_finite(declared.get(name, rest), finite) for name in names)


def _is_finite(schema: Any, finite: set[int]) -> bool:
    return id(schema) in finite if isinstance(schema, dict) else schema is not False


def _replace(schema: dict[str, Any], finite: set[int]) -> None:
    """Replace the direct subschemas without a finite text by false."""
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties") and isinstance(value, dict):
            schema[keyword] = {name: _kept(child, finite) for name, child in value.items()}
        elif keyword in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            schema[keyword] = [_kept(child, finite) for child in value]
        elif keyword in ("items", "additionalProperties"):
            schema[keyword] = _kept(value, finite)


def _kept(schema: Any, finite: set[int]) -> Any:
    return schema if not isinstance(schema, dict) or id(schema) in finite else False
