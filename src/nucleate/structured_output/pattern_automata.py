r"""Compares, complements and divides the regular expressions of JSON schemas, with finite automata.

A complement has no text that a pattern matches in any dialect, and disjoint patterns have none in common.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from nucleate.structured_output.grammar_expressions import (
    ALL_CHARACTERS,
    Characters,
    Expression,
    Ranges,
    Repetition,
    choice,
    intersected,
    sequence,
)
from nucleate.structured_output.pattern_parser import UnknownPatternError, characters, texts
from nucleate.structured_output.pattern_syntax import nesting
from nucleate.structured_output.terminal_automata import (
    MAX_COPIES,
    Alphabet,
    Automaton,
    Budget,
    TooManyStepsError,
    overlap,
)

MAX_POSITIONS: Final = 256
"""Maximum number of character classes of a pattern that is complemented or divided, with repetitions written out."""
MAX_STATES: Final = 2048
"""Maximum number of states of the automaton of all patterns of an object."""
MAX_PATTERN_LENGTH: Final = 10_000
MAX_NESTING: Final = 64
"""Maximum length, and nesting of brackets, of a pattern that is made."""
MAX_REGIONS: Final = 32
"""Maximum number of such patterns for one object; the grammar engine compares each with each."""

_PLAIN: Final = ((0x09, 0x0D), (0x20, 0x7E), (0x80, 0xD7FF), (0xE000, 0x10FFFF))
"""The characters of generated classes."""
_IN_NAMES: Final = ((0x09, 0x09), (0x0B, 0x0D), *_PLAIN[1:])
"""Those of names: without line feeds, before which ``$`` may match or not."""
_WHITESPACE: Final = {0x09: r"\t", 0x0A: r"\n", 0x0B: r"\v", 0x0C: r"\f", 0x0D: r"\r"}

_GROUP_BRACKET: Final = re.compile(r"\\.|([()])")
_ONE_CLASS: Final = re.compile(r"\[(?:\\.|[^\]\\])*\]", re.DOTALL)

_START, _END = -1, -2
"""States before the first one, and after the last ones."""

Edges = list[dict[int, str]]
"""By state: the regular expressions of the texts that lead to other states."""
_NONE: Final = frozenset[int]()


def complement(pattern: str, budget: Budget) -> str | None:
    """Return a regular expression of texts that a pattern does not match in any dialect; None if there is none.

    The result matches whole texts, with anchors. It matches no text with control characters. Raises
    UnknownPatternError.
    """
    return _Division([_texts(pattern)], budget).pattern({_NONE})


class NameRegions(NamedTuple):
    """Names by the groups of patterns that match them; the empty set is for the names that match none.

    patterns: disjoint patterns. declared: the groups that match each declared name.
    """

    patterns: dict[frozenset[int], str]
    declared: dict[str, frozenset[int]]


def name_regions(
    groups: Sequence[Sequence[str]], declared: Iterable[str], others_but: Iterable[str] | None, budget: Budget
) -> NameRegions | None:
    """Divide names by the groups of patterns that match them in any dialect.

    Some names have no pattern: those with control characters or line feeds, and those that a pattern matches in some
    dialects only. others_but: excluded from the names that match none; None: these have no pattern. Returns None if
    there are no such patterns of limited size.
    """
    if len(groups) > MAX_REGIONS:
        return None
    certain, excluded = len(groups), len(groups) + 1
    found: dict[frozenset[int], set[frozenset[int]]] = {}
    try:
        division = _Division(
            [
                *(choice(_texts(each) for each in patterns) for patterns in groups),
                choice(_texts(each, certain=True) for patterns in groups for each in patterns),
                choice(map(_literal, others_but or ())),
            ],
            budget,
            _IN_NAMES,
        )
        for label in division.labels:
            if certain in label or (others_but is not None and not label):
                found.setdefault(label - {certain, excluded}, set()).add(label)
        if len(found) > MAX_REGIONS:
            return None
        texts_of = {matched: division.pattern(labels) for matched, labels in found.items()}
        made = {matched: text for matched, text in texts_of.items() if text is not None}
        return NameRegions(made, {name: division.label(name) - {certain, excluded} for name in declared})
    except UnknownPatternError:
        return None


def disjoint_patterns(one: str, other: str, budget: Budget) -> bool:
    """Whether no text matches both patterns, in any dialect. False if that is unknown."""
    try:
        return not _overlap(texts(one), texts(other), budget)
    except UnknownPatternError:
        return False


def rejects_text(pattern: str, text: str, budget: Budget) -> bool:
    """Whether a pattern does not match a text in any dialect. False if that is unknown."""
    try:
        return len(text) <= MAX_POSITIONS and not _overlap(texts(pattern), _literal(text), budget)
    except UnknownPatternError:
        return False


def accepts_text(pattern: str, text: str, budget: Budget) -> bool:
    """Whether a pattern matches a text in every dialect. Raises UnknownPatternError."""
    return _overlap(_texts(pattern, certain=True), _literal(text), budget, MAX_POSITIONS)


def _literal(text: str) -> Expression:
    return sequence(characters([(ord(each), ord(each))]) for each in text)


def _overlap(one: Expression, other: Expression, budget: Budget, max_copies: int = MAX_COPIES) -> bool:
    """Whether two expressions may have a text in common. Raises UnknownPatternError."""
    alphabet = Alphabet([one, other])
    try:
        first, second = (Automaton(each, alphabet, budget, max_copies) for each in (one, other))
        return (first.nullable and second.nullable) or overlap(first, second, budget).shared
    except TooManyStepsError:
        raise UnknownPatternError from None


class _Division:
    """Divides texts of given characters by the expressions that match them. labels: which ones, by the state after one.

    Raises UnknownPatternError.
    """

    def __init__(self, expressions: Sequence[Expression], budget: Budget, given: Ranges = _PLAIN) -> None:
        self._alphabet, self._budget = Alphabet([*expressions, Characters(given)]), budget
        try:
            automata = [Automaton(each, self._alphabet, budget, MAX_POSITIONS) for each in expressions]
            self._moves, self.labels = _product(automata, self._alphabet.classes(Characters(given)), budget)
        except TooManyStepsError:
            raise UnknownPatternError from None
        self._edges = [{to: _class(self._alphabet, read) for to, read in moves.items()} for moves in self._moves]

    def label(self, text: str) -> frozenset[int]:
        """Return which expressions match a text of the given characters; none of them for others."""
        state = 0
        for character in text:
            read = self._alphabet.class_of(ord(character))
            following = [after for after, readable in self._moves[state].items() if readable & read]
            if not following:
                return _NONE
            [state] = following
        return self.labels[state]

    def pattern(self, labels: set[frozenset[int]]) -> str | None:
        """Return a regular expression of whole texts that have one of some labels; None if there are none."""
        try:
            ends = {state for state, label in enumerate(self.labels) if label in labels}
            text = _expression(self._edges, ends, self._budget)
        except TooManyStepsError:
            raise UnknownPatternError from None
        return f"^(?s:{text})$" if text else None


def _texts(pattern: str, *, certain: bool = False) -> Expression:
    found = texts(pattern, certain=certain)
    if _num_positions(found) > MAX_POSITIONS:
        raise UnknownPatternError
    return found


def _num_positions(expression: Expression) -> int:
    """Return the number of character classes of an expression with its repetitions written out."""
    if isinstance(expression, Characters):
        return 1
    copies = max(1, expression.high or expression.low) if isinstance(expression, Repetition) else 1
    return copies * sum(map(_num_positions, expression.parts))


def _product(
    automata: Sequence[Automaton], everything: int, budget: Budget
) -> tuple[list[dict[int, int]], list[frozenset[int]]]:
    """Return the automaton that runs all automata at once: the characters between states, and who matches in each."""
    start = tuple(each.start | each.nullable for each in automata)
    numbers, waiting = {start: 0}, [start]
    moves: list[dict[int, int]] = []
    for states in waiting:  # grows meanwhile
        pieces: list[tuple[int, tuple[int, ...]]] = [(everything, ())]
        for automaton, state in zip(automata, states, strict=True):
            refined = []
            for classes, following in pieces:
                for readable, after in automaton.moves(state):
                    budget.spend()
                    if classes & readable:
                        refined.append((classes & readable, (*following, after)))
                    classes &= ~readable
                if classes:
                    refined.append((classes, (*following, 0)))
            pieces = refined
        found: dict[int, int] = {}
        for classes, following in pieces:
            if following not in numbers:
                numbers[following] = len(numbers)
                waiting.append(following)
                if len(numbers) > MAX_STATES:
                    raise TooManyStepsError
            found[numbers[following]] = found.get(numbers[following], 0) | classes
        moves.append(found)
    return moves, [frozenset(index for index, state in enumerate(states) if state & 1) for states in numbers]


def _class(alphabet: Alphabet, classes: int) -> str:
    """Return a regular expression of one character of some classes; empty for control characters only."""
    given = alphabet.ranges(classes)
    if given == ALL_CHARACTERS:
        return "."
    parts: list[str] = []
    for low, high in intersected(given, _PLAIN):
        if high <= 0x0D:
            parts += [_WHITESPACE[code] for code in range(low, high + 1)]
        else:
            parts.append(_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}")
    text = "".join(parts)
    return text if len(text) == 1 and text.isalnum() else f"[{text}]" if text else ""


def _escaped(code: int) -> str:
    return f"\\{chr(code)}" if chr(code) in r"[]()\^-&~" else chr(code)


def _expression(edges: Edges, ends: set[int], budget: Budget) -> str:
    """Return a regular expression of the texts from state 0 to some states, or "" if there are none.

    Eliminates the states one after the other. Raises TooManyStepsError if it gets too large.
    """
    out = _useful(edges, ends)
    if _START not in out:
        return ""
    into: dict[int, set[int]] = {state: set() for state in out}
    for state, each in out.items():
        for to in each:
            into[to].add(state)
    while len(out) > 2:
        budget.spend(len(out))
        state = min(out.keys() - {_START, _END}, key=lambda each: (_cost(each, out, into), -each))
        loop = out[state].pop(state, None)
        into[state].discard(state)
        again = "" if loop is None else f"{_grouped(loop)}*"
        for source in into[state]:
            prefix = out[source].pop(state)
            for to, suffix in out[state].items():
                text = _alternative(prefix) + again + _alternative(suffix)
                out[source][to] = f"{out[source][to]}|{text}" if to in out[source] else text
                into[to].add(source)
                if len(out[source][to]) > MAX_PATTERN_LENGTH:
                    raise TooManyStepsError
        for to in out.pop(state):
            into[to].discard(state)
        del into[state]
    text = out[_START][_END]
    if nesting(_GROUP_BRACKET.findall(text)) > MAX_NESTING:
        raise TooManyStepsError
    return f"(?:{text})"


def _useful(edges: Edges, ends: set[int]) -> dict[int, dict[int, str]]:
    """Return the states from which some states can be reached, with a state before the first and one after those."""
    out = {state: {to: text for to, text in each.items() if text} for state, each in enumerate(edges)}
    for state in ends:
        out[state][_END] = ""
    out |= {_START: {0: ""}, _END: {}}
    useful, before = {_END}, 0
    while len(useful) > before:
        before = len(useful)
        useful |= {state for state, each in out.items() if not useful.isdisjoint(each)}
    return {
        state: {to: text for to, text in each.items() if to in useful} for state, each in out.items() if state in useful
    }


def _cost(state: int, out: dict[int, dict[int, str]], into: dict[int, set[int]]) -> int:
    sources, targets = into[state] - {state}, out[state].keys() - {state}
    loop = len(out[state].get(state, ""))
    before = sum(len(out[source][state]) for source in sources)
    after = sum(len(out[state][to]) for to in targets)
    return before * (len(targets) - 1) + after * (len(sources) - 1) + loop * (len(sources) * len(targets) - 1)


def _alternative(text: str) -> str:
    return f"(?:{text})" if "|" in text else text


def _grouped(text: str) -> str:
    return text if len(text) == 1 or _ONE_CLASS.fullmatch(text) else f"(?:{text})"
