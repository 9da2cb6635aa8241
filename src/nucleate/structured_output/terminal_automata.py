"""Finite automata of terminals, to find pairs of terminals for which a longest-match lexer is not exact.

A lexer reads the longest text that some terminal allowed at this point matches. It is wrong if a terminal X matches a
text, a byte follows that may come after X, and another allowed terminal Y (or X) can also read that byte.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from functools import reduce
from operator import or_
from typing import Final, NamedTuple, cast, final

from nucleate.structured_output.grammar_expressions import (
    Characters,
    Choice,
    Expression,
    Ranges,
    Repetition,
    Sequence,
)

MAX_STEPS: Final = 100_000
"""Maximum number of steps to examine the terminals of one grammar: about 0.2 s."""
MAX_COPIES: Final = 4
MAX_POSITIONS: Final = 2_000
"""Repetitions of more copies, or in larger terminals, count as unlimited: this may report more than necessary."""

END: Final = 1  # the set of the position 0, which stands for the end of the text


class TooManyStepsError(Exception):
    """The terminals are too complex to examine."""


@final
class Alphabet:
    """Divides the characters into classes that no terminal of a grammar distinguishes. A set of classes is an int."""

    def __init__(self, expressions: Iterable[Expression]) -> None:
        ranges = {pair for expression in expressions for pair in _ranges(expression)}
        self._bounds = sorted({low for low, _ in ranges} | {high + 1 for _, high in ranges})
        self._first_bytes: dict[int, int] = {}

    def classes(self, characters: Characters) -> int:
        found = 0
        for low, high in characters.ranges:
            first, end = bisect_left(self._bounds, low), bisect_left(self._bounds, high + 1)
            found |= (1 << end) - (1 << first)
        return found

    def class_of(self, code: int) -> int:
        """Return the class of a character; 0 if it is before all classes."""
        return 1 << found >> 1 if (found := bisect_right(self._bounds, code)) else 0

    def ranges(self, classes: int) -> Ranges:
        """Return the characters of a set of classes."""
        found: list[tuple[int, int]] = []
        for index in members(classes):
            low, high = self._bounds[index], self._bounds[index + 1] - 1
            found = [*found[:-1], (found[-1][0], high)] if found and found[-1][1] == low - 1 else [*found, (low, high)]
        return tuple(found)

    def first_bytes(self, classes: int) -> int:
        """Return the set (an int) of first bytes in UTF-8 of a set of classes."""
        found = self._first_bytes.get(classes)
        if found is None:
            found = 0
            for index in members(classes):
                first, end = _first_byte(self._bounds[index]), _first_byte(self._bounds[index + 1] - 1) + 1
                found |= (1 << end) - (1 << first)
            self._first_bytes[classes] = found
        return found


def _first_byte(code: int) -> int:
    if code < 0x80:
        return code
    return 0xC0 | code >> 6 if code < 0x800 else 0xE0 | code >> 12 if code < 0x10000 else 0xF0 | code >> 18


def _ranges(expression: Expression) -> Iterator[tuple[int, int]]:
    if isinstance(expression, Characters):
        yield from expression.ranges
    for part in expression.parts:
        yield from _ranges(part)


@final
class Budget:
    """Counts steps: at most ``MAX_STEPS``. ``spend`` raises TooManyStepsError."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def spend(self, steps: int = 1) -> None:
        if not self.try_spend(steps):
            raise TooManyStepsError

    def try_spend(self, steps: int) -> bool:
        """Count steps. Returns whether any were left."""
        self._left -= steps
        return self._left >= 0


class Ends(NamedTuple):
    """The positions at the ends of an expression, as sets, and whether it matches the empty text."""

    nullable: bool
    first: int
    last: int


class Positions(ABC):
    """Finds the positions of expressions that may come after each other. ``following``: the set after each one."""

    def __init__(self, following: list[int], budget: Budget) -> None:
        self.following, self._budget = following, budget

    def ends(self, expression: Expression) -> Ends:
        """Return the ends of an expression; extend ``following`` by what is inside it. Raises TooManyStepsError."""
        self._budget.spend()
        if isinstance(expression, Repetition):
            return self.repetition_ends(expression)
        if not isinstance(expression, Choice | Sequence):
            return self.leaf_ends(expression)
        total = Ends(isinstance(expression, Sequence), 0, 0)
        for part in expression.parts:
            ends = self.ends(part)
            total = self.joined(total, ends) if isinstance(expression, Sequence) else Ends(*map(or_, total, ends))
        return total

    @abstractmethod
    def leaf_ends(self, leaf: Expression) -> Ends:
        """Return the ends of an expression without parts."""

    @abstractmethod
    def repetition_ends(self, repetition: Repetition) -> Ends: ...

    def joined(self, left: Ends, right: Ends) -> Ends:
        """Connect two parts of a sequence."""
        self.connect(left.last, right.first)
        return Ends(
            left.nullable and right.nullable,
            left.first | (right.first if left.nullable else 0),
            right.last | (left.last if right.nullable else 0),
        )

    def connect(self, positions: int, following: int) -> None:
        for position in members(positions):
            self._budget.spend()
            self.following[position] |= following


