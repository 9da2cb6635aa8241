"""Binds the rules of a stage to the parameters of many rows, so that one call computes all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nucleate.sampling.backends.torch.ranked_tokens import RankedTokens
from nucleate.sampling.dispatch.rules import ReplaceRecorder
from nucleate.sampling.dispatch.signature import RuleSignature, StageSignature
from nucleate.sampling.stage import RowStats


class BoundAttributes(ReplaceRecorder):
    """The ``self`` that rules receive: the parameters as tensors."""

    def __init__(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class BoundStage:
    """A stage of many rows. Rules read numeric parameters as tensors [R, 1]; the other attributes are shared."""

    def __init__(self, signature: StageSignature, params_RP: torch.Tensor) -> None:
        self.signature = signature
        self.rules: dict[str, RuleSignature] = {rule.name: rule for rule in signature.rules}
        self._columns = dict(zip(signature.param_names, params_RP.split(1, 1), strict=False))
        self.attributes: Any = BoundAttributes({**self._columns, **dict(signature.switches)})
        self.min_keep_R1 = self._columns.get("min_keep")  #: the minimum number of tokens to keep; None: one
        self._cache: dict[str, Any] = {}

    def apply(self, rule: str, *arguments: Any) -> Any:
        """Call a rule."""
        return getattr(self.signature.kind, rule)(self.attributes, *arguments)

    def stats(self, tokens: RankedTokens, rule: str) -> RowStats:
        """The row statistics that a rule reads."""
        return tokens.stats(self.rules[rule].row, self.signature.kind.sorted_count)

    def at_least(self, last_R1: torch.Tensor) -> torch.Tensor:
        """The last positions to keep, raised so that the minimum number of tokens is kept."""
        return last_R1 if self.min_keep_R1 is None else torch.maximum(last_R1, self.min_keep_R1 - 1.0)

    def cached(self, rule: str, make: Callable[[], Any]) -> Any:
        """``make()``, computed once if it depends only on parameters that do not change."""
        if self.signature.state_names or self.rules[rule].row - {"top"}:
            return make()
        if rule not in self._cache:
            self._cache[rule] = make()
        return self._cache[rule]

    def updated_params(self, drawn: Any) -> torch.Tensor:
        """The parameters for the next step: [R, P]."""
        return torch.cat([*{**self._columns, **self.apply("update", drawn)}.values()], 1)


def bind_stages(signatures: Sequence[StageSignature], params_RP: torch.Tensor) -> list[BoundStage]:
    """Bind stages to their parameters, [R, P]; further columns are ignored."""
    widths = [signature.num_params for signature in signatures]
    columns = params_RP.split([*widths, params_RP.shape[1] - sum(widths)], 1)
    return [BoundStage(signature, stage_RP) for signature, stage_RP in zip(signatures, columns, strict=False)]
