"""GBNF, the grammar format of llama.cpp: parses it to expressions over characters, and translates it to Lark.

The parser follows llama.cpp's, with these differences: a line may also begin with ``|``, names may have underscores,
and these are errors: a rule that is defined twice, empty or reversed character ranges, and negated token references.

llama.cpp compares characters one by one and keeps all readings. llguidance has a lexer with the longest match. The
translation selects terminals for which both accept the same texts, see ``lexing``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from itertools import groupby
from typing import Final, NoReturn, cast, final

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.grammar_expressions import (
    ALL_CHARACTERS,
    MAX_DEPTH,
    Characters,
    Choice,
    Expression,
    Reference,
    Repetition,
    Rules,
    Sequence,
    Terminal,
    TokenReference,
    character_set,
    choice,
    repetition,
    sequence,
    simplify,
)
from nucleate.structured_output.lexing import Lexing, divide

_DEFINITION = re.compile(r"([\w-]+)[ \t]*::=", re.ASCII)
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NEXT_ALTERNATIVE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*\|")
_NAME = re.compile(r"[\w-]+", re.ASCII)
_COUNT = re.compile(r"\{[ \t]*(\d{1,9})[ \t]*(?:(,)[ \t]*(\d{1,9})?[ \t]*)?\}", re.ASCII)
_TOKEN = re.compile(r"<\[\d{1,9}\]>|<[^\s<>\[][^<>\s]*>", re.ASCII)
_CHARACTER = re.compile(
    r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\([trn\\\"\[\]-])|([^\\])", re.DOTALL
)
_NAMED_ESCAPES: Final = {"t": "\t", "r": "\r", "n": "\n"}
_CLASS_HINTS: Final = {"\\d": "0-9", "\\w": "0-9A-Za-z_", "\\s": r" \t\n\r"}
_OPERATORS: Final = ("*", "+", "?", "{")
_TOKEN_STARTS: Final = ("<", "!")
_LOOPS: Final = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parse_gbnf(text: str) -> dict[str, Expression]:
    """Return the rules of a grammar. Raises ParameterError, which names the line."""
    return _Parser(text).rules()


@final
class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._position, self._depth = text, 0, 0

    def rules(self) -> dict[str, Expression]:
        rules: dict[str, Expression] = {}
        used: dict[str, int] = {}  # position of the first use
        self._skip(_SPACE_AND_LINES)
        while self._position < len(self._text):
            found = _DEFINITION.match(self._text, self._position)
            if found is None:
                self._reject("expected a rule, such as name ::= ...")
            if found[1] in rules:
                self._reject(f"the rule {shown(found[1])} is defined twice")
            self._position = found.end()
            self._skip(_SPACE_AND_LINES)
            rules[found[1]] = expression = self._alternatives(_SPACE)
            for name in expression.references:
                used.setdefault(name, found.start())
            if self._peek() not in ("", "\r", "\n"):
                self._reject(f"unexpected {shown(self._peek())}")
            self._skip(_SPACE_AND_LINES)
        for name, position in {"root": len(self._text), **used}.items():
            if name not in rules:
                self._position = position
                self._reject(f"there is no rule {shown(name)}")
        return rules

    def _alternatives(self, space: re.Pattern[str]) -> Expression:
        """Parse alternatives. space: what separates their parts, with line breaks in brackets."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._reject(f"more than {MAX_DEPTH} levels of brackets")
        options = [self._sequence(space)]
        while found := _NEXT_ALTERNATIVE.match(self._text, self._position):
            self._position = found.end()
            self._skip(_SPACE_AND_LINES)
            options.append(self._sequence(space))
        self._depth -= 1
        return choice(options)

    def _sequence(self, space: re.Pattern[str]) -> Expression:
        parts: list[Expression] = []
        while (part := self._part(parts)) is not None:
            parts.append(part)
            self._skip(space)
        return sequence(parts)

    def _part(self, before: list[Expression]) -> Expression | None:
        """Parse one part, or an operator, which takes the last part away from ``before``."""
        parse = {'"': self._literal, "[": self._character_class, ".": self._any, "(": self._group}.get(self._peek())
        if parse is not None:
            self._position += 1
            return parse()
        if self._peek() in _OPERATORS:
            if not before:
                self._reject(f"nothing to repeat before {shown(self._peek())}")
            return repetition(before.pop(), *self._count(self._peek()))
        if self._peek() in _TOKEN_STARTS:
            return self._token()
        found = _NAME.match(self._text, self._position)
        if found is None or _DEFINITION.match(self._text, self._position):
            return None
        self._position = found.end()
        return Reference(found[0])

    def _any(self) -> Expression:
        return Characters(ALL_CHARACTERS)

    def _group(self) -> Expression:
        self._skip(_SPACE_AND_LINES)
        inner = self._alternatives(_SPACE_AND_LINES)
        if self._peek() != ")":
            self._reject(f"expected ), got {shown(self._peek())}")
        self._position += 1
        return inner

    def _count(self, operator: str) -> tuple[int, int | None]:
        if operator in _LOOPS:
            self._position += 1
            return _LOOPS[operator]
        found = _COUNT.match(self._text, self._position)
        if found is None:
            self._reject("a repetition must be {m}, {m,} or {m,n} with numbers of at most nine digits")
        low, high = int(found[1]), None if found[2] and not found[3] else int(found[3] or found[1])
        if high is not None and high < low:
            self._reject(f"the repetition {found[0]} has a maximum below its minimum")
        self._position = found.end()
        return low, high

    def _literal(self) -> Expression:
        codes: list[int] = []
        while self._peek() != '"':
            start = self._position
            codes.append(self._character('a string must end with "'))
            if codes[-1] == 0 or 0xD800 <= codes[-1] < 0xE000:  # in a character class, these match nothing
                self._reject(f"{self._text[start : self._position]} is not a character")
        self._position += 1
        words = (group for _, group in groupby(codes, key=lambda code: chr(code).isalnum()))  # parts to be split last
        return sequence(sequence(Characters(((code, code),)) for code in word) for word in words)

    def _character_class(self) -> Expression:
        negated = self._peek() == "^"
        self._position += negated
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            low = high = self._character("a character class must end with ]")
            if self._peek() == "-" and self._text[self._position + 1 : self._position + 2] != "]":
                self._position += 1
                high = self._character("a character class must end with ]")
            if high < low:
                self._reject(f"the range {shown(chr(low) + '-' + chr(high))} is reversed")
            ranges.append((low, high))
        if not ranges:
            self._reject("a character class must not be empty")
        self._position += 1
        return character_set(ranges, negated)

    def _character(self, expected: str) -> int:
        found = _CHARACTER.match(self._text, self._position)
        if found is None:
            if self._peek() == "":
                self._reject(expected)
            known = r"\n \r \t \\ \" \[ \] \- \xXX \uXXXX \UXXXXXXXX"
            escape = self._text[self._position : self._position + 2]
            hint = f"; for {escape}, write {_CLASS_HINTS[escape]}" if escape in _CLASS_HINTS else ""
            self._reject(f"unknown escape {shown(escape)}; allowed are {known}{hint}")
        digits = found[1] or found[2] or found[3]
        code = int(digits, 16) if digits else ord(_NAMED_ESCAPES.get(found[4], found[4]) if found[4] else found[5])
        if code > 0x10FFFF:
            self._reject(f"{found[0]} is not a character")
        self._position = found.end()
        return code

    def _token(self) -> Expression:
        if self._peek() == "!":
            self._reject("negated token references such as !<[7]> are not supported")
        found = _TOKEN.match(self._text, self._position)
        if found is None:
            self._reject("a token must be given as <[id]> or <name>")
        self._position = found.end()
        return TokenReference(found[0])

    def _peek(self) -> str:
        return self._text[self._position : self._position + 1]

    def _skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self._text, self._position)
        self._position = found.end() if found else self._position

    def _reject(self, reason: str) -> NoReturn:
        line = self._text.count("\n", 0, self._position) + 1
        raise ParameterError("grammar", f"grammar: in line {line}: {reason}")


