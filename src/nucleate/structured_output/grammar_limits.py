"""Limits on the size and cost of constraints, checked before compilation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.gbnf import lark_text
from nucleate.structured_output.json_schema import PreparedSchema, SchemaLocation, subschemas
from nucleate.structured_output.lark import parse_lark
from nucleate.structured_output.pattern_parser import expanded_size
from nucleate.structured_output.schema_normalization import COUNTS
from nucleate.structured_output.schema_rewriting import prepare_schema
from nucleate.structured_output.spec import StructuredOutputs
from nucleate.structured_output.structural_tag import FIELD, Format, Grammar, JsonSchema, Regex, at_place, parts_of
from nucleate.structured_output.terminal_automata import Budget

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_DESCRIPTIONS = frozenset(("title", "description", "$comment", "markdownDescription"))
"""Words with texts that are not compiled."""


@with_suggestions
@dataclass(frozen=True)
class GrammarLimits:
    """Limits of constraints from untrusted clients. Each bounds a cost that grows faster than the length of the text.

    - ``max_characters``: length of the whole constraint.
    - ``max_string_characters``: length of one regex, grammar, choice, or string in a schema except descriptions.
    - ``max_depth``: nesting of JSON and brackets.
    - ``max_properties``, ``max_enum_values``: number of names and of values in a whole schema.
    - ``max_choices``: number of choices, and of alternatives in a grammar.
    - ``max_repetitions``: upper bounds of lengths, items and regex repetitions.
    - ``max_required_repetitions``: lower bounds of regex repetitions.
    - ``max_ambiguous_repetitions``: how many ways there are to divide a text among the repetitions of a regex group.
    - ``max_pattern_properties``: different schemas under one ``patternProperties``, which are compared in pairs.
    - ``max_intersected_patterns``: patterns that one ``allOf`` may intersect; half of it for & and ~ in a grammar.
    - ``max_lark_regex_characters``: characters of all ``%regex`` in a grammar.
    - ``max_multiple_of_product``: product of all ``multipleOf`` values, and of one with the digits of its bounds.
    - ``mask_budget_seconds``: time that slow masks of all sequences of a constraint may take; see ``TimeBudget``.
    """

    max_characters: int = 500_000
    max_string_characters: int = 20_000
    max_depth: int = 64
    max_properties: int = 3_000
    max_enum_values: int = 10_000
    max_choices: int = 10_000
    max_repetitions: int = 1_000_000
    max_required_repetitions: int = 20_000
    max_ambiguous_repetitions: int = 1_000
    max_pattern_properties: int = 64
    max_intersected_patterns: int = 16
    max_lark_regex_characters: int = 2_000
    max_multiple_of_product: int = 20_000
    mask_budget_seconds: float = 1.0

    def check(self, spec: StructuredOutputs, *, rewrite: bool = True) -> PreparedSchema | None:
        """Raise ParameterError, which names the field, if a constraint exceeds a limit. Runs in linear time.

        Returns the prepared schema of a JSON constraint, otherwise None; rewrite: as in ``prepare_schema``. See
        ``check_tag`` for structural tags.
        """
        if spec.kind.startswith("json"):
            self._check_max("json_schema", "characters", len(spec.json_schema or ""), self.max_characters)
            return self._check_schemas([spec.schema], rewrite=rewrite)[0]
        if spec.choice is not None:
            self._check_max("choice", "texts", len(spec.choice), self.max_choices)
            self._check_max("choice", "characters", sum(map(len, spec.choice)), self.max_characters)
            self._check_max("choice", "characters in one text", max(map(len, spec.choice)), self.max_string_characters)
        elif spec.regex is not None:
            self.check_pattern("regex", spec.regex)
        elif spec.grammar is not None:
            self.check_grammar(spec.grammar)
        return None

    def check_tag(self, text: str, form: Format) -> dict[str, PreparedSchema]:
        """Check a structural tag, given as a JSON text and as a format. Returns its prepared schemas by their place."""
        self._check_max(FIELD, "characters", len(text), self.max_characters)
        prepared, budget = dict[str, PreparedSchema](), Budget()
        for part in parts_of(form):
            with at_place(part):
                if isinstance(part, JsonSchema):
                    [prepared[part.at]] = self._check_schemas([deepcopy(part.schema)], budget=budget)
                elif isinstance(part, Regex):
                    self.check_pattern("regex", part.pattern)
                elif isinstance(part, Grammar):
                    self.check_grammar(part.grammar, budget)
        return prepared

    def check_pattern(self, field: str, pattern: str, suffix: str = "") -> None:
        """Check one regular expression. suffix: its location in the field, for messages."""
        self._check_max(field, f"characters in one regex{suffix}", len(pattern), self.max_string_characters)
        size, ambiguous = expanded_size(pattern), self.max_ambiguous_repetitions
        self._check_max(field, f"repetitions in a regex at least{suffix}", size.low, self.max_required_repetitions)
        self._check_max(field, f"repetitions in a regex at most{suffix}", size.high, self.max_repetitions)
        self._check_max(field, f"ambiguous repetitions in a regex{suffix}", size.ambiguous, ambiguous)

    def check_grammar(self, text: str, budget: Budget | None = None) -> None:
        """Check a grammar in Lark or GBNF. budget: for the comparisons of its schemas; None: a new one."""
        field, budget = "grammar", budget or Budget()
        self._check_max(field, "characters", len(text), self.max_string_characters)
        lark = parse_lark(lark_text(text))
        self._check_max(field, "alternatives", lark.num_alternatives, self.max_choices)
        self._check_max(field, "uses of & and ~", lark.num_operators, self.max_intersected_patterns // 2)
        self._check_max(field, "levels of brackets", lark.depth, self.max_depth)
        self._check_max(field, "characters in %regex", lark.regex_characters, self.max_lark_regex_characters)
        self._check_max(field, "repetitions at least", lark.size[0], self.max_required_repetitions)
        self._check_max(field, "repetitions at most", lark.size[1], self.max_repetitions)
        try:
            self._check_schemas(deepcopy(lark.schemas), budget=budget)
        except ParameterError as error:
            raise ParameterError(field, f"{field}: %json{str(error).removeprefix('json_schema')}") from None
        if lark.schemas and not budget.try_spend(0):  # they are prepared again, one by one
            raise ParameterError(field, f"{field} is too large: its schemas take too many steps to compare")

    def _check_schemas(
        self, schemas: Sequence[Any], *, rewrite: bool = True, budget: Budget | None = None
    ) -> list[PreparedSchema]:
        """Check schemas and prepare them, in place. The limits apply to all of them together."""
        check = partial(self._check_max, "json_schema")
        properties = values = count = 0
        factors: set[int] = set()
        prepared: list[PreparedSchema] = []
        for document in schemas:
            depth, num_objects = _depth_and_objects(document, self.max_depth, self.max_string_characters)
            check("levels of depth", depth, self.max_depth)
            check("objects", num_objects, 2 * self.max_enum_values)
            schema = prepare_schema(document, rewrite=rewrite, budget=budget)
            prepared.append(schema)
            locations = schema.locations
            count += len(locations)
            check("schemas", count, self.max_enum_values)
            for location in locations:
                properties += sum(len(location.mapping(name)) for name in ("properties", "patternProperties"))
                properties += len(location.list_of("required"))
                check("properties", properties, self.max_properties)
                values += len(location.list_of("enum"))
                check("values in enums", values, self.max_enum_values)
                self._check_subschema(location, factors)
            self._check_intersections(locations, schema.root)
        return prepared

    def _check_subschema(self, location: SchemaLocation, factors: set[int]) -> None:
        check, at = partial(self._check_max, "json_schema"), location.message_suffix
        for name in COUNTS:
            count = location.schema.get(name)
            if isinstance(count, int | float):
                check(f"in {name}{at}", count, self.max_repetitions)
        check(f"patternProperties{at}", len(location.mapping("patternProperties")), self.max_pattern_properties)
        for pattern in location.patterns():
            self.check_pattern("json_schema", pattern, at)
        self._check_multiple(location, factors)

    def _check_intersections(self, locations: list[SchemaLocation], schema: dict[str, Any]) -> None:
        """Limit the patterns that apply to one value: their intersection can be exponential in their number."""
        check, most = partial(self._check_max, "json_schema"), self.max_intersected_patterns

        def number_of_patterns(used: Iterable[SchemaLocation]) -> int:
            return len({text for location in used for text in location.patterns_and_formats()})

        if number_of_patterns(locations) <= most:
            return
        intersecting = [location for location in locations if location.intersects]
        check("schemas under allOf or $ref", len(intersecting) * len(locations), 50 * self.max_enum_values)
        for location in intersecting:
            what = f"patterns intersected by allOf or $ref{location.message_suffix}"
            check(what, number_of_patterns(subschemas(schema, start=location)), most)

    def _check_multiple(self, location: SchemaLocation, factors: set[int]) -> None:
        value, at = location.schema.get("multipleOf"), location.message_suffix
        if not isinstance(value, int | float) or isinstance(value, bool):
            return
        digits, _, power = repr(value).partition("e")
        whole, _, fraction = digits.removesuffix(".0").partition(".")
        number = int((whole + fraction).strip("-")[:20] or 0)
        if value <= 0 or (power and abs(int(power)) > 20):
            raise ParameterError("json_schema", f"json_schema: multipleOf{at} is out of range: {value!r:.30}")
        bounds = [location.schema.get(name) for name in _BOUNDS]
        digits_of_bounds = max((len(f"{abs(each):.0f}") for each in bounds if isinstance(each, int | float)), default=1)
        check, most = partial(self._check_max, "json_schema"), self.max_multiple_of_product
        check(f"as multipleOf times the digits of its bounds{at}", number * digits_of_bounds, most)
        factors.add(number)
        check("as the product of all multipleOf", prod(factors), most)

    @staticmethod
    def _check_max(field: str, unit: str, count: float, maximum: int) -> None:
        if count > maximum:
            number = f"{count}" if isinstance(count, int) and count < 10**12 else "far more"
            raise ParameterError(field, f"{field} is too large: {number} {unit}; the maximum is {maximum}")


def _depth_and_objects(value: Any, maximum: int, max_characters: int) -> tuple[int, int]:
    """Return the nesting depth (or a depth above ``maximum``) and the number of objects.

    Raises ParameterError for a string that is too long.
    """
    deepest, num_objects, stack = 0, 0, [(value, 1)]
    while stack:
        item, level = stack.pop()
        if isinstance(item, str):
            _check_string(item, max_characters)
        elif isinstance(item, dict | list):
            deepest = max(deepest, level)
            num_objects += isinstance(item, dict)
            if deepest > maximum:
                break
            if isinstance(item, list):
                stack += [(child, level + 1) for child in item]
                continue
            for name, child in item.items():
                _check_string(name, max_characters)
                if name in _DESCRIPTIONS and isinstance(child, str):
                    _check_string(child, len(child))
                else:
                    stack.append((child, level + 1))
    return deepest, num_objects


def _check_string(text: str, max_characters: int) -> None:
    if len(text) > max_characters:
        raise ParameterError(
            "json_schema", f"json_schema has a string of {len(text)} characters; the maximum is {max_characters}"
        )
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError("json_schema", f"json_schema has a string of invalid Unicode: {error.reason}") from None
