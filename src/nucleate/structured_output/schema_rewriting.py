"""Rewrites keywords of a normalized JSON schema that llguidance does not enforce in keywords that it does.

``not``, ``if``, dependencies and overlapping ``oneOf`` become alternatives, if ``schema_negation`` can negate their
conditions. What cannot be rewritten stays, and ``unsupported_keywords`` finds it. At the end, the parts that no finite
text satisfies are removed, such as an array of at least one array of its kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, combinations, islice
from math import inf
from typing import Any, Final, cast

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.disjoint_schemas import (
    MAX_ALL_ORDERS,
    CannotNegateError,
    conjuncts,
    disjoint,
    types_of,
    unique_arrays,
    value_key,
    values_of,
)
from nucleate.structured_output.grammar_expressions import (
    EMPTY,
    NOTHING,
    Expression,
    Reference,
    choice,
    sequence,
    shortest_texts,
)
from nucleate.structured_output.json_schema import (
    BEFORE,
    BUDGET,
    KEYWORDS,
    PreparedSchema,
    SchemaLocation,
    subschemas,
    with_children,
)
from nucleate.structured_output.pattern_automata import accepts_text, complement, name_regions, rejects_text
from nucleate.structured_output.pattern_parser import UnknownPatternError
from nucleate.structured_output.schema_negation import MAX_PAIRS, negation
from nucleate.structured_output.schema_normalization import all_of, any_of, is_true, normalize, rewrite_property_counts
from nucleate.structured_output.terminal_automata import Budget

MAX_COMBINATIONS: Final = 128
"""Maximum number of combinations of the alternatives that conditions of one object may have."""
MAX_COUNTED_ITEMS: Final = 8
"""Number of items at the beginning of an array among which are those that ``contains`` counts."""
MAX_PLACES: Final = 32
"""Maximum number of alternatives for their places."""
_MAX_CONDITIONS: Final = 64
"""Maximum number of names under dependencies of one schema that are rewritten."""

_MAX_DEPTH: Final = 8
_IN_PLACE: Final = re.compile(r"(?:/(?:allOf|anyOf|oneOf)/\d+)+$")
"""The end of the pointer of a schema that applies to the same value."""

Schema = dict[str, Any]


def prepare_schema(document: Any, *, rewrite: bool = True, budget: Budget | None = None) -> PreparedSchema:
    """Normalize a schema, in place where it is an object, and rewrite its conditions. Raises ParameterError.

    budget: for comparisons; None: a new one.
    """
    if isinstance(document, bool):
        root: Schema = {} if document else {"allOf": [False]}
        return PreparedSchema(root, [SchemaLocation("", root)])
    try:
        return _prepared(document, rewrite, budget or Budget())
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        if isinstance(error, ParameterError):
            raise
        raise ParameterError("json_schema", "json_schema: a keyword has a value of the wrong type") from None


def _prepared(document: Schema, rewrite: bool, budget: Budget) -> PreparedSchema:
    root, number_at, orders = normalize(document, budget), dict[str, int](), 0
    for location in subschemas(root):
        schema = cast("Schema", location.schema)
        unchanged = dict(schema)
        for keyword, rewriter in _REWRITES.items() if rewrite else ():
            if keyword not in schema:
                continue
            before = dict(schema)
            with suppress(CannotNegateError, UnknownPatternError):
                rewriter(schema, root)
            place = _IN_PLACE.sub("", location.pointer)
            number = _num_alternatives({"allOf": _added(before, schema)})
            product = number_at.get(place, 1) * number
            made = number if keyword == "uniqueItems" else 0
            if product > MAX_COMBINATIONS or orders + made > MAX_ALL_ORDERS:
                schema.clear()
                schema.update(before)
                continue
            orders += made
            number_at[place] = product
            if schema != before:
                schema.setdefault(BEFORE, unchanged)
        rewrite_property_counts(location, schema)
        if schema != unchanged:
            schema.setdefault(BEFORE, unchanged)
    return remove_endless(root)


def _added(before: Schema, schema: Schema) -> list[Any]:
    """Return the schemas that a rewrite has added to ``allOf``."""
    old, new = (SchemaLocation("", each).list_of("allOf") for each in (before, schema))
    return [each for each in new if not any(each is other for other in old)]


def _num_alternatives(schema: Any, depth: int = 0) -> int:
    """Return how many alternatives a schema has, with those of the schemas in it."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return 1
    given = SchemaLocation("", schema)
    count = sum(_num_alternatives(each, depth + 1) for each in given.list_of("anyOf")) or 1
    for each in given.list_of("allOf"):
        count *= _num_alternatives(each, depth + 1)
    return min(count, MAX_COMBINATIONS + 1)


