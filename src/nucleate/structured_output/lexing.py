"""Divides a grammar into terminals, so that a longest-match lexer with an Earley parser accepts exactly its texts.

Long terminals make token masks fast: single characters cost a step of the parser for each byte of each token. So the
longest regular parts become terminals, and those for which the lexer would be wrong are split into their parts, down to
single characters, which are always exact. Which uses of terminals may come first, and after each other, decides this.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import groupby
from operator import or_
from typing import Final, cast, final

from nucleate.structured_output.grammar_expressions import (
    EMPTY,
    NOTHING,
    Characters,
    Choice,
    Expression,
    Reference,
    Repetition,
    Rules,
    Terminal,
    TokenReference,
    choice,
    rebuilt,
    repetition,
    sequence,
)
from nucleate.structured_output.terminal_automata import (
    Alphabet,
    Automaton,
    Budget,
    Ends,
    Positions,
    TooManyStepsError,
    conflicts,
    members,
    overlap,
)


def follow_sets(
    rules: Rules, start: str, num_uses: int, nullable: Sequence[bool], budget: Budget
) -> tuple[list[int], Ends]:
    """Return the uses that may come after each use, and those at the ends of a text. nullable: of each terminal.

    Raises TooManyStepsError.
    """
    finder = _Finder(rules, num_uses, nullable, budget)
    while finder.changed:
        finder.changed = False
        for name, body in rules.items():
            ends = finder.ends(body)
            finder.changed |= ends != finder.rules[name]
            finder.rules[name] = ends
    return finder.following, finder.rules[start]


@final
class _Finder(Positions):
    """A position is the use of a terminal."""

    def __init__(self, rules: Rules, num_uses: int, nullable: Sequence[bool], budget: Budget) -> None:
        super().__init__([0] * num_uses, budget)
        self.rules = dict.fromkeys(rules, Ends(False, 0, 0))
        self.changed = True
        self._nullable = nullable

    def leaf_ends(self, leaf: Expression) -> Ends:
        if isinstance(leaf, Reference):
            return self.rules[leaf.name]
        terminal = cast("Terminal", leaf)
        return Ends(self._nullable[terminal.number], 1 << terminal.use, 1 << terminal.use)

    def repetition_ends(self, repetition: Repetition) -> Ends:
        ends = self.ends(repetition.parts[0])
        if repetition.high != 1:
            self.connect(ends.last, ends.first)
        return ends._replace(nullable=ends.nullable or repetition.low == 0)


MAX_ROUNDS: Final = 40
"""Maximum number of times that conflicting terminals are split before all are."""


@final
class Lexing:
    """A grammar over terminals: its ``rules``, and ``terminals``, which are regular or special tokens."""

    def __init__(self, rules: Rules, split: set[str] | None) -> None:
        """split: the regular expressions of the parts that are no terminals; None: only characters are."""
        self._split = split
        self.terminals: list[Expression] = []
        self.uses: list[int] = []
        """The number of the terminal of each use."""
        self._numbers: dict[str, int] = {}
        self.rules = {name: self._divided(body) for name, body in rules.items()}

    def _divided(self, expression: Expression) -> Expression:
        if isinstance(expression, TokenReference):
            return self._terminal(expression.text, expression)
        if expression is EMPTY or isinstance(expression, Reference):
            return expression
        whole = isinstance(expression, Characters) or (self._split is not None and expression.regular)
        if whole and expression.regex not in (self._split or ()):
            return self._terminal(expression.regex, expression)
        return rebuilt(expression, [self._divided(part) for part in expression.parts])

    def _terminal(self, key: str, expression: Expression) -> Terminal:
        number = self._numbers.setdefault(key, len(self.terminals))
        if number == len(self.terminals):
            self.terminals.append(expression)
        self.uses.append(number)
        return Terminal(len(self.uses) - 1, number)


def divide(rules: Rules, start: str) -> Lexing:
    """Divide a grammar into terminals. Every rule must match a text."""
    grouped: dict[str, Expression] = {}
    for name, body in rules.items():
        grouped[name] = _grouped(body, grouped)
    split: set[str] = set()
    alphabet = Alphabet(grouped.values())
    budget = Budget()
    automata: dict[Expression, Automaton] = {}
    for _ in range(MAX_ROUNDS):
        lexing = Lexing(grouped, split)
        if len(lexing.rules) == 1 and isinstance(lexing.rules[start], Terminal):
            return lexing
        try:
            uses, following, ends = _uses(lexing, start, automata, alphabet, budget)
            found = conflicts(uses, following, ends.first, alphabet, budget)
        except TooManyStepsError:
            break
        if not found:
            return lexing
        split |= {lexing.terminals[lexing.uses[use]].regex for use in found}
    return Lexing(grouped, None)


def _uses(
    lexing: Lexing, start: str, automata: dict[Expression, Automaton], alphabet: Alphabet, budget: Budget
) -> tuple[list[Automaton | None], list[int], Ends]:
    """Return the automaton of each use (None: special tokens), and ``follow_sets``. automata: gets those of terminals.

    Raises TooManyStepsError.
    """
    for terminal in lexing.terminals:
        if terminal.regular and terminal not in automata:
            automata[terminal] = Automaton(terminal, alphabet, budget)
    nullable = [terminal in automata and automata[terminal].nullable for terminal in lexing.terminals]
    following, ends = follow_sets(lexing.rules, start, len(lexing.uses), nullable, budget)
    return [automata.get(lexing.terminals[number]) for number in lexing.uses], following, ends


def _grouped(expression: Expression, rules: dict[str, Expression]) -> Expression:
    """Group neighbouring regular parts of a sequence, and regular alternatives of a choice. Adds to ``rules``."""
    if expression.regular or not expression.parts:
        return expression
    parts = [_grouped(part, rules) for part in expression.parts]
    if isinstance(expression, Choice):
        parts.sort(key=lambda part: not part.regular)
    join = choice if isinstance(expression, Choice) else sequence
    joined = []
    for regular, group in groupby(parts, key=lambda part: part.regular):
        members = list(group)
        together = join(members)
        joined += [together] if regular and together.regular else members
    found = rebuilt(expression, joined)
    if isinstance(found, Repetition) and found.high is None and found.low <= 1 and isinstance(found.parts[0], Choice):
        return _text_between(found, found.parts[0], rules)
    return found


def _text_between(loop: Repetition, inner: Choice, rules: dict[str, Expression]) -> Expression:
    """Return ``(r | o)*``, or ``(r | o)+``, as repetitions of ``r`` between the others, so that these are terminals."""
    regular = choice(part for part in inner.parts if part.regular)
    if regular is NOTHING:
        return loop
    text = repetition(regular, 0, None)
    name = f"part {len(rules)}"
    rules[name] = sequence([choice(part for part in inner.parts if not part.regular), text])
    other = Reference(name)
    if loop.low == 0:
        return sequence([text, repetition(other, 0, None)])
    begin = sequence([repetition(regular, 1, None), repetition(other, 0, None)])
    return choice([begin, repetition(other, 1, None)])


ALL_BYTES: Final = (1 << 256) - 1


def boundary_bytes(lexing: Lexing) -> tuple[int, int]:
    """Return the bytes with which the texts of a grammar may begin, and those that may follow a complete text in it.

    A set of bytes is an int. Both are ``ALL_BYTES`` if the grammar is too complex to examine.
    """
    alphabet, budget = Alphabet(lexing.terminals), Budget()
    try:
        automata, following, ends = _uses(lexing, "root", {}, alphabet, budget)

        def first(uses: int) -> int:
            found = (automata[use] for use in members(uses))
            return reduce(or_, (automaton.readable(automaton.start) for automaton in found if automaton), 0)

        continuing = 0
        for use in members(ends.last):
            continuing |= first(following[use])
            if automaton := automata[use]:
                continuing |= overlap(automaton, automaton, budget).after_first
        if ends.nullable:
            continuing |= first(ends.first)
        return alphabet.first_bytes(first(ends.first)), alphabet.first_bytes(continuing)
    except TooManyStepsError:
        return ALL_BYTES, ALL_BYTES
