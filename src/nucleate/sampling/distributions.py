"""Target distributions: those from which a row's next tokens are sampled, now and after draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling import reference
from nucleate.sampling.history import History
from nucleate.sampling.host_batch import row_path
from nucleate.sampling.presets import with_mask, without_mask
from nucleate.sampling.stage import Ceiling, Draw, Pipeline, Stage, Tap


def supports_rejection_sampling(stages: Pipeline) -> bool:
    """Whether rejection sampling may replace the row's own draw.

    It may not if a stage's state or its logprobs depend on the outcome of XTC's random decision, or if the draw's noise
    depends on the history, as in a watermark.
    """
    if isinstance(stages[-1], Draw) and stages[-1].keyed:
        return False
    random_ceiling = any(isinstance(stage, Ceiling) and 0 < stage.act_probability < 1 for stage in stages)
    return not (random_ceiling and any(isinstance(stage, Tap) or is_stateful(stage) for stage in stages))


def is_stateful(stage: Stage) -> bool:
    """Whether a stage has a state."""
    return type(stage).update is not Stage.update and not stage.neutral


def accept_sampled(logits_V: NDArray[Any], stages: Pipeline, token: int, past: History) -> reference.RowResult:
    """Update the stages with a token sampled elsewhere. Raises ValueError for a token whose probability is 0.

    If the token survives only one outcome of XTC's random decision, that outcome is assumed.
    """
    for u in (0.5, *((low + high) / 2 for low, high in pairwise(reference.ceiling_bounds(stages)))):
        found = reference.survivors_per_stage(logits_V, stages, past, u)
        if token in found[-1].ids_N:
            return reference.row_result(found, stages, token)
    raise ValueError(f"token {token} cannot be sampled: its probability is 0")


class TargetDistributions:
    """The target distributions [N + 1, V] of a row, float64: now, and after each of N draft tokens.

    stages, prompt, output: of the row. logits: N + 1 rows. tokens: the N draft tokens. masks: a bitmask int32 [W] or
    None per position. parents: the index of the token that each token follows, -1 for the row itself; by default the
    previous one. fast: use the compiled CPU path. Distributions are computed when they are read. If a position cannot
    be sampled, its distribution is NaN and ``errors`` has the message. A draft token of probability 0 is not an error:
    the distributions after it are unused.
    """

    def __init__(
        self,
        stages: Pipeline,
        prompt: Sequence[int],
        output: Sequence[int],
        logits: Any,
        tokens: Sequence[int],
        masks: Any = None,
        *,
        parents: Sequence[int] | None = None,
        fast: bool = False,
    ) -> None:
        self.errors: dict[int, str] = {}
        self._prompt, self._output = prompt, output
        self._parents = range(-1, len(tokens) - 1) if parents is None else parents
        self._logits, self._tokens, self._masks, self._fast = logits, tokens, masks, fast
        self._stateful = any(map(is_stateful, stages))
        self._stages = {0: stages}  # at each position, if the pipeline is stateful
        self._cache: dict[int, NDArray[np.float64]] = {}

    def __getitem__(self, position: int) -> NDArray[np.float64]:
        if position not in self._cache:
            if position:
                _ = self[self._parents[position - 1] + 1]
            self._cache[position] = self._compute(position)
        return self._cache[position]

    def _past(self, position: int, mask_W: NDArray[np.int32] | None) -> History:
        tokens = []
        while position:
            tokens.append(self._tokens[position - 1])
            position = self._parents[position - 1] + 1
        return History(self._prompt, [*self._output, *reversed(tokens)], mask_W)

    def _stages_at(self, position: int) -> Pipeline:
        """The stages at a position, updated with the tokens before it; tokens of probability 0 update nothing."""
        if not self._stateful:
            return self._stages[0]
        if position not in self._stages:
            parent, token = self._parents[position - 1] + 1, self._tokens[position - 1]
            mask_W, stages = None if self._masks is None else self._masks[parent], self._stages_at(parent)
            if self[parent][token] > 0:
                masked = stages if mask_W is None else with_mask(stages)
                updated = accept_sampled(self._logits[parent], masked, token, self._past(parent, mask_W)).stages
                stages = updated if masked is stages else without_mask(updated)
            self._stages[position] = stages
        return self._stages[position]

    def _compute(self, position: int) -> NDArray[np.float64]:
        mask_W = None if self._masks is None else self._masks[position]
        past, logits_V = self._past(position, mask_W), self._logits[position]
        try:
            stages = self._stages_at(position)
            stages = stages if mask_W is None else with_mask(stages)
            p_V: NDArray[np.float64] = row_path(self._fast).probabilities(logits_V, stages, past)
        except Exception as error:  # noqa: BLE001  # a user-defined stage may raise anything
            self.errors[position] = reference.message_of(error)
            return np.full(len(logits_V), np.nan)
        return p_V
