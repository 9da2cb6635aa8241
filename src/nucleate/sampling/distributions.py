"""Target distributions: what a row's next tokens are sampled from, now and after draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.backends import reference
from nucleate.sampling.cpu_paths import chances
from nucleate.sampling.history import History
from nucleate.sampling.presets import with_mask, without_mask
from nucleate.sampling.stage import Ceiling, Pipeline, Stage, Tap


def supports_rejection_sampling(stages: Pipeline) -> bool:
    """Whether rejection sampling may replace the row's own draw.

    It may not if a stage's state or its logprobs depend on the outcome of XTC's random decision.
    """
    flips = any(isinstance(stage, Ceiling) and 0 < stage.chance < 1 for stage in stages)
    return not (flips and any(isinstance(stage, Tap) or is_stateful(stage) for stage in stages))


def is_stateful(stage: Stage) -> bool:
    """Whether a stage has a state."""
    return type(stage).after is not Stage.after and not stage.neutral


def accept_sampled(logits_V: NDArray[Any], stages: Pipeline, token: int, past: History) -> reference.RowResult:
    """Update the stages with a token sampled elsewhere. Raises ValueError for a token whose probability is 0.

    If the token survives only one outcome of XTC's random decision, that outcome is assumed.
    """
    bounds = sorted({0.0, 1.0, *(float(stage.chance) for stage in stages if isinstance(stage, Ceiling))})
    for u in (0.5, *((low + high) / 2 for low, high in pairwise(bounds))):
        found = reference.survivors_per_stage(logits_V, stages, past, u)
        if token in found[-1].ids_N:
            return reference.row_result(found, stages, token)
    raise ValueError(f"token {token} cannot be sampled: its probability is 0")


class TargetDistributions:
    """The target distributions [N + 1, V] of a row, float64: now, and after each of N draft tokens.

    stages, prompt, output: of the row. logits: N + 1 rows. tokens: the N draft tokens. masks: a bitmask int32 [W] or
    None per position. parents: the index of the token that each token follows, -1 for the row itself; by default the
    previous one. Distributions are computed when they are read. A position without a valid token is NaN, and
    ``errors`` has the message. A draft token of probability 0 is not an error: the distributions after it are unused.
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
        self._before = range(-1, len(tokens) - 1) if parents is None else parents
        self._logits, self._tokens, self._masks, self._fast = logits, tokens, masks, fast
        self._learns = any(map(is_stateful, stages))
        self._stages = {0: stages}  # as of each place, if they learn on the way to it
        self._found: dict[int, NDArray[np.float64]] = {}

    def __getitem__(self, place: int) -> NDArray[np.float64]:
        if place not in self._found:
            if place:
                _ = self[self._before[place - 1] + 1]
            self._found[place] = self._law(place)
        return self._found[place]

    def _past(self, place: int, mask_W: NDArray[np.int32] | None) -> History:
        ahead = []
        while place:
            ahead.append(self._tokens[place - 1])
            place = self._before[place - 1] + 1
        return History(self._prompt, [*self._output, *reversed(ahead)], mask_W)

    def _stages_at(self, place: int) -> Pipeline:
        """Stages have learned from the tokens on the way, as far as these have a chance."""
        if not self._learns:
            return self._stages[0]
        if place not in self._stages:
            before, token = self._before[place - 1] + 1, self._tokens[place - 1]
            mask_W, stages = None if self._masks is None else self._masks[before], self._stages_at(before)
            if self[before][token] > 0:
                given = stages if mask_W is None else with_mask(stages)
                moved = reference.accept(self._logits[before], given, token, self._past(before, mask_W)).stages
                stages = moved if given is stages else without_mask(moved)
            self._stages[place] = stages
        return self._stages[place]

    def _law(self, place: int) -> NDArray[np.float64]:
        mask_W = None if self._masks is None else self._masks[place]
        past, logits_V = self._past(place, mask_W), self._logits[place]
        try:
            stages = self._stages_at(place)
            return chances(self._fast)(logits_V, stages if mask_W is None else with_mask(stages), past)
        except Exception as error:  # noqa: BLE001  # a stage of one's own may raise anything
            known = isinstance(error, reference.RowError | ParameterError)
            self.errors[place] = str(error) if known else f"{type(error).__name__}: {error}"
            return np.full(len(logits_V), np.nan)
