"""Translates GBNF, the grammar format of llama.cpp, to Lark.

llama.cpp compares characters one by one and keeps all readings. llguidance has a lexer with the longest match. The
translation selects terminals for which both accept the same texts, see ``lexing``.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.gbnf_parser import parse_gbnf
from nucleate.structured_output.grammar_expressions import (
    Choice,
    Expression,
    Reference,
    Repetition,
    Rules,
    Terminal,
    TokenReference,
)
from nucleate.structured_output.grammar_simplification import simplify
from nucleate.structured_output.lexing import Lexing, divide

MAX_LARK_CHARACTERS: Final = 400_000
"""Maximum length of a translated grammar: rules that are used often are repeated in it."""

MAX_NESTING: Final = 12
"""Brackets that are nested deeper become rules: llguidance accepts about twenty levels."""

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def is_gbnf(grammar: str) -> bool:
    return _RULE.search(grammar) is not None


def lark_text(grammar: str) -> str:
    """Return a grammar in Lark, translated from GBNF if necessary. Raises ParameterError for invalid GBNF."""
    return _translated(grammar) if is_gbnf(grammar) else grammar


@lru_cache(maxsize=8)
def _translated(text: str) -> str:
    return lark_of_lexing(gbnf_lexing(text))


@lru_cache(maxsize=8)
def gbnf_lexing(text: str) -> Lexing:
    """Return a GBNF grammar divided into terminals. Raises ParameterError."""
    return lexing_of(parse_gbnf(text))


def lexing_of(rules: Rules) -> Lexing:
    """Return the rules of a grammar divided into terminals. Raises ParameterError."""
    lexing = divide(simplify(rules, "root"), "root")
    characters = sum(terminal.regex_length for terminal in lexing.terminals)
    if characters > MAX_LARK_CHARACTERS:
        why = f"{characters} characters with its rules included; the maximum is {MAX_LARK_CHARACTERS}"
        raise ParameterError("grammar", f"grammar is too large: {why}")
    return lexing


def lark_of_lexing(lexing: Lexing) -> str:
    names = {name: f"rule_{number}" for number, name in enumerate(lexing.rules)} | {"root": "start"}
    terminals = [
        terminal.text if isinstance(terminal, TokenReference) else f"T_{number}"
        for number, terminal in enumerate(lexing.terminals)
    ]

    lines: list[str] = []

    def text(expression: Expression, level: int = 0) -> str:
        match expression:
            case Terminal():
                return terminals[expression.number]
            case Reference():
                return names[expression.name]
        if level > MAX_NESTING and not isinstance(expression, Repetition):
            inner = text(expression)
            lines.append(f"part_{len(lines)}: {inner}")
            return f"part_{len(lines) - 1}"
        parts = [text(part, level + 1) for part in expression.parts]
        if isinstance(expression, Repetition):
            nested = isinstance(expression.parts[0], Repetition)
            return (f"({parts[0]})" if nested else parts[0]) + expression.operator
        separator = " | " if isinstance(expression, Choice) else " "
        return f"({separator.join(parts)})" if parts else '""'

    for name, body in lexing.rules.items():
        lines.append(f"{names[name]}: {text(body)}")
    lines += [
        f"{terminals[number]}: /{terminal.regex}/"
        for number, terminal in enumerate(lexing.terminals)
        if not isinstance(terminal, TokenReference)
    ]
    return "\n".join(lines) + "\n"
