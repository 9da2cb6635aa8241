"""Simplifies the rules of a grammar without changing its language.

Removes what matches no finite text, turns left and right recursion into repetition, and includes regular rules where
they are used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from math import inf
from typing import Final

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.grammar_expressions import (
    EMPTY,
    MAX_DEPTH,
    MAX_REGEX_CHARACTERS,
    NOTHING,
    Characters,
    Choice,
    Expression,
    Reference,
    Repetition,
    Rules,
    Sequence,
    TokenReference,
    choice,
    rebuilt,
    repetition,
    sequence,
)

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
