"""Expressions of a context-free grammar over characters, their regular expressions, and simpler rules.

All character sets exclude NUL and surrogates, which no text contains. ``simplify`` removes what matches no finite text,
turns left and right recursion into repetition, and includes regular rules where they are used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Final

from nucleate.parameters.parameter import ParameterError

Ranges = tuple[tuple[int, int], ...]
"""Inclusive ranges of code points: sorted, disjoint and not adjacent."""

LAST_CHARACTER: Final = 0x10FFFF
ALL_CHARACTERS: Final[Ranges] = ((0x1, 0xD7FF), (0xE000, LAST_CHARACTER))
MAX_REGEX_CHARACTERS: Final = 50_000
"""Maximum length of the regular expression of a terminal."""
MAX_DEPTH: Final = 64
"""Maximum nesting of an expression, with the rules that it includes."""


class Expression:
    """A part of a grammar. ``regular``: it has a regular expression of limited size, so no references and tokens."""

    parts: tuple[Expression, ...]

    @cached_property
    def regular(self) -> bool:
        if self.regex_length > MAX_REGEX_CHARACTERS or self.depth > MAX_DEPTH:
            return False
        return not isinstance(self, Reference | TokenReference | Terminal) and all(part.regular for part in self.parts)

    @cached_property
    def depth(self) -> int:
        return 1 + max((part.depth for part in self.parts), default=0)

    @cached_property
    def regex_length(self) -> int:
        """An upper bound of the length of the regular expression."""
        return sum(4 + part.regex_length for part in self.parts)

    @cached_property
    def references(self) -> frozenset[str]:
        """The names of the rules that the expression uses directly."""
        return frozenset().union(*(part.references for part in self.parts))

    @cached_property
    def regex(self) -> str:
        """The regular expression of a regular expression tree, in the syntax of Rust's regex crate."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Characters(Expression):
    """One character out of a set."""

    ranges: Ranges
    parts = ()

    @cached_property
    def regex_length(self) -> int:
        return len(self.regex)

    @cached_property
    def regex(self) -> str:
        texts = [_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}" for low, high in self.ranges]
        return texts[0] if texts == [_escaped(self.ranges[0][0])] else f"[{''.join(texts)}]"


@dataclass(frozen=True, eq=False)
class Sequence(Expression):
    """Its parts, one after the other. Without parts, the empty text."""

    parts: tuple[Expression, ...]

    @cached_property
    def regex(self) -> str:
        return "".join(f"(?:{part.regex})" if isinstance(part, Choice) else part.regex for part in self.parts)


@dataclass(frozen=True, eq=False)
class Choice(Expression):
    """One of its parts. Without parts, no text at all."""

    parts: tuple[Expression, ...]

    @cached_property
    def regex(self) -> str:
        return "|".join(part.regex for part in self.parts)


@dataclass(frozen=True, eq=False)
class Repetition(Expression):
    """``low`` to ``high`` texts of its only part; None: any number of them."""

    parts: tuple[Expression]
    low: int
    high: int | None

    @cached_property
    def regex_length(self) -> int:
        return 4 + len(self.operator) + self.parts[0].regex_length

    @property
    def operator(self) -> str:
        known = {(0, None): "*", (1, None): "+", (0, 1): "?"}
        high = "" if self.high is None else self.high
        return known.get((self.low, self.high)) or f"{{{self.low},{high}}}"

    @cached_property
    def regex(self) -> str:
        [part] = self.parts
        return f"{part.regex if isinstance(part, Characters) else f'(?:{part.regex})'}{self.operator}"


@dataclass(frozen=True, eq=False)
class Reference(Expression):
    """A rule, by its name."""

    name: str
    parts = ()

    @cached_property
    def references(self) -> frozenset[str]:
        return frozenset([self.name])


@dataclass(frozen=True, eq=False)
class TokenReference(Expression):
    """A special token: ``<[id]>`` or ``<name>``."""

    text: str
    parts = ()


@dataclass(frozen=True, eq=False)
class Terminal(Expression):
    """A use of a terminal: the number of the use, and of the terminal."""

    use: int
    number: int
    parts = ()


Rules = Mapping[str, Expression]
EMPTY: Final = Sequence(())
NOTHING: Final = Choice(())


def sequence(parts: Iterable[Expression]) -> Expression:
    """Return the shortest expression of a sequence. Characters and groups stay as they are."""
    kept = tuple(part for part in parts if part is not EMPTY)
    if NOTHING in kept:
        return NOTHING
    return kept[0] if len(kept) == 1 else Sequence(kept) if kept else EMPTY


def choice(parts: Iterable[Expression]) -> Expression:
    """Return the shortest expression of a choice."""
    kept = tuple(part for part in dict.fromkeys(parts) if part is not NOTHING)
    return kept[0] if len(kept) == 1 else Choice(kept) if kept else NOTHING


def repetition(part: Expression, low: int, high: int | None) -> Expression:
    """Return the shortest expression of a repetition."""
    if high == 0 or part is EMPTY:
        return EMPTY
    if part is NOTHING:
        return NOTHING if low else EMPTY
    return part if (low, high) == (1, 1) else Repetition((part,), low, high)


def rebuilt(expression: Expression, parts: Iterable[Expression]) -> Expression:
    """Return an expression with other parts, simplified."""
    match expression:
        case Sequence():
            return sequence(parts)
        case Choice():
            return choice(parts)
        case Repetition():
            return repetition(next(iter(parts)), expression.low, expression.high)
    return expression


def character_set(ranges: Iterable[tuple[int, int]], negated: bool = False) -> Expression:
    """Return one character of a set, given as inclusive ranges in any order."""
    others = inverted(ranges)
    kept = tuple(intersected(others if negated else inverted(others), ALL_CHARACTERS))
    return Characters(kept) if kept else NOTHING