MAX_LARK_CHARACTERS: Final = 400_000
"""Maximum length of a translated grammar: rules that are used often are repeated in it."""

MAX_NESTING: Final = 12
"""Brackets that are nested deeper become rules: llguidance accepts about twenty levels."""

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def is_gbnf(grammar: str) -> bool:
    return _RULE.search(grammar) is not None


def lark_text(grammar: str) -> str:
    """Return a grammar in Lark, translated from GBNF if necessary. Raises ParameterError for invalid GBNF."""
    return lark_of_lexing(gbnf_lexing(grammar)) if is_gbnf(grammar) else grammar


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


def lark_body(expression: Expression, leaf: Callable[[Expression], str], lines: list[str], level: int = 0) -> str:
    """Return an expression in Lark. leaf: the text of a part without parts. lines: gets more rules."""
    if not isinstance(expression, Sequence | Choice | Repetition):
        return leaf(expression)
    if level > MAX_NESTING and not isinstance(expression, Repetition):
        inner = lark_body(expression, leaf, lines)
        lines.append(f"part_{len(lines)}: {inner}")
        return f"part_{len(lines) - 1}"
    parts = [lark_body(part, leaf, lines, level + 1) for part in expression.parts]
    if isinstance(expression, Repetition):
        nested = isinstance(expression.parts[0], Repetition)
        return (f"({parts[0]})" if nested else parts[0]) + expression.operator
    separator = " | " if isinstance(expression, Choice) else " "
    return f"({separator.join(parts)})" if parts else '""'


def lark_of_lexing(lexing: Lexing) -> str:
    names = {name: f"rule_{number}" for number, name in enumerate(lexing.rules)} | {"root": "start"}
    terminals, definitions, lines = list[str](), list[str](), list[str]()
    for number, terminal in enumerate(lexing.terminals):
        if isinstance(terminal, TokenReference):
            terminals.append(terminal.text)
        else:
            terminals.append(f"T_{number}")
            definitions.append(f"T_{number}: /{terminal.regex}/")

    def leaf(expression: Expression) -> str:
        if isinstance(expression, Terminal):
            return terminals[expression.number]
        return names[cast("Reference", expression).name]

    for name, body in lexing.rules.items():
        lines.append(f"{names[name]}: {lark_body(body, leaf, lines)}")
    return "\n".join([*lines, *definitions]) + "\n"