def _not(schema: Schema, root: Schema) -> None:
    all_of(schema, negation(schema["not"], root, conjuncts(schema, root)))
    del schema["not"]


def _switch(schema: Schema, root: Schema) -> None:
    """Join members with ``if`` and ``then`` whose conditions exclude each other: at most one of them holds."""
    context = {"allOf": conjuncts(schema, root)}
    cases: list[Schema] = []
    for member in SchemaLocation("", schema).list_of("allOf")[:_MAX_CONDITIONS]:
        if isinstance(member, dict) and "if" in member and member.keys() & KEYWORDS == {"if", "then"}:
            apart = (disjoint({"allOf": [context, member["if"]]}, case["if"], root) for case in cases)
            cases += [member] if all(apart) else []
    if len(cases) < 2:
        return
    otherwise = negation({"anyOf": [case["if"] for case in cases]}, root, context["allOf"])
    alternatives = [*({"allOf": [case["if"], case["then"]]} for case in cases), otherwise]
    others = [each for each in schema["allOf"] if not any(each is case for case in cases)]
    schema["allOf"] = [*others, {"anyOf": alternatives}]


def _if(schema: Schema, root: Schema) -> None:
    condition = schema["if"]
    otherwise = negation(condition, root, conjuncts(schema, root))
    alternatives = [
        condition if "then" not in schema else {"allOf": [condition, schema["then"]]},
        otherwise if "else" not in schema else {"allOf": [otherwise, schema["else"]]},
    ]
    all_of(schema, {"anyOf": alternatives})
    for keyword in ("if", "then", "else"):
        schema.pop(keyword, None)


def _dependent(keyword: str, schema: Schema, _root: Schema) -> None:
    given = schema[keyword]
    if not isinstance(given, dict) or len(given) > _MAX_CONDITIONS:
        return
    del schema[keyword]
    for name, needed in given.items():
        if is_true(needed) or needed == []:
            continue
        are_names = keyword == "dependentRequired"
        present = {"required": [name, *needed]} if are_names else {"allOf": [{"required": [name]}, needed]}
        all_of(schema, {"anyOf": [{"properties": {name: False}}, *([] if needed is False else [present])]})


def _property_names(schema: Schema, root: Schema) -> None:
    """Rewrite a pattern (or all texts but its own), a length or a list of names as properties."""
    names = {"enum": []} if schema["propertyNames"] is False else schema["propertyNames"]
    if not isinstance(names, dict) or "string" not in types_of(names):
        return
    keywords = (names.keys() & KEYWORDS) - {"type"}
    declared, rest = SchemaLocation("", schema).mapping("properties"), schema.get("additionalProperties", True)
    if keywords and "patternProperties" in schema:
        return
    if keywords in ({"enum"}, {"const"}):
        allowed = [name for name in names.get("enum", [names.get("const")]) if isinstance(name, str)]
        known = {name: child for name, child in declared.items() if name in allowed}
        more = {name: rest for name in allowed if name not in declared and rest is not False}
        schema |= {"properties": {**known, **more}, "additionalProperties": False}
    elif keywords:
        pattern, allows = _names_matched(names, keywords, root)
        schema["properties"] = {name: child for name, child in declared.items() if allows(name)}
        if rest is not False and pattern is not None:
            schema["patternProperties"] = {pattern: rest}
        schema["additionalProperties"] = False
    del schema["propertyNames"]


