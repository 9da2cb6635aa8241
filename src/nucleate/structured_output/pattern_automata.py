r"""Compares and complements the regular expressions of JSON schemas, with finite automata.

Dialects differ: ``\d`` may match other digits than ASCII's, and ``$`` before a final line break. So the texts of a
pattern are all those that it matches in any dialect. A complement has none of them, and disjoint patterns have none in
common.
Syntax that is not common to all dialects is not supported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from nucleate.structured_output.grammar_expressions import (
    EMPTY,
    Characters,
    Expression,
    Repetition,
    choice,
    rebuilt,
    repetition,
    sequence,
)
from nucleate.structured_output.grammar_simplification import solved
from nucleate.structured_output.terminal_automata import END, Alphabet, Automaton, Budget, TooManyStepsError, overlap

MAX_PATTERN_CHARACTERS: Final = 500
"""Maximum length of a pattern that is compared or complemented."""
MAX_POSITIONS: Final = 200
"""Maximum number of character classes of such a pattern, with its repetitions written out."""
MAX_STATES: Final = 64
"""Maximum number of states of a complement."""
MAX_COMPLEMENT_CHARACTERS: Final = 5_000
"""Maximum length of a complement."""
_MAX_DEPTH: Final = 16
_COPIES: Final = 4
"""Repetitions of at most so many copies are exact in an automaton."""

_ESCAPE = r"\\(?:[dDwWsSnrtfv]|x[0-9a-fA-F]{2}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|[^a-zA-Z0-9\s])"
_TOKEN = re.compile(
    rf"(?P<open>\((?:\?(?:P?<[A-Za-z_]\w*>|:)|(?!\?)))|(?P<close>\))|(?P<bar>\|)|(?P<anchor>[\^$])"
    rf"|(?P<count>(?:[*+?]|\{{(?P<low>[0-9]{{1,4}})(?P<comma>,?)(?P<high>[0-9]{{0,4}})\}})\??)"
    rf"|\[(?P<negated>\^?)(?P<set>(?:{_ESCAPE}|[^\\\[\]])+)\]|(?P<escape>{_ESCAPE})|(?P<one>[^\\\[\](){{}}*+?|])",
    re.DOTALL,
)
_SET_ITEM = re.compile(rf"(?P<first>{_ESCAPE}|.)(?:-(?P<last>{_ESCAPE}|[^-]))?", re.DOTALL)
_SET_OPERATOR = re.compile(r"&&|--|~~|\|\|")
_LETTERS: Final = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_LAST: Final = 0x10FFFF
_BEYOND_ASCII: Final = (0x80, _LAST)

Ranges = list[tuple[int, int]]


class UnknownPatternError(Exception):
    """A pattern has syntax that is not common to all dialects, or is too large."""


class _Class(NamedTuple):
    """The characters that an escape matches in every dialect, and in any."""

    always: Ranges
    ever: Ranges


class _Group(NamedTuple):
    """Alternatives, each a sequence."""

    branches: list[list[_Node]]


class _Repeated(NamedTuple):
    part: _Node
    low: int
    high: int | None


_Node = Expression | _Group | _Repeated | str
"""A part of a pattern; a text is an anchor."""


def _inverted(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found, low = [], 0
    for first, last in sorted(ranges):
        if low < first:
            found.append((low, first - 1))
        low = max(low, last + 1)
    return [*found, (low, _LAST)] if low <= _LAST else found


def _characters(ranges: Iterable[tuple[int, int]]) -> Characters:
    return Characters(tuple(_inverted(_inverted(ranges))))


def _class_pair(always: Ranges, maybe: Ranges) -> tuple[_Class, _Class]:
    """Return a class and its opposite. maybe: the further ASCII characters that it matches in some dialect."""
    ever = [*always, *maybe, _BEYOND_ASCII]
    return _Class(always, ever), _Class(_inverted(ever), _inverted(always))


_DIGIT, _NO_DIGIT = _class_pair([(48, 57)], [])
_WORD, _NO_WORD = _class_pair([(48, 57), (65, 90), (95, 95), (97, 122)], [])
_SPACE, _NO_SPACE = _class_pair([(9, 13), (32, 32)], [(28, 31)])
_CLASSES: Final = {"d": _DIGIT, "D": _NO_DIGIT, "w": _WORD, "W": _NO_WORD, "s": _SPACE, "S": _NO_SPACE}
_ANY = repetition(_characters([(0, _LAST)]), 0, None)
_NOT_NEWLINE = _characters(_inverted([(10, 10)]))
_MAYBE_NEWLINE = repetition(_characters([(10, 10)]), 0, 1)
_WRITABLE = _characters([(9, 13), (32, 0xD7FF), (0xE000, _LAST)])
"""Without control characters, see ``schema_soundness``."""


def complement(pattern: str, budget: Budget) -> str | None:
    """Return a regular expression of texts that a pattern does not match in any dialect; None if there is none.

    The result matches whole texts, with anchors. It matches no text with control characters. Raises
    UnknownPatternError.
    """
    expression = _expanded(_texts(pattern), [MAX_POSITIONS])
    alphabet = Alphabet([expression, _WRITABLE])
    try:
        automaton = Automaton(expression, alphabet, budget)
        moves = _all_moves(automaton, alphabet.classes(_WRITABLE))
        budget.spend(len(moves) ** 2)
    except TooManyStepsError:
        raise UnknownPatternError from None
    useful = {state for state in moves if not state & END}
    while more := {state for state in moves.keys() - useful if not useful.isdisjoint(moves[state])}:
        useful |= more
    start = _start(automaton)
    if start not in useful:
        return None
    equations: dict[str, dict[str | None, Expression]] = {}
    for state in reversed([*moves]):  # the states before others last, which keeps the solution short
        if state in useful:
            tails: dict[str | None, Expression] = {
                f"{after}": alphabet.characters(classes) for after, classes in moves[state].items() if after in useful
            }
            equations[f"{state}"] = tails if state & END else {None: EMPTY, **tails}
    solution = solved(equations, at_end=True)[f"{start}"]
    if solution.regex_length > MAX_COMPLEMENT_CHARACTERS:
        raise UnknownPatternError
    return f"^(?:{solution.regex})$"


def disjoint_patterns(one: str, other: str, budget: Budget) -> bool:
    """Whether no text matches both patterns, in any dialect. False if that is unknown."""
    try:
        return _disjoint(_texts(one), _texts(other), budget)
    except UnknownPatternError:
        return False


def rejects_text(pattern: str, text: str, budget: Budget) -> bool:
    """Whether a pattern does not match a text in any dialect. False if that is unknown."""
    try:
        literal = sequence(_characters([(ord(each), ord(each))]) for each in text[: MAX_POSITIONS + 1])
        return len(text) <= MAX_POSITIONS and _disjoint(_texts(pattern), literal, budget)
    except UnknownPatternError:
        return False


def _disjoint(one: Expression, other: Expression, budget: Budget) -> bool:
    alphabet = Alphabet([one, other])
    try:
        first, second = Automaton(one, alphabet, budget), Automaton(other, alphabet, budget)
        return not (first.nullable and second.nullable) and not overlap(first, second, budget).shared
    except TooManyStepsError:
        return False


def _start(automaton: Automaton) -> int:
    return automaton.start | (END if automaton.nullable else 0)


def _all_moves(automaton: Automaton, writable: int) -> dict[int, dict[int, int]]:
    """Return the classes of characters from each state to others; from 0, after no text of the pattern, to itself."""
    moves: dict[int, dict[int, int]] = {}
    waiting = [_start(automaton)]
    for state in waiting:  # grows meanwhile
        if state in moves:
            continue
        found, left = dict[int, int](), writable
        for classes, after in automaton.moves(state):
            if classes & writable:
                found[after] = found.get(after, 0) | classes & writable
                left &= ~classes
        moves[state] = {**found, 0: left} if left else found
        waiting += moves[state]
        if len(moves) > MAX_STATES:
            raise UnknownPatternError
    return moves


def _expanded(expression: Expression, left: list[int]) -> Expression:
    """Write out repetitions that an automaton would not represent exactly. left: how many positions are left."""
    if isinstance(expression, Characters):
        left[0] -= 1
        if left[0] < 0:
            raise UnknownPatternError
        return expression
    if isinstance(expression, Repetition) and (expression.high or expression.low) > _COPIES:
        [part], low, high = expression.parts, expression.low, expression.high
        copies = [_expanded(part, left) for _ in range(min(high or low, MAX_POSITIONS + 1))]
        rest = [repetition(each, 0, 1) for each in copies[low:]]
        return sequence([*copies[:low], *rest, *([repetition(_expanded(part, left), 0, None)] if high is None else [])])
    return rebuilt(expression, [_expanded(part, left) for part in expression.parts])


@lru_cache(256)
def _texts(pattern: str) -> Expression:
    """Return the texts in which a pattern is found. Raises UnknownPatternError."""
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise UnknownPatternError
    return _choice(_parsed(pattern), first=True, last=True)


def _parsed(pattern: str) -> _Group:
    stack, position = [_Group([[]])], 0
    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        if token is None or len(stack) > _MAX_DEPTH:
            raise UnknownPatternError
        position = token.end()
        branch = stack[-1].branches[-1]
        if token["open"]:
            stack.append(_Group([[]]))
        elif token["close"]:
            if len(stack) == 1:
                raise UnknownPatternError
            group = stack.pop()
            stack[-1].branches[-1].append(group)
        elif token["bar"]:
            stack[-1].branches.append([])
        elif token["count"]:
            branch[-1:] = [_repeated(branch[-1:], token)]
        else:
            branch.append(token["anchor"] or _one_character(token))
    if len(stack) > 1:
        raise UnknownPatternError
    return stack[0]


def _repeated(parts: list[_Node], token: re.Match[str]) -> _Repeated:
    if not parts or isinstance(parts[0], _Repeated | str):
        raise UnknownPatternError
    if token["low"] is None:
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[token["count"][0]]
    else:
        low = int(token["low"])
        high = int(token["high"]) if token["high"] else None if token["comma"] else low
    if high == 0 or (high is not None and high < low):
        raise UnknownPatternError
    return _Repeated(parts[0], low, high)


def _one_character(token: re.Match[str]) -> Expression:
    if token["one"]:
        return _NOT_NEWLINE if token["one"] == "." else _characters([(ord(token["one"]), ord(token["one"]))])
    if token["escape"]:
        return _characters(_class(token["escape"]).ever)
    always, ever = Ranges(), Ranges()
    if _SET_OPERATOR.search(token["set"]):
        raise UnknownPatternError
    for item in _SET_ITEM.finditer(token["set"]):
        first = _class(item["first"])
        if item["last"] is None:
            always, ever = [*always, *first.always], [*ever, *first.ever]
            continue
        last = _class(item["last"])
        both = [each.always for each in (first, last)]
        if any(len(each) != 1 or each[0][0] != each[0][1] for each in both) or both[0] > both[1]:
            raise UnknownPatternError
        pair = (both[0][0][0], both[1][0][0])
        always, ever = [*always, pair], [*ever, pair]
    return _characters(_inverted(always) if token["negated"] else ever)


def _class(text: str) -> _Class:
    """Return the characters of an escape or of one character."""
    if text[0] == "\\" and text[1] in _CLASSES:
        return _CLASSES[text[1]]
    if text[0] == "\\" and text[1] in "xu":
        code = int(f"0x{text[2:]}", 0)
    else:
        code = _LETTERS.get(text[1], ord(text[1])) if text[0] == "\\" else ord(text)
    return _Class([(code, code)], [(code, code)])


def _choice(group: _Group, *, first: bool, last: bool) -> Expression:
    return choice(_sequence(branch, first, last) for branch in group.branches)


def _sequence(nodes: Sequence[_Node], first: bool, last: bool) -> Expression:
    """Return the texts of a sequence. first, last: whether others may come before and after it in the whole text."""
    inner = [*nodes]
    if first and inner[:1] == ["^"]:
        first = False
        del inner[0]
    end = [_ANY] if last else []
    if last and inner[-1:] == ["$"]:
        last, end = False, [_MAYBE_NEWLINE]
        del inner[-1]
    if not inner:
        return sequence([*([_ANY] if first else []), *end])
    before = [_ANY] if first and not isinstance(inner[0], _Group) else []
    if last and isinstance(inner[-1], _Group):
        end = []
    final = len(inner) - 1
    parts = [_texts_of(each, first and not at, last and at == final) for at, each in enumerate(inner)]
    return sequence([*before, *parts, *end])


def _texts_of(node: _Node, first: bool, last: bool) -> Expression:
    if isinstance(node, str):
        raise UnknownPatternError  # an anchor inside of a text
    if isinstance(node, _Repeated):
        return repetition(_texts_of(node.part, first=False, last=False), node.low, node.high)
    return _choice(node, first=first, last=last) if isinstance(node, _Group) else node
