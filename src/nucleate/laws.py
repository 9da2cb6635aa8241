"""Laws of a row: what its next tokens would be drawn from, after the whole pipeline, with tokens ahead of each.

Draws nothing, and changes nothing of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.backends import reference
from nucleate.core.history import History
from nucleate.core.parameter import ParameterError
from nucleate.core.stage import Ceiling, Pipeline, Stage, Tap
from nucleate.pipeline import chances
from nucleate.presets import with_mask, without_mask


def foreseeable(stages: Pipeline) -> bool:
    """Whether a token may be drawn from the law of a row instead of by its own noise.

    Not if what a stage learns from a token, or tells of it, is different for the two sides of a coin.
    """
    flips = any(isinstance(stage, Ceiling) and 0 < stage.chance < 1 for stage in stages)
    return not (flips and any(isinstance(stage, Tap) or learns(stage) for stage in stages))


def learns(stage: Stage) -> bool:
    """Whether a stage has a state."""
    return type(stage).after is not Stage.after and not stage.neutral


class Laws:
    """The laws [N + 1, V] of N + 1 tokens of a row, float64: the first one now, each other after the tokens before it.

    stages, prompt, output: of the row. logits: N + 1 rows, see ``rows.Logits``. tokens: N of them. masks: of each
    place what a grammar allows, int32 [W], or None. They are worked out as they are asked for; where no token can be
    drawn, all are NaN, and ``errors`` says why. What cannot be is no error: the law after a token that has no chance.
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
        fast: bool = False,
    ) -> None:
        self.errors: dict[int, str] = {}
        self._stages, self._prompt, self._output = stages, prompt, output
        self._logits, self._tokens, self._masks, self._fast = logits, tokens, masks, fast
        self._learns = any(map(learns, stages))
        self._found: list[NDArray[np.float64]] = []

    def __getitem__(self, place: int) -> NDArray[np.float64]:
        while len(self._found) <= place:
            self._found.append(self._law(len(self._found)))
        return self._found[place]

    def _law(self, place: int) -> NDArray[np.float64]:
        mask_W = None if self._masks is None else self._masks[place]
        past = History(self._prompt, [*self._output, *self._tokens[:place]], mask_W)
        stages = self._stages if mask_W is None else with_mask(self._stages)
        logits_V = self._logits[place]
        try:
            law_V = chances(self._fast)(logits_V, stages, past)
        except Exception as error:  # noqa: BLE001  # a stage of one's own may raise anything
            known = isinstance(error, reference.RowError | ParameterError)
            self.errors[place] = str(error) if known else f"{type(error).__name__}: {error}"
            return np.full(len(logits_V), np.nan)
        if self._learns and place < len(self._tokens) and law_V[self._tokens[place]] > 0:
            moved = reference.take(logits_V, stages, self._tokens[place], past).stages
            self._stages = moved if mask_W is None else without_mask(moved)
        return law_V
