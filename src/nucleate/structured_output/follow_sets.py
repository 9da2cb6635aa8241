"""Which uses of terminals in a grammar may come first, and after each other. A set of uses is an int."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from nucleate.structured_output.grammar_expressions import (
    Choice,
    Expression,
    Reference,
    Repetition,
    Rules,
    Terminal,
)
from nucleate.structured_output.terminal_automata import Budget, members


class Ends(NamedTuple):
    """The uses of terminals at the ends of an expression, and whether it matches the empty text."""

    nullable: bool
    first: int
    last: int


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
class _Finder:
    def __init__(self, rules: Rules, num_uses: int, nullable: Sequence[bool], budget: Budget) -> None:
        self.rules = dict.fromkeys(rules, Ends(False, 0, 0))
        self.following = [0] * num_uses
        self.changed = True
        self._nullable, self._budget = nullable, budget

    def ends(self, expression: Expression) -> Ends:
        """Return the ends of an expression; extend ``following`` by what is inside it."""
        self._budget.spend()
        if isinstance(expression, Terminal):
            use = 1 << expression.use
            return Ends(self._nullable[expression.number], use, use)
        if isinstance(expression, Reference):
            return self.rules[expression.name]
        parts = [self.ends(part) for part in expression.parts]
        if isinstance(expression, Repetition):
            [part] = parts
            if expression.high != 1:
                self._connect(part, part)
            return part._replace(nullable=part.nullable or expression.low == 0)
        total = Ends(not isinstance(expression, Choice), 0, 0)
        for part in parts:
            total = (self._either if isinstance(expression, Choice) else self._connect)(total, part)
        return total

    @staticmethod
    def _either(left: Ends, right: Ends) -> Ends:
        return Ends(left.nullable or right.nullable, left.first | right.first, left.last | right.last)

    def _connect(self, left: Ends, right: Ends) -> Ends:
        for use in members(left.last):
            self._budget.spend()
            self.following[use] |= right.first
        return Ends(
            left.nullable and right.nullable,
            left.first | (right.first if left.nullable else 0),
            right.last | (left.last if right.nullable else 0),
        )