@final
class Automaton(Positions):
    """The position automaton of a regular expression. A state is the set (an int) of positions that may be next.

    max_copies: of the part of a repetition; more count as unlimited.
    """

    def __init__(
        self, expression: Expression, alphabet: Alphabet, budget: Budget, max_copies: int = MAX_COPIES
    ) -> None:
        super().__init__([0], budget)
        self._alphabet, self._max_copies = alphabet, max_copies
        self._classes: list[int] = [0]  # the characters of each position
        self.nullable, self.start, last = self.ends(expression)
        self.connect(last, END)
        self._moves: dict[int, list[tuple[int, int]]] = {}
        self._readable: dict[int, int] = {}

    def readable(self, state: int) -> int:
        """Return the characters that can be read in a state."""
        found = self._readable.get(state)
        if found is None:
            found = self._readable[state] = reduce(or_, (self._classes[each] for each in members(state)), 0)
        return found

    def moves(self, state: int) -> list[tuple[int, int]]:
        """Return disjoint sets of characters with the state that each leads to."""
        moves = self._moves.get(state)
        if moves is None:
            moves = []
            for position in members(state):
                moves = self._refined(moves, self._classes[position], self.following[position])
            self._moves[state] = moves
        return moves

    def _refined(self, moves: list[tuple[int, int]], classes: int, following: int) -> list[tuple[int, int]]:
        self._budget.spend(1 + len(moves))
        refined = []
        for known, state in moves:
            if known & classes:
                refined.append((known & classes, state | following))
            if known & ~classes:
                refined.append((known & ~classes, state))
            classes &= ~known
        return [*refined, (classes, following)] if classes else refined

    def leaf_ends(self, leaf: Expression) -> Ends:
        position = 1 << len(self._classes)
        self._classes.append(self._alphabet.classes(cast("Characters", leaf)))
        self.following.append(0)
        return Ends(False, position, position)

    def repetition_ends(self, repetition: Repetition) -> Ends:
        [part], low, high = repetition.parts, repetition.low, repetition.high
        exact = (high or low) <= self._max_copies and len(self._classes) < MAX_POSITIONS
        copies = max(1, high or low) if exact else 1
        total = Ends(True, 0, 0)
        for copy in range(1, copies + 1):
            ends = self.ends(part)
            if copy == copies and (high is None or not exact):
                self.connect(ends.last, ends.first)
            total = self.joined(total, ends._replace(nullable=ends.nullable or copy > low))
        return total


def conflicts(
    uses: Items[Automaton | None], following: Items[int], first: int, alphabet: Alphabet, budget: Budget
) -> set[int]:
    """Return the uses of terminals that must be split so that a longest-match lexer is exact.

    The lexer reads bytes, so characters with the same first byte conflict as well.

    uses: the terminal of each use; None for special tokens, which have no text. following: the set of uses (an int)
    that may come after each one. first: those at the beginning. Raises TooManyStepsError.
    """
    after = _first_bytes_after(uses, following, alphabet, budget)
    found: set[int] = set()
    overlaps: dict[tuple[Automaton, Automaton], Overlap] = {}

    def compare(left: int, right: int) -> bool:
        a, b = uses[left], uses[right]
        if a is None or b is None:
            return left == right
        between = overlaps.get((a, b)) or overlaps.setdefault((a, b), overlap(a, b, budget))
        if alphabet.first_bytes(between.after_first) & after[left]:
            found.add(right)
        if alphabet.first_bytes(between.after_second) & after[right]:
            found.add(left)
        return between.shared

    compare_pairs(first, following, budget, compare)
    return found


def compare_pairs(first: int, following: Items[int], budget: Budget, compare: Callable[[int, int], bool]) -> None:
    """Compare each two uses of terminals that the lexer may look for at the same time, as those in ``first``.

    compare: returns whether they have a text in common, after which the lexer looks for what follows each of them.
    """
    pairs: set[tuple[int, int]] = set()
    known: set[tuple[int, int]] = set()
    waiting = [(first, first)]
    while waiting:
        sets = waiting.pop()
        if sets in known:
            continue
        known.add(sets)
        for left in members(sets[0]):
            for right in members(sets[1]):
                budget.spend()
                if (left, right) not in pairs:
                    pairs |= {(left, right), (right, left)}
                    if compare(left, right):
                        waiting.append((following[left], following[right]))


def _first_bytes_after(
    uses: Items[Automaton | None], following: Items[int], alphabet: Alphabet, budget: Budget
) -> list[int]:
    """Return the set (an int) of bytes that may come after each use."""
    known: dict[int, int] = {}
    for following_uses in {*following}:
        readable = 0
        for use in members(following_uses):
            budget.spend()
            automaton = uses[use]
            readable |= automaton.readable(automaton.start) if automaton else 0
        known[following_uses] = alphabet.first_bytes(readable)
    return [known[following_uses] for following_uses in following]


class Overlap(NamedTuple):
    """How two terminals overlap: whether they share a text, and the characters with which the other one reads on."""

    shared: bool
    after_first: int
    """After a text of the first terminal, the second one can read these characters."""
    after_second: int


def overlap(a: Automaton, b: Automaton, budget: Budget) -> Overlap:
    shared, after_a, after_b = False, 0, 0
    known = {(a.start, b.start)}
    waiting = [*known]
    while waiting:
        state_a, state_b = waiting.pop()
        for read_a, next_a in a.moves(state_a):
            for read_b, next_b in b.moves(state_b):
                budget.spend()
                if not read_a & read_b:
                    continue
                shared |= bool(next_a & next_b & END)
                after_a |= b.readable(next_b) if next_a & END else 0
                after_b |= a.readable(next_a) if next_b & END else 0
                if (next_a, next_b) not in known:
                    known.add((next_a, next_b))
                    waiting.append((next_a, next_b))
    return Overlap(shared, after_a, after_b)


def members(number: int) -> Iterator[int]:
    """Yield the members of a set that is given as an int."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
