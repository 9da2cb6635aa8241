"""Negates JSON schemas: a schema of values that another schema forbids, in keywords that can be enforced.

A negation may allow less than all values that the schema forbids, but never one that the schema allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final, NamedTuple

from nucleate.structured_output.disjoint_schemas import (
    TYPES,
    CannotNegateError,
    Schema,
    common_types,
    conjuncts,
    disjoint,
    joined,
    property_schema,
    types_of,
    value_key,
    values_of,
)
from nucleate.structured_output.json_schema import BUDGET, KEYWORDS, SchemaLocation, original
from nucleate.structured_output.pattern_automata import complement
from nucleate.structured_output.pattern_parser import UnknownPatternError
from nucleate.structured_output.pattern_syntax import pattern_excluding
from nucleate.structured_output.schema_normalization import is_true
from nucleate.structured_output.terminal_automata import TooManyStepsError

_MAX_DEPTH: Final = 12
_MAX_STEPS: Final = 1_000
"""Maximum number of schemas in a negation, each counted as often as it is referenced."""
_MAX_ALTERNATIVES: Final = 100
MAX_PAIRS: Final = 2_000
"""Maximum number of pairs of alternatives of ``oneOf`` that are compared: 63 alternatives."""
_OPPOSITES: Final = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
"""By keyword: its type, the opposite keyword and the difference of their values."""

Alternatives = list[dict[str, Any]]
"""Schemas of which any must hold."""


_OF_OBJECTS: Final = frozenset(
    ("properties", "patternProperties", "additionalProperties", "minProperties", "maxProperties")
)


def negation(schema: Any, root: Schema, context: Iterable[Schema] = (), *, brief: bool = False) -> Any:
    """Return a negation of a schema: false, or a schema. Raises CannotNegateError.

    context: schemas that apply to the same value as the negation. brief: of the objects with required properties, only
    those in which one is absent.
    """
    try:
        return _any_of(_negated(schema, _Context(root, [*context], [_MAX_STEPS], brief)))
    except TooManyStepsError:
        raise CannotNegateError from None


class _Context(NamedTuple):
    """What is known about the value. parts: schemas that hold for it. steps: how many are left. brief: ``negation``."""

    root: Schema
    parts: list[Schema]
    steps: list[int]
    brief: bool
    depth: int = 0

    def deeper(self) -> _Context:
        self.steps[0] -= 1
        if self.steps[0] < 0 or not self.root[BUDGET].try_spend(2):
            raise TooManyStepsError
        if self.depth >= _MAX_DEPTH:
            raise CannotNegateError
        return self._replace(depth=self.depth + 1)

    def of_property(self, name: str) -> _Context | None:
        """Return the context of a property, or None if there cannot be such a property."""
        given = [property_schema(part, name) for part in self.parts]
        if False in given:
            return None
        return self._replace(parts=[part for each in given for part in conjuncts(each, self.root)])

    def names(self) -> list[str] | None:
        """Return the names that an object may have; None if they are not limited."""
        closed = [
            [name for name, child in SchemaLocation("", part).mapping("properties").items() if child is not False]
            for part in self.parts
            if part.get("additionalProperties", True) is False and not part.get("patternProperties")
        ]
        return [name for name in closed[0] if all(name in each for each in closed)] if closed else None


@dataclass
class _Found:
    """Alternatives of a negation. dropped: some cannot be written. absent: some forbid a required property."""

    alternatives: Alternatives = field(default_factory=list)
    dropped: bool = False
    absent: bool = False


def _negated(schema: Any, context: _Context) -> Alternatives:
    """Return the alternatives of a negation.

    Where an object without a required property is one, those that cannot be written are left out.
    """
    found = _Found()
    _add(schema, context, found)
    types = common_types(context.parts)
    if found.dropped and not (found.absent and "object" in types):
        raise CannotNegateError
    kept = [each for each in found.alternatives if not types.isdisjoint(types_of(each))]
    if len(kept) > _MAX_ALTERNATIVES:
        raise CannotNegateError
    return kept


def _any_of(alternatives: Alternatives) -> Any:
    return False if not alternatives else alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}


def _add(schema: Any, context: _Context, found: _Found) -> None:
    if isinstance(schema, bool):
        found.alternatives += [] if schema else [{}]
        return
    if not isinstance(schema, dict):
        raise CannotNegateError
    inner, given = context.deeper(), original(schema)
    for keyword in sorted(given, key="required".__ne__):  # required first, see found.absent
        if keyword not in KEYWORDS or (context.brief and found.absent and keyword in _OF_OBJECTS):
            continue
        try:
            rule = _RULES.get(keyword)
            found.alternatives += rule(given, inner, found) if rule else _opposite(keyword, given[keyword])
        except (CannotNegateError, UnknownPatternError):
            found.dropped = True


def _opposite(keyword: str, value: Any) -> Alternatives:
    if keyword not in _OPPOSITES or not isinstance(value, int | float):
        raise CannotNegateError
    kind, opposite, offset = _OPPOSITES[keyword]
    return [{"type": kind, opposite: value + offset}] if value + offset >= 0 or not offset else []


def _type(schema: Schema, context: _Context, _: _Found) -> Alternatives:
    names, kinds = types_of(schema), common_types(context.parts)
    others = [name for name in TYPES if name not in names]
    if "number" in names and "number" in kinds and not _allows_fractions(schema) and kinds.isdisjoint(others):
        if any(not _allows_fractions(part) for part in context.parts):
            return []
        raise CannotNegateError  # all numbers but integers
    return [{"type": others}] if others else []


def _allows_fractions(schema: Schema) -> bool:
    given = schema.get("type", "number")
    return "number" in (given if isinstance(given, list) else [given])


def _all_but(values: Any, context: _Context) -> Alternatives:
    if not isinstance(values, list):
        raise CannotNegateError
    possible = values_of(context.parts)
    if possible is not None:
        forbidden = set(map(value_key, values))
        rest = [value for value in possible if value_key(value) not in forbidden]
        return [{"enum": rest}] if rest else []
    texts = [value for value in values if isinstance(value, str)]
    numbers = sorted({value for value in values if isinstance(value, int | float) and not isinstance(value, bool)})
    booleans = {value for value in values if isinstance(value, bool)}
    kinds = {"string": texts, "number": numbers, "boolean": booleans, "null": None in values}
    kinds |= {"array": any(isinstance(value, list) for value in values)}
    kinds |= {"object": any(isinstance(value, dict) for value in values)}
    if (kinds["array"] or kinds["object"]) and not common_types(context.parts).isdisjoint(("array", "object")):
        raise CannotNegateError  # all arrays or objects but one
    found: Alternatives = [{"type": [name for name in TYPES if not kinds[name]]}]
    if texts:
        found.append({"type": "string", "pattern": f"^(?s:{pattern_excluding(texts)})$"})
    for low, high in zip([None, *numbers], [*numbers, None], strict=True):
        limits = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        if numbers:
            found.append({"type": "number", **{name: limit for name, limit in limits.items() if limit is not None}})
    if len(booleans) == 1:
        found.append({"const": not booleans.pop(), "type": "boolean"})
    return found


def _pattern(schema: Schema, context: _Context, _: _Found) -> Alternatives:
    others = complement(schema["pattern"], context.root[BUDGET])
    return [] if others is None else [{"type": "string", "pattern": others}]


def _required(schema: Schema, context: _Context, found: _Found) -> Alternatives:
    needed = {name for part in context.parts for name in SchemaLocation("", part).list_of("required")}
    names = [name for name in schema["required"] if isinstance(name, str) and name not in needed]
    found.absent |= bool(names)
    return [{"type": "object", "properties": {name: False}} for name in names]


def _properties(schema: Schema, context: _Context, found: _Found) -> Alternatives:
    given = schema["properties"].items()
    return [each for name, child in given for each in _with_property(name, child, context, found)]


def _additional(schema: Schema, context: _Context, found: _Found) -> Alternatives:
    rest, names = schema["additionalProperties"], context.names()
    if rest is True or rest == {}:
        return []
    if names is None or schema.get("patternProperties"):
        raise CannotNegateError
    others = [name for name in names if name not in SchemaLocation("", schema).mapping("properties")]
    return [each for name in others for each in _with_property(name, rest, context, found)]


def _with_property(name: str, child: Any, context: _Context, found: _Found) -> Iterator[dict[str, Any]]:
    """Yield schemas of objects with a property for which ``child`` does not hold."""
    inner = context.of_property(name)
    if inner is None or any(_same(child, property_schema(part, name)) for part in context.parts):
        return
    if child is False:
        yield {"type": "object", "required": [name]}
        return
    try:
        for each in _negated(child, inner):
            yield {"type": "object", "properties": {name: each}, "required": [name]}
    except CannotNegateError:
        found.dropped = True


def _same(one: Any, other: Any) -> bool:
    """Whether two schemas are obviously equal."""
    if one is other or not isinstance(one, dict) or not isinstance(other, dict):
        return one is other
    nested = SchemaLocation("", one).children(every=True)
    return not nested and value_key(original(one)) == value_key(original(other))


def _prefix_items(schema: Schema, context: _Context, _: _Found) -> Alternatives:
    return [
        {"type": "array", "minItems": index + 1, "prefixItems": [*[True] * index, each]}
        for index, child in enumerate(schema["prefixItems"])
        for each in _negated(child, context._replace(parts=[]))
    ]


def _items(schema: Schema, _: _Context, __: _Found) -> Alternatives:
    if is_true(schema["items"]):
        return []
    if schema["items"] is not False:
        raise CannotNegateError
    return [{"type": "array", "minItems": len(SchemaLocation("", schema).list_of("prefixItems")) + 1}]


def _contains(schema: Schema, context: _Context, _: _Found) -> Alternatives:
    if schema.get("minContains", 1) != 1 or "maxContains" in schema:
        raise CannotNegateError
    return [{"type": "array", "items": _any_of(_negated(schema["contains"], context._replace(parts=[])))}]


def _all(schema: Schema, context: _Context, found: _Found) -> Alternatives:
    for member in schema["allOf"]:
        _add(member, context, found)
    return []


def _none_of(schemas: list[Any], context: _Context) -> Alternatives:
    parts = [_negated(schema, context) for schema in joined(schemas)]
    return [{"allOf": [*map(_any_of, parts)]}] if all(parts) else []


def _one(schema: Schema, context: _Context, _: _Found) -> Alternatives:
    pairs = [*combinations(schema["oneOf"], 2)]
    if len(pairs) > MAX_PAIRS:
        raise CannotNegateError
    return [
        *_none_of(schema["oneOf"], context),
        *({"allOf": [*pair]} for pair in pairs if not disjoint(*pair, context.root)),
    ]


def _if(schema: Schema, context: _Context, _: _Found) -> Alternatives:
    found: Alternatives = []
    if "then" in schema:
        found += [{"allOf": [schema["if"], each]} for each in _negated(schema["then"], context)]
    if "else" in schema:
        condition = _any_of(_negated(schema["if"], context))
        found += [{"allOf": [condition, each]} for each in _negated(schema["else"], context) if condition]
    return found


def _dependent_required(schema: Schema, _: _Context, __: _Found) -> Alternatives:
    return [
        {"type": "object", "required": [name], "properties": {other: False}}
        for name, needed in schema["dependentRequired"].items()
        for other in needed
        if other != name
    ]


def _dependent_schemas(schema: Schema, context: _Context, _: _Found) -> Alternatives:
    return [
        {"allOf": [{"type": "object", "required": [name]}, each]}
        for name, needed in schema["dependentSchemas"].items()
        for each in _negated(needed, context)
    ]


def _not(schema: Schema, _: _Context, __: _Found) -> Alternatives:
    return [] if schema["not"] is False else [{}] if schema["not"] is True else [schema["not"]]


def _ref(schema: Schema, context: _Context, found: _Found) -> Alternatives:
    target = SchemaLocation("", schema).ref_target(context.root)
    if target is None:
        raise CannotNegateError
    _add(target.schema, context, found)
    return []


_RULES: Final[Mapping[str, Callable[[Schema, _Context, _Found], Alternatives]]] = {
    "type": _type,
    "enum": lambda schema, context, _: _all_but(schema["enum"], context),
    "const": lambda schema, context, _: _all_but([schema["const"]], context),
    "pattern": _pattern,
    "required": _required,
    "properties": _properties,
    "additionalProperties": _additional,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "prefixItems": _prefix_items,
    "items": _items,
    "contains": _contains,
    "allOf": _all,
    "anyOf": lambda schema, context, _: _none_of(schema["anyOf"], context),
    "oneOf": _one,
    "if": _if,
    "not": _not,
    "$ref": _ref,
    **dict.fromkeys(("minContains", "maxContains", "then", "else"), lambda *_: []),  # see the keywords beside them
}
