"""One row of logits: the arguments of functions that look at it (``trace``, many draws), and its tokens for many seeds.

The tokens are those of ``select``, with NumPy over the seeds. The scores are computed once per outcome of XTC, the
noise once per seed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling import noise, reference
from nucleate.sampling.companion import split_combine
from nucleate.sampling.functional import Batch
from nucleate.sampling.history import History
from nucleate.sampling.inputs import per_row
from nucleate.sampling.presets import with_mask
from nucleate.sampling.reference import Floats, Ids, Intervals, Selection, Survivors, select
from nucleate.sampling.stage import Ceiling, Combine, Pipeline


class SingleRow(NamedTuple):
    """One row, ready for the reference backend."""

    logits_V: NDArray[np.float32]  #: combined with those of the companion
    stages: Pipeline  #: without the Combine stage, with a Mask stage if there is a mask
    past: History
    step: int
    combine: Combine | None

    @property
    def origin(self) -> str:
        """Where the logits come from."""
        return "as given" if self.combine is None else f"combined by {self.combine!r}"


def single_rows(batch: Batch, step: Any) -> list[SingleRow]:
    """The rows of a call, with all stages as they were given. step: one for all rows or one per row."""
    rows = []
    for logits_V, one, past, at in zip(
        batch.logits, batch.ready, batch.histories, per_row(step, len(batch), "step"), strict=True
    ):
        stages = split_combine(one.given)[1]
        stages = stages if past.mask is None else with_mask(stages)
        rows.append(SingleRow(logits_V, stages, past, at, one.combine))
    return rows


Seeds = NDArray[np.uint64]
CHUNK = 16_384
"""Random numbers per call of NumPy: its arrays then fit the cache."""
ONE = np.zeros(1, np.int64)
"""The index of a random number of which a row has one."""


class SeededDraws:
    """Selects a token of one row per seed. logits_V: float [V]. stages: with a Draw at the end. step: of the noise."""

    def __init__(self, logits_V: NDArray[Any], stages: Pipeline, past: History, step: int) -> None:
        self._logits_V, self._stages, self._past = logits_V, stages, past
        self._step, self._step_1 = step, np.array([step], np.uint64)
        self._bounds = reference.ceiling_bounds(stages)
        self._outcomes: dict[int, tuple[Survivors, Selection, Floats]] = {}

    def survivors(self, u: float) -> Survivors:
        """The survivors with a random number of XTC. Raises RowError if there is none."""
        return self._outcome(int(np.searchsorted(self._bounds, u, side="right")) - 1)[0]

    def tokens(self, seeds_S: Seeds) -> Ids:
        """The token of each seed, int64 [S]. Raises RowError if one of them cannot be sampled."""
        tokens_S, outcome_S = np.empty(len(seeds_S), np.int64), np.zeros(len(seeds_S), np.int64)
        if any(isinstance(stage, Ceiling) for stage in self._stages):
            u_S = noise.uniforms(seeds_S, self._step_1, noise.XTC, ONE)
            outcome_S = np.searchsorted(self._bounds, u_S, side="right") - 1
        for outcome in np.unique(outcome_S).tolist():
            with np.errstate(all="ignore"):
                tokens_S[outcome_S == outcome] = self._select(outcome, seeds_S[outcome_S == outcome])
        return tokens_S

    def _outcome(self, outcome: int) -> tuple[Survivors, Selection, Floats]:
        """The survivors, the selection with seed 0, and the scores by groups of token ids, -inf for removed ones."""
        if outcome not in self._outcomes:
            u = (self._bounds[outcome] + self._bounds[outcome + 1]) / 2
            kept = reference.survivors(self._logits_V, self._stages, self._past, u)
            x_V = np.full(-(-len(self._logits_V) // noise.GROUP_SIZE) * noise.GROUP_SIZE, -np.inf)
            x_V[kept.ids_N] = kept.x_N - kept.x_N.max()
            selected = select(self._stages[-1], kept, *reference.noise_of(self._stages, self._past, 0, self._step))
            self._outcomes[outcome] = kept, selected, x_V.reshape(-1, noise.GROUP_SIZE)
        return self._outcomes[outcome]

    def _select(self, outcome: int, seeds_S: Seeds) -> Ids:
        """The token of each seed, as ``select``."""
        stage: Any = self._stages[-1]
        kept, selected, x_GT = self._outcome(outcome)
        if stage.noise_key(self._past) is not None or stage.uniforms == "none":
            return np.full(len(seeds_S), selected.token)
        if isinstance(selected.tokens, Intervals):
            u_S = noise.uniforms(seeds_S, self._step_1, noise.TOKEN, ONE)
            target_S = stage.target(reference.statistics(kept.x_N - kept.x_N.max()), u_S)
            return np.asarray(kept.ids_N[np.searchsorted(selected.tokens.before_N, target_S) - 1])
        group_G, mass_G, _ = selected.groups  # type: ignore[misc]  # not None
        tokens: list[Ids] = []
        size = max(1, CHUNK // max(len(group_G), noise.GROUP_SIZE))
        for seeds_S1 in (seeds_S[start : start + size, None] for start in range(0, len(seeds_S), size)):
            u_SG = noise.uniforms(seeds_S1, self._step_1, noise.GROUP, group_G[None])
            group_S = group_G[stage.score(mass_G[None], u_SG).argmax(1)]  # among equal ones, the lowest id
            ids_ST = group_S[:, None] * noise.GROUP_SIZE + np.arange(noise.GROUP_SIZE)
            x_ST, u_ST = x_GT[group_S], noise.uniforms(seeds_S1, self._step_1, noise.TOKEN, ids_ST)
            total_ST = np.where(x_ST > -np.inf, stage.score(x_ST, u_ST), -np.inf)
            tokens.append(np.take_along_axis(ids_ST, total_ST.argmax(1)[:, None], 1)[:, 0])
        return np.concatenate(tokens)
