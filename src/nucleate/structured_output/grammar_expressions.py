"""Expressions of a context-free grammar over characters, their regular expressions, and simpler rules.

All character sets exclude NUL and surrogates, which no text contains. ``simplify`` removes what matches no finite text,
turns left and right recursion into repetition, and includes regular rules where they are used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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
        own = self.regex_length <= MAX_REGEX_CHARACTERS and self.depth <= MAX_DEPTH
        return (
            own
            and not isinstance(self, Reference | TokenReference | Terminal)
            and all(part.regular for part in self.parts)
        )

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


MAX_MUTUAL_RULES: Final = 16
"""Maximum number of mutually recursive rules that are turned into repetition."""

MAX_INCLUDED_CHARACTERS: Final = 10_000
"""Maximum length of the regular expression of a rule that is included wherever it is used."""
MAX_SHORTEST_TEXT: Final = 20_000
"""Maximum length of the shortest text of a grammar, in characters."""

Tails = dict[str | None, Expression]
"""An expression as a union of texts, each followed by one rule; None: by no rule."""


def simplify(rules: Rules, start: str) -> dict[str, Expression]:
    """Return the rules that ``start`` needs. Raises ParameterError if its shortest text is too long, or infinite."""
    shortest = _shortest_texts(rules)
    if shortest[start] > MAX_SHORTEST_TEXT:
        reason = f"the shortest text has {shortest[start]} characters; the maximum is {MAX_SHORTEST_TEXT}"
        if shortest[start] == inf:
            reason = f"no finite text matches the rule {start}"
        raise ParameterError("grammar", f"grammar: {reason}")
    endless = {name: NOTHING for name, length in shortest.items() if length == inf}
    finite = {name: _substituted(body, endless) for name, body in rules.items() if name not in endless}
    known: dict[str, Expression] = {}
    kept: dict[str, Expression] = {}
    for names in _components(finite, start):
        group = {name: _substituted(finite[name], known) for name in names}
        if any(not group.keys().isdisjoint(body.references) for body in group.values()):
            group = _without_recursion(group)
        for name, body in group.items():
            included = name != start and body.regular and body.regex_length <= MAX_INCLUDED_CHARACTERS
            (known if included else kept)[name] = body
    return _with_single_uses_included(kept, start)


def _shortest_texts(rules: Rules) -> dict[str, float]:
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
        length = _shortest(rules[name], shortest)
        if length < shortest[name]:
            shortest[name] = length
            waiting |= dict.fromkeys(users[name])
    return shortest


def _shortest(expression: Expression, known: Mapping[str, float]) -> float:
    match expression:
        case Characters() | TokenReference():
            return 1
        case Reference():
            return known[expression.name]
        case Choice():
            return min((_shortest(part, known) for part in expression.parts), default=inf)
        case Repetition():
            return expression.low * _shortest(expression.parts[0], known) if expression.low else 0
    return sum(_shortest(part, known) for part in expression.parts)


def _components(rules: Rules, start: str) -> Iterator[list[str]]:
    """Yield groups of mutually recursive rules that ``start`` needs, after the groups they use (Tarjan's algorithm)."""
    if start not in rules:
        return
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    done: set[str] = set()
    stack: list[tuple[str, Iterator[str]]] = []

    def enter(name: str) -> None:
        order[name] = lowest[name] = len(order)
        path.append(name)
        stack.append((name, iter(sorted(rules[name].references & rules.keys()))))

    enter(start)
    while stack:
        name, uses = stack[-1]
        for used in uses:
            if used not in order:
                enter(used)
                break
            if used not in done:
                lowest[name] = min(lowest[name], order[used])
        else:
            stack.pop()
            if stack:
                lowest[stack[-1][0]] = min(lowest[stack[-1][0]], lowest[name])
            if lowest[name] == order[name]:
                group = path[path.index(name) :]
                del path[-len(group) :]
                done.update(group)
                yield group[::-1]


def _substituted(expression: Expression, known: Mapping[str, Expression]) -> Expression:
    if expression.references.isdisjoint(known):
        return expression
    if isinstance(expression, Reference):
        return known[expression.name]
    return rebuilt(expression, [_substituted(part, known) for part in expression.parts])


def _with_single_uses_included(rules: Rules, start: str) -> dict[str, Expression]:
    """Include rules that are used once, other than by themselves."""
    uses = Counter(name for body in rules.values() for name in _uses(body))
    single = {name for name in rules if uses[name] == 1 and name != start and name not in rules[name].references}
    known: dict[str, Expression] = {}
    kept: dict[str, Expression] = {}
    for name, body in rules.items():  # most rules come after those they use
        included = _substituted(body, known)
        once = name in single and name not in included.references and included.depth <= MAX_DEPTH // 2
        (known if once else kept)[name] = included
    waiting = [*kept.values()]
    while waiting:
        for name in waiting.pop().references - kept.keys():
            kept[name] = known[name]
            waiting.append(known[name])
    return kept


def _uses(expression: Expression) -> Iterator[str]:
    if isinstance(expression, Reference):
        yield expression.name
    for part in expression.parts if expression.references else ():
        yield from _uses(part)


def _without_recursion(group: dict[str, Expression]) -> dict[str, Expression]:
    """Solve mutually recursive rules if all recursion is at the end, or at the beginning; otherwise return them."""
    if len(group) <= MAX_MUTUAL_RULES:
        for at_end in (True, False):
            tails = {name: _tails(body, group, at_end) for name, body in group.items()}
            equations = {name: tail for name, tail in tails.items() if tail is not None}
            if len(equations) == len(group):
                found = _solved(equations, at_end)
                if all(
                    body.regex_length <= MAX_REGEX_CHARACTERS and body.depth <= MAX_DEPTH for body in found.values()
                ):
                    return found
    return group


def _tails(expression: Expression, group: Rules, at_end: bool) -> Tails | None:
    """Return an expression as texts before rules of the group (or after them); None if it has another form."""
    if group.keys().isdisjoint(expression.references):
        return {None: expression}
    if isinstance(expression, Reference):
        return {expression.name: EMPTY}
    if isinstance(expression, Sequence):
        return _tails_of_sequence(expression, group, at_end)
    if isinstance(expression, Repetition) and (expression.low, expression.high) != (0, 1):
        return None
    found: dict[str | None, list[Expression]] = defaultdict(list)
    for part in expression.parts:
        for name, tail in (_tails(part, group, at_end) or {"": NOTHING}).items():
            found[name].append(tail)
    if isinstance(expression, Repetition):
        found[None].append(EMPTY)
    return None if "" in found else {name: choice(options) for name, options in found.items()}


def _tails_of_sequence(expression: Sequence, group: Rules, at_end: bool) -> Tails | None:
    *others, last = expression.parts if at_end else reversed(expression.parts)
    inner = _tails(last, group, at_end)
    if inner is None or any(not group.keys().isdisjoint(other.references) for other in others):
        return None
    before = sequence(others if at_end else reversed(others))
    return {name: _joined(before, tail, at_end) for name, tail in inner.items()}


def _solved(equations: dict[str, Tails], at_end: bool) -> dict[str, Expression]:
    """Solve linear equations by elimination: ``a = x a | y`` has the solution ``x* y``."""
    for name, tails in equations.items():
        if name in tails:
            loop = repetition(tails.pop(name), 0, None)
            for other in tails:
                tails[other] = _joined(loop, tails[other], at_end)
        for user in equations.values():
            if user is not tails and name in user:
                before = user.pop(name)
                for other, tail in tails.items():
                    user[other] = choice([*([user[other]] if other in user else []), _joined(before, tail, at_end)])
    return {name: tails.get(None, NOTHING) for name, tails in equations.items()}


def _joined(before: Expression, tail: Expression, at_end: bool) -> Expression:
    return sequence([before, tail] if at_end else [tail, before])
