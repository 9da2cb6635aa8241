"""The rules of a stage for tensors, and the numbers they read as columns. Knows no shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from nucleate.backends.cuda.staged.structure import Step, bound, following
from nucleate.backends.cuda.staged.words import WORDS


class Mine:
    """A stage of many rows. Its rules see its numbers as columns, [R, 1], and its switches as they are."""

    def __init__(self, step: Step, numbers_RP: torch.Tensor) -> None:
        self.step = step
        self._columns = dict(zip(step.columns, numbers_RP.split(1, 1), strict=False))
        self.me = SimpleNamespace(**{**self._columns, **dict(step.switches)})  #: stands for ``self`` in its rules

    def has(self, rule: str) -> bool:
        return any(one.name == rule for one in self.step.rules)

    def reads(self, rule: str) -> frozenset[str]:
        """Which statistics a rule asks for."""
        return next(one.row for one in self.step.rules if one.name == rule)

    def say(self, rule: str, *given: Any) -> Any:
        """What a rule says."""
        return _rule(self.step.kind, rule)(self.me, *given)

    def after(self, drawn: Any) -> torch.Tensor:
        """The numbers as of the next step: [R, P]."""
        return torch.cat([*{**self._columns, **_after(self.step.kind)(self.me, drawn)}.values()], 1)


def mines(steps: tuple[Step, ...], numbers_RP: torch.Tensor) -> list[Mine]:
    """Stages with their columns."""
    counts = [step.width for step in steps]
    parts = numbers_RP.split([*counts, numbers_RP.shape[1] - sum(counts)], 1)
    return [Mine(step, part_RP) for step, part_RP in zip(steps, parts, strict=False)]


@lru_cache(maxsize=256)
def _rule(kind: Any, name: str) -> Callable[..., Any]:
    rule: Callable[..., Any] = bound(getattr(kind, name), WORDS, "tensors")
    return rule


@lru_cache(maxsize=256)
def _after(kind: Any) -> Callable[..., Any]:
    rule: Callable[..., Any] = following(bound(kind.after, WORDS, "tensors"), {}, "tensors")
    return rule
