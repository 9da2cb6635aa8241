"""Finds the bytes at the boundaries of a GBNF grammar, which decide whether other text can follow it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from nucleate.structured_output.follow_sets import follow_sets
from nucleate.structured_output.lexing import Lexing
from nucleate.structured_output.terminal_automata import Alphabet, Automaton, Budget, TooManyStepsError, members

ALL_BYTES: Final = (1 << 256) - 1
_END: Final = 1  # as in terminal_automata


def boundary_bytes(lexing: Lexing) -> tuple[int, int]:
    """Return the bytes with which the texts of a grammar may begin, and those that may follow a complete text in it.

    A set of bytes is an int. Both are ``ALL_BYTES`` if the grammar is too complex to examine.
    """
    alphabet, budget = Alphabet(lexing.terminals), Budget()
    try:
        automata = [Automaton(each, alphabet, budget) if each.regular else None for each in lexing.terminals]
        nullable = [automaton is not None and automaton.nullable for automaton in automata]
        following, ends = follow_sets(lexing.rules, "root", len(lexing.uses), nullable, budget)

        def first(uses: int) -> int:
            found = (automata[lexing.uses[use]] for use in members(uses))
            return _union(automaton.readable(automaton.start) for automaton in found if automaton)

        continuing = 0
        for use in members(ends.last):
            automaton = automata[lexing.uses[use]]
            continuing |= first(following[use]) | (_after_a_text(automaton) if automaton else 0)
        if ends.nullable:
            continuing |= first(ends.first)
        return alphabet.first_bytes(first(ends.first)), alphabet.first_bytes(continuing)
    except TooManyStepsError:
        return ALL_BYTES, ALL_BYTES


def _union(sets: Iterable[int]) -> int:
    found = 0
    for each in sets:
        found |= each
    return found


def _after_a_text(automaton: Automaton) -> int:
    """Return the characters with which a terminal can read on after one of its texts."""
    found, known, waiting = 0, {automaton.start}, [automaton.start]
    while waiting:
        state = waiting.pop()
        for _, following in automaton.moves(state):
            if following & _END:
                found |= automaton.readable(following)
            if following not in known:
                known.add(following)
                waiting.append(following)
    return found