def _names_matched(names: Schema, keywords: set[str], root: Schema) -> tuple[str | None, Callable[[str], bool]]:
    """Return a pattern of property names (None: of no name), and whether it matches one.

    Raises CannotNegateError and UnknownPatternError.
    """
    if keywords <= {"minLength", "maxLength"}:
        least, most = names.get("minLength", 0), names.get("maxLength")
        pattern = f"^(?s:.{{{least},{'' if most is None else most}}})$"
        return pattern, lambda name: least <= len(name) and (most is None or len(name) <= most)
    if keywords == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"], lambda name: accepts_text(names["pattern"], name, root[BUDGET])
    excluded = names["not"].get("pattern") if keywords == {"not"} and isinstance(names["not"], dict) else None
    if isinstance(excluded, str) and len(names["not"].keys() & KEYWORDS) == 1:
        others = complement(excluded, root[BUDGET])
        return others, lambda name: rejects_text(excluded, name, root[BUDGET])
    raise CannotNegateError


def _contains(schema: Schema, root: Schema) -> None:
    """Rewrite ``contains`` as alternatives for the places of the items that it counts, which are among the first ones.

    The result allows fewer arrays, so it must not be negated.
    """
    wanted, least, most = schema["contains"], schema.get("minContains", 1), schema.get("maxContains")
    longest = min(MAX_COUNTED_ITEMS, schema.get("maxItems", MAX_COUNTED_ITEMS))
    other = True if most is None else negation(wanted, root)
    counts = [least] if most is None else range(least, min(most, longest) + 1)
    alternatives: list[Schema] = []
    for length in range(longest + 1):  # of the array up to the last counted item
        choices = [combinations(range(length - 1), count - 1) for count in counts if 0 < count <= length]
        places = [*islice(chain.from_iterable(choices), MAX_COMBINATIONS)]
        if len(alternatives) + len(places) > MAX_PLACES:
            break
        for counted in places:
            first = [wanted if index in counted else other for index in range(length - 1)]
            alternatives.append({"prefixItems": [*first, wanted], "minItems": length})
    if 0 in counts:
        alternatives.append({})
    if not alternatives and longest == MAX_COUNTED_ITEMS:
        raise CannotNegateError
    for each in alternatives:
        each |= {"type": "array"} if other is True else {"type": "array", "items": other}
    _arrays(schema, alternatives)
    for keyword in ("contains", "minContains", "maxContains"):
        schema.pop(keyword, None)


def _arrays(schema: Schema, alternatives: list[Schema]) -> None:
    """Add alternatives for the values of a schema that are arrays."""
    others = [name for name in types_of(schema) if name != "array"]
    all_of(schema, {"anyOf": [*alternatives, *([{"type": others}] if others else [])]})


def _one_of(schema: Schema, root: Schema) -> None:
    given = schema["oneOf"]
    if not isinstance(given, list) or not given:
        return
    others = _overlapping(schema, root)
    if _num_combinations(others) > MAX_COMBINATIONS:
        others = _overlapping(schema, root, brief=True)
        if _num_combinations(others) > MAX_COMBINATIONS:
            raise CannotNegateError
    alternatives = [{"allOf": [one, *rest]} if rest else one for one, rest in zip(given, others, strict=True)]
    del schema["oneOf"]
    any_of(schema, alternatives)


def _num_combinations(others: list[list[Any]]) -> int:
    return sum(_num_alternatives({"allOf": each}) for each in others if each)


def _overlapping(schema: Schema, root: Schema, *, brief: bool = False) -> list[list[Any]]:
    """Return the negations of the alternatives of ``oneOf`` that may overlap with each one."""
    given = schema["oneOf"]
    others: list[list[Any]] = [[] for _ in given]
    values = [values_of(conjuncts(each, root)) for each in given]
    keys = [value_key(value) for each in values if each is not None for value in each]
    if None not in values and len(set(keys)) == len(keys):
        return others
    pairs = [*combinations(range(len(given)), 2)]
    if len(pairs) > MAX_PAIRS:
        raise CannotNegateError
    rest = {keyword: value for keyword, value in schema.items() if keyword not in ("oneOf", BEFORE)}
    contexts = [{"allOf": [rest, each]} for each in given]
    overlaps = [pair for pair in pairs if not disjoint(contexts[pair[0]], given[pair[1]], root)]
    for pair in overlaps:
        for one, other in (pair, pair[::-1]):
            others[one].append(negation(given[other], root, conjuncts(contexts[one], root), brief=brief))
    return others


def _unique_items(schema: Schema, root: Schema) -> None:
    if "array" in types_of(schema):
        found = unique_arrays(schema, root)
        if found is None or schema["uniqueItems"] is not True:
            return
        for keyword in ("items", "prefixItems"):
            schema.pop(keyword, None)
        _arrays(schema, found)
    del schema["uniqueItems"]


