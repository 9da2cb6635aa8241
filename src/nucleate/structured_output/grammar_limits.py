"""Limits on the size and cost of constraints, checked before compilation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.gbnf import lark_text
from nucleate.structured_output.json_schema import SchemaLocation, joined_patterns, places
from nucleate.structured_output.lark import read
from nucleate.structured_output.repetition_limits import unrolled
from nucleate.structured_output.spec import StructuredOutputs

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


@dataclass(frozen=True)
class GrammarLimits:
    """Maximum values. Each limits something whose cost was measured to grow faster than the length of the text.

    - ``characters``: of the whole constraint. ``string``: of one regex, grammar, choice, or string in a schema.
    - ``depth``: nesting of JSON and brackets. ``properties``, ``enum``: names and values in a whole schema.
    - ``choices``: choices, and alternatives in a grammar.
    - ``repetitions``: upper bounds of lengths, items and regex repetitions. ``forced``: their lower bounds.
    - ``joined``: patterns that one ``allOf`` may intersect; half of it for uses of & and ~ in a grammar.
    - ``parts``: characters of all ``%regex`` in a grammar. ``multiple``: the product of all ``multipleOf``.
    - ``seconds``: budget of all sequences of a constraint for slow masks; see ``TimeBudget``.
    """

    characters: int = 100_000
    string: int = 20_000
    depth: int = 64
    properties: int = 1_000
    enum: int = 10_000
    choices: int = 10_000
    repetitions: int = 1_000_000
    forced: int = 20_000
    joined: int = 16
    parts: int = 2_000
    multiple: int = 20_000
    seconds: float = 1.0

    def check(self, spec: StructuredOutputs) -> None:
        """Raise ParameterError, which names the field, if a constraint exceeds a limit. Takes linear time."""
        if spec.json_schema is not None:
            self._at_most("json_schema", "characters", len(spec.json_schema), self.characters)
            self._check_schemas([spec.schema])
        elif spec.choice is not None:
            self._at_most("choice", "texts", len(spec.choice), self.choices)
            self._at_most("choice", "characters", sum(map(len, spec.choice)), self.characters)
            self._at_most("choice", "characters in one text", max(map(len, spec.choice)), self.string)
        elif spec.regex is not None:
            self.check_pattern("regex", spec.regex, "")
        elif spec.grammar is not None:
            self.check_grammar(spec.grammar)

    def check_pattern(self, field: str, pattern: str, where: str) -> None:
        """Check one regular expression. where: its place in the field, for messages."""
        self._at_most(field, f"characters in one regex{where}", len(pattern), self.string)
        least, most = unrolled(pattern)
        self._at_most(field, f"repetitions in a regex at least{where}", least, self.forced)
        self._at_most(field, f"repetitions in a regex at most{where}", most, self.repetitions)

    def check_grammar(self, text: str) -> None:
        """Check a grammar in Lark or GBNF."""
        field = "grammar"
        self._at_most(field, "characters", len(text), self.string)
        lark = read(lark_text(text))
        self._at_most(field, "alternatives", lark.alternatives, self.choices)
        self._at_most(field, "uses of & and ~", lark.operators, self.joined // 2)
        self._at_most(field, "levels of brackets", lark.depth, self.depth)
        self._at_most(field, "characters in %regex", lark.parts, self.parts)
        self._at_most(field, "repetitions at least", lark.size[0], self.forced)
        self._at_most(field, "repetitions at most", lark.size[1], self.repetitions)
        try:
            self._check_schemas(lark.schemas)
        except ParameterError as error:
            raise ParameterError(field, f"{field}: %json{str(error).removeprefix('json_schema')}") from None

    def _check_schemas(self, schemas: Sequence[dict[str, Any]]) -> None:
        """Check schemas; the limits apply to all of them together."""
        field = "json_schema"
        properties = values = count = 0
        multiples: set[int] = set()
        for schema in schemas:
            self._at_most(field, "levels of depth", _levels(schema, self.depth, self.string), self.depth)
            found = list(places(schema))
            count += len(found)
            self._at_most(field, "schemas", count, self.enum)
            for place in found:
                _check_reference(place, schema)
                properties += sum(len(place.objects(name)) for name in ("properties", "patternProperties"))
                self._at_most(field, "properties", properties, self.properties)
                values += len(place.listed("enum"))
                self._at_most(field, "values in enums", values, self.enum)
                self._check_place(place, multiples)
            self._check_joined(found, schema)

    def _check_place(self, place: SchemaLocation, multiples: set[int]) -> None:
        for name in _COUNTS:
            count = place.schema.get(name)
            if isinstance(count, int | float):
                self._at_most("json_schema", f"in {name}{place.where}", count, self.repetitions)
        for pattern in place.patterns():
            self.check_pattern("json_schema", pattern, place.where)
        self._check_multiple(place, multiples)

    def _check_joined(self, found: list[SchemaLocation], schema: dict[str, Any]) -> None:
        """Limit the patterns that must match together: their intersection can be exponential in their number."""
        if len({text for place in found for text in place.texts()}) <= self.joined:
            return
        joining = [place for place in found if place.joins]
        self._at_most("json_schema", "schemas under allOf or $ref", len(joining) * len(found), 50 * self.enum)
        for place in joining:
            patterns = joined_patterns(place, schema)
            self._at_most("json_schema", f"patterns joined by allOf or $ref{place.where}", patterns, self.joined)

    def _check_multiple(self, place: SchemaLocation, seen: set[int]) -> None:
        value = place.schema.get("multipleOf")
        if not isinstance(value, int | float) or isinstance(value, bool):
            return
        digits, _, power = repr(value).partition("e")
        whole, _, fraction = digits.removesuffix(".0").partition(".")
        number = int((whole + fraction).strip("-")[:20] or 0)
        if value <= 0 or (power and abs(int(power)) > 20):
            raise ParameterError("json_schema", f"json_schema: multipleOf{place.where} is out of range: {value!r:.30}")
        seen.add(number)
        product = 1
        for each in seen:
            product *= each
        self._at_most("json_schema", "as the product of all multipleOf", product, self.multiple)

    @staticmethod
    def _at_most(field: str, what: str, count: float, most: int) -> None:
        if count > most:
            number = f"{count}" if isinstance(count, int) and count < 10**12 else "far more"
            raise ParameterError(field, f"{field} is too large: {number} {what}; the maximum is {most}")


def _check_reference(place: SchemaLocation, root: dict[str, Any]) -> None:
    """Reject references that this module cannot follow, because their targets would not be checked."""
    field, reference = "json_schema", place.schema.get("$ref")
    if reference is not None and place.referred(root) is None:
        message = f"{field}: $ref{place.where} must point to a schema in this document (#/...), got {shown(reference)}"
        raise ParameterError(field, message)
    if place.pointer and any(isinstance(place.schema.get(name), str) for name in ("$id", "id")):
        raise ParameterError(field, f"{field}: an $id{place.where} is not supported, only at the root")


def _levels(value: Any, most: int, longest: int) -> int:
    """Return the nesting depth, counted to just over ``most``. Raises ParameterError for a string that is too long."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        item, level = waiting.pop()
        if isinstance(item, str):
            _check_string(item, longest)
        elif isinstance(item, dict | list):
            deepest = max(deepest, level)
            if deepest > most:
                break
            for name in item if isinstance(item, dict) else ():
                _check_string(name, longest)
            waiting += [(child, level + 1) for child in (item.values() if isinstance(item, dict) else item)]
    return deepest


def _check_string(text: str, longest: int) -> None:
    if len(text) > longest:
        raise ParameterError(
            "json_schema", f"json_schema has a string of {len(text)} characters; the maximum is {longest}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError("json_schema", f"json_schema has a string of invalid Unicode: {error.reason}") from None
