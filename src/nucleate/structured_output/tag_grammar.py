"""Compiles structural tags to llguidance's grammar format."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Final

from nucleate.structured_output import tag_formats as tags
from nucleate.structured_output.gbnf import gbnf_lexing, is_gbnf, lark_of_lexing
from nucleate.structured_output.gbnf_boundaries import boundary_bytes
from nucleate.structured_output.grammar_expressions import Choice, Expression, Repetition, Sequence, TokenReference
from nucleate.structured_output.lark import parse_lark
from nucleate.structured_output.lexing import Lexing
from nucleate.structured_output.tag_compiler import TagCompiler
from nucleate.structured_output.tag_conflicts import check_conflicts
from nucleate.structured_output.tag_expressions import ANY_CHARACTERS, Embedded, Pattern, ascii_or_other, regex
from nucleate.structured_output.tag_formats import Format, parts_of
from nucleate.structured_output.tag_tokens import SpecialTokens

_FIRST_OF_TYPES: Final = {
    "object": "{", "array": "[", "string": '"', "boolean": "tf", "null": "n", "integer": "-0123456789",
    "number": "-0123456789",
}  # fmt: skip
_IN_NUMBERS: Final = frozenset("0123456789.eE+-")


def tag_grammar(
    form: Format, schemas: Mapping[str, dict[str, Any]], options: Mapping[str, Any], tokens: SpecialTokens
) -> str:
    """Return a structural tag in llguidance's JSON format. Raises ParameterError.

    schemas: the rewritten schema of each JSON schema by its place. options: of llguidance for them.
    """
    embedded: dict[str, Expression] = {}
    grammars = Grammars(options)
    for part in parts_of(form):
        if isinstance(part, tags.JsonSchema):
            text = json.dumps({**schemas[part.at], "x-guidance": options})
            first, continues = _json_boundaries(part.schema)
            embedded[part.at] = Embedded(f"%json {text}", first, continues, part.at, is_json=True)
        elif isinstance(part, tags.Grammar):
            is_in_gbnf = is_gbnf(part.grammar)
            embed = (
                partial(grammars.gbnf, gbnf_lexing(part.grammar))
                if is_in_gbnf
                else partial(grammars.lark, part.grammar)
            )
            embedded[part.at] = embed(part.at)
    return grammars.document(TagCompiler(tokens, embedded).expression(form))


class Grammars:
    """The grammars that a grammar embeds. options: of llguidance for JSON schemas in them."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._texts: list[str] = []

    def gbnf(self, lexing: Lexing, at: str) -> Expression:
        if len(lexing.rules) == len(lexing.uses) == 1 and lexing.terminals[0].regular:
            return regex(lexing.terminals[0].regex, at)
        first, continues = map(_characters, boundary_bytes(lexing))
        return self._added(lark_of_lexing(lexing), first, continues, at)

    def lark(self, text: str, at: str) -> Expression:
        """Embed a grammar in Lark. It has the longest match, also at its end."""
        return self._added(parse_lark(text, self._options).text, ANY_CHARACTERS, frozenset(), at)

    def _added(self, text: str, first: frozenset[str], continues: frozenset[str], at: str) -> Expression:
        self._texts.append(text)
        return Embedded(f"@grammar_{len(self._texts)}", first, continues, at)

    def document(self, expression: Expression) -> str:
        """Return an expression in llguidance's JSON format. Raises ParameterError if it is ambiguous."""
        lazy = check_conflicts(expression)
        embedded = [{"name": f"grammar_{number}", "lark_grammar": text} for number, text in enumerate(self._texts, 1)]
        return json.dumps({"grammars": [{"lark_grammar": _Lark(lazy).text(expression)}, *embedded]})


def _characters(byte_set: int) -> frozenset[str]:
    return frozenset(ascii_or_other(chr(byte) for byte in range(256) if byte_set >> byte & 1))


def _json_boundaries(schema: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Return the characters with which the JSON of a schema may begin, and those that may continue a complete text."""
    given = schema if isinstance(schema, Mapping) else {}
    kinds = [given["type"]] if isinstance(given.get("type"), str) else given.get("type")
    values = [given["const"]] if "const" in given else given.get("enum")
    if isinstance(values, list):
        first = frozenset(json.dumps(value)[0] for value in values)
    elif isinstance(kinds, list) and all(isinstance(kind, str) and kind in _FIRST_OF_TYPES for kind in kinds):
        first = frozenset("".join(_FIRST_OF_TYPES[kind] for kind in kinds))
    else:
        first = frozenset("".join(_FIRST_OF_TYPES.values()))
    return first, frozenset() if first.isdisjoint("-0123456789") else _IN_NUMBERS


class _Lark:
    """Renders an expression in Lark. lazy: the terminals that end as soon as they match."""

    def __init__(self, lazy: Collection[Pattern]) -> None:
        self._lazy = lazy
        self._rules: dict[Expression, str] = {}
        self._lines: list[str] = []
        self._terminals: dict[str, str] = {}

    def text(self, expression: Expression) -> str:
        start = f"start: {self._body(expression)}"
        terminals = [f"{name}: {body}" for name, body in self._terminals.items()]
        return "\n".join([start, *self._lines, *terminals]) + "\n"

    def _part(self, expression: Expression) -> str:
        match expression:
            case Pattern():
                expression.definitions(self._terminals)
                if expression not in self._lazy:
                    return expression.name
            case TokenReference():
                return expression.text
        if expression not in self._rules:
            self._rules[expression] = name = f"rule_{len(self._rules)}"
            option = "[lazy]" if expression in self._lazy else ""
            self._lines.append(f"{name}{option}: {self._body(expression)}")
        return self._rules[expression]

    def _body(self, expression: Expression) -> str:
        match expression:
            case Pattern() if expression in self._lazy and expression in self._rules:
                return expression.name
            case Embedded():
                return expression.text
            case Sequence():
                return " ".join(map(self._part, expression.parts)) or '""'
            case Choice():
                return " | ".join(map(self._part, expression.parts))
            case Repetition():
                return self._part(expression.parts[0]) + expression.operator
        return self._part(expression)