def _pattern_properties(schema: Schema, root: Schema) -> None:
    """Make patterns disjoint, and add one for the names that match none.

    A name that matches several patterns gets a pattern of its own, with the schemas of all of them. Grammars take names
    that match a pattern only without needless escapes, so that an additional name cannot be a declared one in disguise.
    """
    given, rest = schema["patternProperties"], schema.get("additionalProperties", True)
    declared = SchemaLocation("", schema).mapping("properties")
    plain = all(name.isascii() and name.isprintable() for name in declared)
    if not isinstance(given, dict) or not given or (rest is False and len(given) == 1 and plain):
        return
    groups: dict[object, tuple[list[str], Any]] = {}
    for pattern, child in given.items():
        nested = isinstance(child, dict) and SchemaLocation("", child).children(every=True)
        groups.setdefault(id(child) if nested else json.dumps(child), ([], child))[0].append(pattern)
    patterns, children = [each for each, _ in groups.values()], [child for _, child in groups.values()]
    others_but = None if rest is False else () if is_true(rest) else declared
    regions = name_regions(patterns, declared, others_but, root[BUDGET])
    if regions is None:
        schema["patternProperties"] = {
            "|".join(f"(?:{each})" for each in some) if some[1:] else some[0]: child for some, child in groups.values()
        }
        return
    made: Schema = {}
    for matched, text in regions.patterns.items():
        applied = [children[index] for index in sorted(matched)]
        made[text] = rest if not applied else applied[0] if len(applied) == 1 else {"allOf": applied}
    schema |= {"patternProperties": made, "additionalProperties": False}
    if not plain:  # which patterns match a name may depend on the dialect
        schema["properties"] = {
            name: {"allOf": [child, *(children[index] for index in sorted(regions.declared[name]))]}
            for name, child in declared.items()
        }


_REWRITES: Final[Mapping[str, Callable[[Schema, Schema], None]]] = {
    "allOf": _switch,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    **{keyword: partial(_dependent, keyword) for keyword in ("dependentRequired", "dependentSchemas")},
    "uniqueItems": _unique_items,
    "propertyNames": _property_names,
    "contains": _contains,
    "patternProperties": _pattern_properties,
}


def remove_endless(root: dict[str, Any]) -> PreparedSchema:
    """Replace subschemas without a finite text by false, in place. Raises ParameterError if the whole schema is one."""
    prepared = PreparedSchema(root, list(subschemas(root)))
    locations = prepared.locations
    if not any("$ref" in location.schema for location in locations):
        return prepared  # only references can be endless
    shortest = shortest_texts({f"{id(location.schema)}": _needed(location, root) for location in locations})
    if shortest[f"{id(root)}"] == inf:
        raise ParameterError("json_schema", "json_schema: no finite text conforms to the schema: it refers to itself")
    if inf in shortest.values():
        for location in locations:
            kept = with_children(location.schema, lambda child: False if shortest.get(f"{id(child)}") == inf else child)
            cast("Schema", location.schema).update(kept)
        prepared.update_locations()
    return prepared


def _needed(location: SchemaLocation, root: Schema) -> Expression:
    """Return the rule of a grammar that has a finite text if and only if a schema may have one."""

    def rule(schema: Any) -> Expression:
        return Reference(f"{id(schema)}") if isinstance(schema, dict) else NOTHING if schema is False else EMPTY

    schema, target = location.schema, location.ref_target(root)
    needed = [*location.list_of("allOf"), *([target.schema] if target else [])]
    if schema.get("type") in ("array", ["array"]):
        least, first = schema.get("minItems", 0), location.list_of("prefixItems")
        if isinstance(least, int):
            needed += [*first[:least], *([schema.get("items", True)] if least > len(first) else [])]
    if schema.get("type") in ("object", ["object"]):
        rest = True if location.mapping("patternProperties") else schema.get("additionalProperties", True)
        declared = location.mapping("properties")
        needed += [declared.get(name, rest) for name in location.list_of("required") if isinstance(name, str)]
    alternatives = [location.list_of(name) for name in ("anyOf", "oneOf")]
    return sequence([*map(rule, needed), *(choice(map(rule, each)) for each in alternatives if each)])
