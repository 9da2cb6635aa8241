"""Regular expressions for property names: all names but some, and the names that match certain patterns only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from nucleate.structured_output.grammar_expressions import ALL_CHARACTERS, Characters, choice, sequence
from nucleate.structured_output.pattern_parser import UnknownSyntaxError, parse_pattern
from nucleate.structured_output.terminal_automata import Alphabet, Automaton, Budget, TooManyStepsError

NO_CONTROL: Final = r"[^\x00-\x08\x0e-\x1f]"
"""All characters except control characters other than whitespace: see ``schema_soundness``."""
MAX_STATES: Final = 512
"""Maximum number of states of the automaton of all patterns of an object."""
MAX_PATTERN_LENGTH: Final = 10_000
MAX_NESTING: Final = 64
"""Maximum length, and nesting of brackets, of a pattern that ``name_regions`` returns."""
MAX_REGIONS: Final = 32
"""Maximum number of such patterns for one object; the grammar engine compares each with each."""

_PLAIN: Final = ((0x09, 0x0D), (0x20, 0x7E), (0x80, 0xD7FF), (0xE000, 0x10FFFF))
"""The characters of generated classes."""
_WHITESPACE: Final = {0x09: r"\t", 0x0A: r"\n", 0x0B: r"\v", 0x0C: r"\f", 0x0D: r"\r"}

_ESCAPE: Final = re.compile(r"\\.")
_ONE_CLASS: Final = re.compile(r"\[(?:\\.|[^\]\\])*\]", re.DOTALL)

_START, _END = -1, -2
"""States before the first one, and after the last ones."""

Edges = list[dict[int, str]]
"""By state: the regular expressions of the texts that lead to other states."""


def pattern_excluding(texts: Iterable[str]) -> str:
    """Return a regular expression that matches every text except these."""
    given = list(texts)
    if not any(given):
        return ".+" if given else ".*"
    branches: dict[str, dict[str, None]] = {}
    for text in given:
        if text:
            branches.setdefault(text[0], {})[text[1:]] = None
    excluded = "".join(rf"\u{{{ord(first):x}}}" for first in branches)
    more = [rf"\u{{{ord(first):x}}}(?:{pattern_excluding(rest)})" for first, rest in branches.items()]
    end = [] if "" in given else [""]
    return "|".join([*end, f"[[^{excluded}]&&{NO_CONTROL}].*", *more])


def name_regions(
    groups: Sequence[Sequence[str]], names: Iterable[str], budget: Budget
) -> dict[frozenset[int], str] | None:
    """Divide all names by the groups of patterns that match them: disjoint patterns by the set of groups.

    The empty set stands for the names that match none, except ``names``. Some names with control characters belong to
    no set. None: there is no such pattern of limited size, or a pattern has syntax unknown to ``parse_pattern``.
    """
    if len(groups) > MAX_REGIONS:
        return None
    try:
        expressions = [choice(map(parse_pattern, patterns)) for patterns in groups]
        expressions.append(choice(sequence(_literal(name)) for name in names))
        alphabet = Alphabet([*expressions, Characters(ALL_CHARACTERS)])
        automata = [Automaton(each, alphabet, budget, exact=True) for each in expressions]
        product = _product(automata, alphabet.classes(Characters(ALL_CHARACTERS)), budget)
        moves, labels = _minimized(*product, budget)
        edges = [{state: _class(alphabet, classes) for state, classes in each.items()} for each in moves]
        excluded = {len(groups)}
        regions = [*dict.fromkeys(label - excluded for label in labels)]
        if len(regions) > MAX_REGIONS:
            return None
        found: dict[frozenset[int], str] = {}
        for matched in regions:
            ends = {state for state, label in enumerate(labels) if label != excluded and label - excluded == matched}
            text = _expression(edges, ends, budget)
            if text:
                found[matched] = f"^(?s:{text})$"
    except (TooManyStepsError, UnknownSyntaxError):
        return None
    return found


def _literal(name: str) -> Iterator[Characters]:
    for character in name:
        if character == "\0" or 0xD800 <= ord(character) < 0xE000:
            raise UnknownSyntaxError
        yield Characters(((ord(character), ord(character)),))


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
                if len(numbers) > 4 * MAX_STATES:
                    raise TooManyStepsError
            found[numbers[following]] = found.get(numbers[following], 0) | classes
        moves.append(found)
    return moves, [frozenset(index for index, state in enumerate(states) if state & 1) for states in numbers]


def _minimized(
    moves: list[dict[int, int]], labels: list[frozenset[int]], budget: Budget
) -> tuple[list[dict[int, int]], list[frozenset[int]]]:
    """Join the states that no text distinguishes."""
    kinds: dict[object, int] = {}
    block = [kinds.setdefault(label, len(kinds)) for label in labels]
    while True:
        budget.spend(sum(map(len, moves)))
        kinds = {}
        joined = [_joined(each, block) for each in moves]
        refined = [
            kinds.setdefault((block[state], frozenset(joined[state].items())), len(kinds))
            for state in range(len(moves))
        ]
        if max(refined) == max(block):
            break
        block = refined
    if len(kinds) > MAX_STATES:
        raise TooManyStepsError
    first = {number: state for state, number in reversed([*enumerate(refined)])}
    return [_joined(moves[first[number]], refined) for number in sorted(first)], [
        labels[first[number]] for number in sorted(first)
    ]


def _joined(moves: dict[int, int], block: list[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for state, classes in moves.items():
        found[block[state]] = found.get(block[state], 0) | classes
    return found


def _class(alphabet: Alphabet, classes: int) -> str:
    """Return a regular expression of one character of some classes; empty for control characters only."""
    given = alphabet.ranges(classes)
    if given == ALL_CHARACTERS:
        return "."
    ranges = [
        (max(low, first), min(high, last))
        for low, high in given
        for first, last in _PLAIN
        if max(low, first) <= min(high, last)
    ]
    parts: list[str] = []
    for low, high in ranges:
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
    if _nesting(text) > MAX_NESTING:
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


def _nesting(text: str) -> int:
    deepest = depth = 0
    for character in _ESCAPE.sub("", text):
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest
