"""Rewrites keywords of a normalized JSON schema that llguidance does not enforce in keywords that it does.

``not``, ``if``, dependencies and overlapping ``oneOf`` become alternatives, if ``schema_negation`` can negate their
conditions. What cannot be rewritten stays, and ``unsupported_keywords`` finds it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain, combinations, islice
from typing import Any, Final, cast

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.finite_text import remove_endless
from nucleate.structured_output.json_schema import SUPPORTED, UNSUPPORTED, PreparedSchema, SchemaLocation, subschemas
from nucleate.structured_output.name_patterns import name_regions
from nucleate.structured_output.one_of import any_of_alternatives
from nucleate.structured_output.property_counts import rewrite_property_counts
from nucleate.structured_output.schema_negation import CannotNegateError, negation, types_of
from nucleate.structured_output.schema_normalization import all_of, is_true, normalize
from nucleate.structured_output.terminal_automata import Budget

MAX_COMBINATIONS: Final = 128
"""Maximum number of combinations of the alternatives that conditions of one object may have."""
MAX_COUNTED_ITEMS: Final = 8
"""Number of items at the beginning of an array among which are those that ``contains`` counts."""
MAX_PLACES: Final = 32
"""Maximum number of alternatives for their places."""
MAX_COMPARISONS: Final = 50_000
"""Maximum number of pairs of alternatives of ``oneOf`` in a schema: about 1 s."""
_MAX_CONDITIONS: Final = 64
"""Maximum number of names under dependencies of one schema that are rewritten."""

_MAX_DEPTH: Final = 8
_IN_PLACE: Final = re.compile(r"(?:/(?:allOf|anyOf|oneOf)/\d+)+$")
"""The end of the pointer of a schema that applies to the same value."""

Schema = dict[str, Any]


def prepare_schema(document: Any) -> PreparedSchema:
    """Normalize and rewrite a schema, in place where it is an object. Raises ParameterError."""
    if isinstance(document, bool):
        root: Schema = {} if document else {"allOf": [False]}
        return PreparedSchema(root, [SchemaLocation("", root)])
    try:
        return _prepared(document)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        if isinstance(error, ParameterError):
            raise
        raise ParameterError("json_schema", "json_schema: a keyword has a value of the wrong type") from None


def _prepared(document: Schema) -> PreparedSchema:
    root, products, budget = normalize(document), dict[str, int](), Budget()
    compared = 0
    for location in subschemas(root):
        schema = cast("Schema", location.schema)
        rewrites = () if _REWRITES.keys().isdisjoint(schema) else _REWRITES.items()
        for keyword, rewrite in rewrites:
            if keyword == "oneOf":
                compared += _num_comparisons(location)
            if keyword in schema and not (keyword == "oneOf" and compared > MAX_COMPARISONS):
                before = dict(schema)
                with suppress(CannotNegateError):
                    rewrite(schema, root)
                place = _IN_PLACE.sub("", location.pointer)
                product = products.get(place, 1) * _num_alternatives({"allOf": _added(before, schema)})
                if product > MAX_COMBINATIONS:
                    schema.clear()
                    schema.update(before)
                else:
                    products[place] = product
        if "patternProperties" in schema:
            _pattern_properties(schema, budget)
        rewrite_property_counts(location, schema)
    return remove_endless(root)


def _num_comparisons(location: SchemaLocation) -> int:
    """Return how many pairs of alternatives of ``oneOf`` are compared; constants are not."""
    given = location.list_of("oneOf")
    constants = all(isinstance(each, dict) and not each.keys().isdisjoint(("const", "enum")) for each in given)
    return 0 if constants else len(given) ** 2 // 2


def _added(before: Schema, schema: Schema) -> list[Any]:
    """Return the schemas that a rewrite has added to ``allOf``."""
    old, new = (each.get("allOf") for each in (before, schema))
    return new[len(old or ()) :] if isinstance(new, list) else []


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
    all_of(schema, negation(schema["not"], root, types_of(schema)))
    del schema["not"]


def _if(schema: Schema, root: Schema) -> None:
    condition = schema["if"]
    otherwise = negation(condition, root, types_of(schema))
    alternatives = [
        condition if "then" not in schema else {"allOf": [condition, schema["then"]]},
        otherwise if "else" not in schema else {"allOf": [otherwise, schema["else"]]},
    ]
    all_of(schema, {"anyOf": alternatives})
    for keyword in ("if", "then", "else"):
        schema.pop(keyword, None)


def _dependent_required(schema: Schema, _root: Schema) -> None:
    given = schema["dependentRequired"]
    if isinstance(given, dict) and len(given) <= _MAX_CONDITIONS:
        del schema["dependentRequired"]
        for name, needed in given.items():
            if needed:
                all_of(schema, {"anyOf": [{"properties": {name: False}}, {"required": [name, *needed]}]})


def _dependent_schemas(schema: Schema, _root: Schema) -> None:
    given = schema["dependentSchemas"]
    if isinstance(given, dict) and len(given) <= _MAX_CONDITIONS:
        del schema["dependentSchemas"]
        for name, needed in given.items():
            present = [{"allOf": [{"required": [name]}, needed]}] if needed is not False else []
            if not is_true(needed):
                all_of(schema, {"anyOf": [{"properties": {name: False}}, *present]})


def _property_names(schema: Schema, _root: Schema) -> None:
    """Rewrite a pattern, length or list of names as properties."""
    names = schema["propertyNames"]
    if names is False:
        names = {"enum": []}
    if not isinstance(names, dict) or "patternProperties" in schema:
        return
    keywords = (names.keys() & (SUPPORTED | UNSUPPORTED)) - {"type"}
    declared, rest = SchemaLocation("", schema).mapping("properties"), schema.get("additionalProperties", True)
    if "string" not in types_of(names):
        return
    if keywords in ({"enum"}, {"const"}):
        allowed = [name for name in names.get("enum", [names.get("const")]) if isinstance(name, str)]
        known = {name: child for name, child in declared.items() if name in allowed}
        more = {name: rest for name in allowed if name not in declared and rest is not False}
        schema |= {"properties": {**known, **more}, "additionalProperties": False}
    elif keywords and keywords <= {"minLength", "maxLength"}:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        known = {name: each for name, each in declared.items() if least <= len(name) <= (most or len(name))}
        _allow_pattern(schema, known, f"^(?s:.{{{least},{most}}})$", rest)
    elif keywords == {"pattern"}:
        try:
            expression = re.compile(names["pattern"], re.ASCII)
        except (re.error, TypeError, OverflowError, RecursionError):
            return
        known = {name: child for name, child in declared.items() if len(name) < 200 and expression.search(name)}
        _allow_pattern(schema, known, names["pattern"], rest)
    else:
        return
    del schema["propertyNames"]


def _allow_pattern(schema: Schema, known: Schema, pattern: str, rest: Any) -> None:
    schema["properties"] = known
    if rest is not False:
        schema["patternProperties"] = {pattern: rest}
    schema["additionalProperties"] = False


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
    others = [name for name in types_of(schema) if name != "array"]
    all_of(schema, {"anyOf": [*alternatives, *([{"type": others}] if others else [])]})
    for keyword in ("contains", "minContains", "maxContains"):
        schema.pop(keyword, None)


def _one_of(schema: Schema, root: Schema) -> None:
    alternatives = any_of_alternatives(schema, root)
    if alternatives is not None:
        del schema["oneOf"]
        if "anyOf" in schema:
            all_of(schema, {"anyOf": alternatives})
        else:
            schema["anyOf"] = alternatives


def _pattern_properties(schema: Schema, budget: Budget) -> None:
    """Make patterns disjoint, and add one for the names that match none.

    A name that matches several patterns gets a pattern of its own, with the schemas of all of them. Grammars take names
    that match a pattern only without needless escapes, so that an additional name cannot be a declared one in disguise.
    """
    given, rest = schema["patternProperties"], schema.get("additionalProperties", True)
    if not isinstance(given, dict) or not given or (rest is False and len(given) == 1):
        return
    groups: dict[str, tuple[list[str], Any]] = {}
    for pattern, child in given.items():
        groups.setdefault(json.dumps(child), ([], child))[0].append(pattern)
    patterns, children = [each for each, _ in groups.values()], [child for _, child in groups.values()]
    regions = name_regions(patterns, () if is_true(rest) else SchemaLocation("", schema).mapping("properties"), budget)
    if regions is None:
        joined = {
            "|".join(f"(?:{each})" for each in some) if some[1:] else some[0]: child for some, child in groups.values()
        }
        schema["patternProperties"] = joined
        return
    made: Schema = {}
    for matched, text in regions.items():
        index = next(iter(matched), 0)
        if not matched:
            if rest is not False:
                made[text] = rest
        elif len(matched) > 1:
            made[text] = {"allOf": [children[each] for each in sorted(matched)]}
        elif len(patterns[index]) == 1 and not any(index in other for other in regions if other != matched):
            made[patterns[index][0]] = children[index]
        else:
            made[text] = children[index]
    schema |= {"patternProperties": made, "additionalProperties": False}


_REWRITES: Final[Mapping[str, Callable[[Schema, Schema], None]]] = {
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "propertyNames": _property_names,
    "contains": _contains,
}