def inverted(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges of all other code points, sorted."""
    found, low = [], 0
    for first, last in sorted(ranges):
        if low < first:
            found.append((low, first - 1))
        low = max(low, last + 1)
    return [*found, (low, LAST_CHARACTER)] if low <= LAST_CHARACTER else found


def intersected(ranges: Iterable[tuple[int, int]], others: Ranges) -> Iterator[tuple[int, int]]:
    for low, high in ranges:
        for first, last in others:
            if max(low, first) <= min(high, last):
                yield max(low, first), min(high, last)


def _escaped(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"


MAX_INCLUDED_CHARACTERS: Final = 10_000
"""Maximum length of the regular expression of a rule that is included wherever it is used."""
MAX_SHORTEST_TEXT: Final = 20_000
"""Maximum length of the shortest text of a grammar, in characters."""


def simplify(rules: Rules, start: str) -> dict[str, Expression]:
    """Return the rules that ``start`` needs. Raises ParameterError if its shortest text is too long, or infinite."""
    shortest = shortest_texts(rules)
    if shortest[start] > MAX_SHORTEST_TEXT:
        reason = f"the shortest text has {shortest[start]} characters; the maximum is {MAX_SHORTEST_TEXT}"
        if shortest[start] == inf:
            reason = f"no finite text matches the rule {start}"
        raise ParameterError("grammar", f"grammar: {reason}")
    endless = {name: NOTHING for name, length in shortest.items() if length == inf}
    finite = {name: substituted(body, endless) for name, body in rules.items() if name not in endless}
    known: dict[str, Expression] = {}
    kept: dict[str, Expression] = {}
    for name in _ordered(finite, start):
        body = _without_recursion(name, substituted(finite[name], known))
        included = name != start and body.regular and body.regex_length <= MAX_INCLUDED_CHARACTERS
        (known if included else kept)[name] = body
    return kept


def shortest_texts(rules: Rules) -> dict[str, float]:
    """Return the length of the shortest text of each rule in characters; infinite if it has none."""
    users: dict[str, list[str]] = defaultdict(list)
    for name, body in rules.items():
        for used in body.references:
            users[used].append(name)
    shortest = dict.fromkeys(rules, inf)
    waiting: dict[str, None] = dict.fromkeys(reversed([*rules]))  # an ordered set
    while waiting:
        name = next(iter(waiting))
        del waiting[name]
        length = shortest_text(rules[name], shortest)
        if length < shortest[name]:
            shortest[name] = length
            waiting |= dict.fromkeys(users[name])
    return shortest


def shortest_text(expression: Expression, known: Mapping[str, float]) -> float:
    """Return the length of the shortest text of an expression. known: those of the rules."""
    match expression:
        case Characters() | TokenReference():
            return 1
        case Reference():
            return known[expression.name]
        case Choice():
            return min((shortest_text(part, known) for part in expression.parts), default=inf)
        case Repetition():
            return expression.low * shortest_text(expression.parts[0], known) if expression.low else 0
    return sum(shortest_text(part, known) for part in expression.parts)


def _ordered(rules: Rules, start: str) -> list[str]:
    """Return the names of the rules that ``start`` needs, each after those it uses, unless these need it as well."""
    found: dict[str, None] = {}
    stack = [(start, False)] if start in rules else []
    entered: set[str] = set()
    while stack:
        name, done = stack.pop()
        if done:
            found[name] = None
        elif name not in entered:
            entered.add(name)
            stack.append((name, True))
            stack += [(used, False) for used in sorted(rules[name].references & rules.keys())]
    return [*found]


def substituted(expression: Expression, known: Mapping[str, Expression]) -> Expression:
    """Return an expression with others in place of some rules."""
    if expression.references.isdisjoint(known):
        return expression
    if isinstance(expression, Reference):
        return known[expression.name]
    return rebuilt(expression, [substituted(part, known) for part in expression.parts])


def _without_recursion(name: str, body: Expression) -> Expression:
    """Return a rule that uses itself as a repetition, if it does so at the end of its texts or at the beginning."""
    for at_end in (True, False) if name in body.references else ():
        if (found := _loop_and_rest(body, name, at_end)) is not None:
            loop, rest = repetition(found[0], 0, None), found[1]
            made = sequence([loop, rest] if at_end else [rest, loop])
            if made.regex_length <= MAX_REGEX_CHARACTERS and made.depth <= MAX_DEPTH:
                return made
    return body


def _loop_and_rest(expression: Expression, name: str, at_end: bool) -> tuple[Expression, Expression] | None:
    """Return what comes before a rule that ends an expression (or after it), and the texts without the rule.

    None if the expression has another form.
    """
    if name not in expression.references or isinstance(expression, Reference):
        return (EMPTY, NOTHING) if name in expression.references else (NOTHING, expression)
    if isinstance(expression, Sequence):
        *others, last = expression.parts if at_end else reversed(expression.parts)
        found = _loop_and_rest(last, name, at_end)
        if found is None or any(name in other.references for other in others):
            return None
        loop, rest = (sequence([*others, each] if at_end else [each, *reversed(others)]) for each in found)
        return loop, rest
    options = [_loop_and_rest(part, name, at_end) for part in expression.parts]
    known = [option for option in options if option is not None]
    optional = [EMPTY] if isinstance(expression, Repetition) else []
    if len(known) < len(options) or (isinstance(expression, Repetition) and expression.operator != "?"):
        return None
    return choice(loop for loop, _ in known), choice([*(rest for _, rest in known), *optional])
