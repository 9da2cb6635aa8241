"""The rules of a stage bound to tensors, with the numbers they read as columns. Knows no shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from nucleate.backends.cuda.words import WORDS
from nucleate.backends.structure import Rule, Step, bound, following


class Bound(NamedTuple):
    """A stage with its rules bound to tensors."""

    step: Step
    rules: dict[str, Callable[..., Any]]


def bound_to_tensors(step: Step) -> Bound:
    """The rules of a stage for tensors, ``after`` too, where it has a state."""
    rules = {rule.name: bound_rule(step.kind, rule.name) for rule in step.rules}
    return Bound(step, {**rules, "after": _after(step.kind)} if step.learns else rules)


class Me:
    """Stands for ``self`` in rules: attributes by their names."""

    def __init__(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class Mine:
    """A stage of many rows. Its rules see its numbers as columns, [R, 1], and its switches as they are."""

    def __init__(self, bound: Bound, numbers_RP: torch.Tensor) -> None:
        self.step, self.bound = bound.step, bound
        self.rules: dict[str, Rule] = {rule.name: rule for rule in self.step.rules}
        self._columns = dict(zip(self.step.numbers, numbers_RP.split(1, 1), strict=False))
        self.me: Any = Me({**self._columns, **dict(self.step.switches)})
        self._constant: dict[str, Any] = {}

    def apply(self, rule: str, *given: Any) -> Any:
        """What a rule returns."""
        return self.bound.rules[rule](self.me, *given)

    def constant(self, rule: str, make: Callable[[], Any]) -> Any:
        """A value that depends on the numbers alone, unless ``after`` changes these: made once."""
        if self.step.learns or self.rules[rule].row - {"top"}:
            return make()
        if rule not in self._constant:
            self._constant[rule] = make()
        return self._constant[rule]

    def after(self, drawn: Any) -> torch.Tensor:
        """The numbers as of the next step: [R, P]."""
        return torch.cat([*{**self._columns, **self.apply("after", drawn)}.values()], 1)


def mines(stages: Sequence[Bound], numbers_RP: torch.Tensor) -> list[Mine]:
    """Stages with their columns; there may be more of them."""
    counts = [one.step.width for one in stages]
    parts = numbers_RP.split([*counts, numbers_RP.shape[1] - sum(counts)], 1)
    return [Mine(one, part_RP) for one, part_RP in zip(stages, parts, strict=False)]


@lru_cache(maxsize=256)
def bound_rule(kind: Any, name: str) -> Callable[..., Any]:
    """A rule for tensors."""
    rule: Callable[..., Any] = bound(getattr(kind, name), WORDS, "tensors")
    return rule


@lru_cache(maxsize=256)
def _after(kind: Any) -> Callable[..., Any]:
    rule: Callable[..., Any] = following(bound(kind.after, WORDS, "tensors"), {}, "tensors")
    return rule
