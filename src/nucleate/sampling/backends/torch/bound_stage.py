"""A stage with the numbers of many rows as columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nucleate.sampling.dispatch.rules import ReplaceRecorder
from nucleate.sampling.dispatch.signature import RuleSignature, StageSignature


class BoundAttributes(ReplaceRecorder):
    """Stands for ``self`` in rules: attributes by their names."""

    def __init__(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class BoundStage:
    """A stage of many rows. Its rules see its numbers as columns, [R, 1], and its switches as they are."""

    def __init__(self, step: StageSignature, numbers_RP: torch.Tensor) -> None:
        self.step = step
        self.rules: dict[str, RuleSignature] = {rule.name: rule for rule in step.rules}
        self._columns = dict(zip(step.numbers, numbers_RP.split(1, 1), strict=False))
        self.me: Any = BoundAttributes({**self._columns, **dict(step.switches)})
        self._constant: dict[str, Any] = {}

    def apply(self, rule: str, *given: Any) -> Any:
        """What a rule returns."""
        return getattr(self.step.kind, rule)(self.me, *given)

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


def mines(steps: Sequence[StageSignature], numbers_RP: torch.Tensor) -> list[BoundStage]:
    """Stages with their columns; there may be more of them."""
    counts = [step.width for step in steps]
    parts = numbers_RP.split([*counts, numbers_RP.shape[1] - sum(counts)], 1)
    return [BoundStage(step, part_RP) for step, part_RP in zip(steps, parts, strict=False)]
