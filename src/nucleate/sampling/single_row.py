"""One row of logits: the arguments of functions that look at it (``trace``, many draws), and its tokens for many seeds.

The tokens are those of ``select``, with NumPy over the seeds. The scores are computed once per outcome of XTC, the
noise once per seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling import noise, reference
from nucleate.sampling.companion import combined_rows, split_combine
from nucleate.sampling.history import History
from nucleate.sampling.inputs import LogitsInput, check_ids, history, masks, per_row
from nucleate.sampling.pipeline import Params, as_pipeline
from nucleate.sampling.presets import with_mask
from nucleate.sampling.reference import Contest, Floats, Ids, Intervals, Survivors, select
from nucleate.sampling.stage import Ceiling, Combine, Draw, Pipeline


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


def single_row(
    logits_V: Any,
    params: Params,
    prompt_ids: Sequence[int] | None = None,
    output_ids: Sequence[int] | None = None,
    step: int = 0,
    mask: Any = None,
    companion: Any = None,
) -> SingleRow:
    """Check the arguments of ``trace``. Raises as ``sample``."""
    logits = LogitsInput(_as_batch(logits_V, "logits"))
    size, (combine, stages) = logits.shape[1], split_combine(as_pipeline(params))
    check_ids(stages, size)
    if combine is not None:
        others = None if companion is None else _as_batch(companion, "companion")
        logits = LogitsInput(combined_rows([combine], _as_batch(logits_V, "logits"), others))
    [at], [mask_W] = per_row(step, 1, "step"), masks(None if mask is None else _as_batch(mask, "mask"), 1, size)
    stages = stages if mask_W is None else with_mask(stages)
    prompt = history(() if prompt_ids is None else prompt_ids, size, "prompt_ids")
    output = history(() if output_ids is None else output_ids, size, "output_ids")
    return SingleRow(logits[0], stages, History(prompt, output, mask_W), at, combine)


def _as_batch(row: Any, name: str) -> Any:
    """One row, NumPy or torch, as a batch."""
    array = row if hasattr(row, "detach") else np.asarray(row)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one row, a list of numbers, got the shape {list(array.shape)}")
    return array[None]


Seeds = NDArray[np.uint64]
CHUNK = 16_384
"""Random numbers per call of NumPy: its arrays then fit the cache."""
ONE = np.zeros(1, np.int64)
"""The index of a random number of which a row has one."""


class SeededDraws:
    """Selects a token of one row per seed. logits_V: float [V]. stages: with a Draw at the end. step: of the noise."""

    def __init__(self, logits_V: NDArray[Any], stages: Pipeline, past: History, step: int) -> None:
        self._logits_V, self._stages, self._past, self._step = logits_V, stages, past, step
        self._bounds = reference.ceiling_bounds(stages)
        self._outcomes: dict[int, tuple[Survivors, Selector]] = {}

    def survivors(self, u: float) -> Survivors:
        """The survivors with a random number of XTC. Raises RowError if there is none."""
        return self._outcome(int(np.searchsorted(self._bounds, u, side="right")) - 1)[0]

    def tokens(self, seeds_S: Seeds) -> Ids:
        """The token of each seed, int64 [S]. Raises RowError if one of them cannot be sampled."""
        tokens_S, outcome_S = np.empty(len(seeds_S), np.int64), np.zeros(len(seeds_S), np.int64)
        if any(isinstance(stage, Ceiling) for stage in self._stages):
            u_S = noise.uniforms(seeds_S, np.array([self._step], np.uint64), noise.XTC, ONE)
            outcome_S = np.searchsorted(self._bounds, u_S, side="right") - 1
        for outcome in np.unique(outcome_S).tolist():
            _, selector = self._outcome(outcome)
            tokens_S[outcome_S == outcome] = selector(seeds_S[outcome_S == outcome])
        return tokens_S

    def _outcome(self, outcome: int) -> tuple[Survivors, Selector]:
        if outcome not in self._outcomes:
            u = (self._bounds[outcome] + self._bounds[outcome + 1]) / 2
            kept = reference.survivors(self._logits_V, self._stages, self._past, u)
            self._outcomes[outcome] = kept, selector_of(self._stages[-1], kept, self._past, self._step)
        return self._outcomes[outcome]


Selector = Callable[[Seeds], Ids]
"""The tokens of seeds, [S] of [S]."""


def selector_of(stage: Any, kept: Survivors, past: History, step: int) -> Selector:
    """A function that gives the token of each seed, as ``select`` with the seed and this step."""
    key = stage.noise_key(past)
    first = select(stage, kept, *((0, step) if key is None else key))
    if key is not None or stage.uniforms == "none":
        return lambda seeds_S: np.full(len(seeds_S), first.token)
    if isinstance(first.tokens, Intervals):
        return _IntervalSelector(stage, kept, first.tokens, step)
    return _ContestSelector(stage, kept, first.groups, step)


class _IntervalSelector:
    """For ``uniforms`` "one": looks up the targets of all seeds in the sums of the weights."""

    def __init__(self, stage: Draw, kept: Survivors, line: Intervals, step: int) -> None:
        self._stage, self._line, self._step = stage, line, np.array([step], np.uint64)
        self._row = reference.statistics(kept.x_N - kept.x_N.max())

    def __call__(self, seeds_S: Seeds) -> Ids:
        with np.errstate(all="ignore"):
            target_S = self._stage.target(self._row, noise.uniforms(seeds_S, self._step, noise.TOKEN, ONE))
        index_S = np.searchsorted(self._line.before_N, target_S) - 1
        return np.asarray(self._line.ids_N[index_S])


class _ContestSelector:
    """For ``uniforms`` "each": the groups of all seeds, then the tokens of the winning group of each seed.

    The tokens of a group are a line of the arrays [G, M], M being the size of the largest one, in order of their ids.
    """

    def __init__(self, stage: Draw, kept: Survivors, groups: Contest | None, step: int) -> None:
        self._stage, self._step = stage, np.array([step], np.uint64)
        order_N = np.argsort(kept.ids_N)
        ids_N, x_N = kept.ids_N[order_N], (kept.x_N - kept.x_N.max())[order_N]
        self._groups_G, self._mass_G = reference.group_logsumexp(ids_N // noise.GROUP_SIZE, x_N)
        first_G, group_N = np.unique(ids_N // noise.GROUP_SIZE, return_index=True, return_inverse=True)[1:]
        place_N = np.arange(len(ids_N)) - first_G[group_N]
        shape = len(first_G), int(place_N.max()) + 1
        self._ids_GM, self._x_GM = np.zeros(shape, np.int64), np.zeros(shape)
        self._exists_GM = np.zeros(shape, bool)
        for array_GM, values_N in ((self._ids_GM, ids_N), (self._x_GM, x_N), (self._exists_GM, True)):
            array_GM[group_N, place_N] = values_N

    def __call__(self, seeds_S: Seeds) -> Ids:
        size = max(1, CHUNK // max(self._ids_GM.shape))
        chunks = [seeds_S[start : start + size] for start in range(0, len(seeds_S), size)]
        with np.errstate(all="ignore"):
            return np.concatenate([self._select(chunk[:, None]) for chunk in chunks])

    def _select(self, seeds_S1: Seeds) -> Ids:
        u_SG = noise.uniforms(seeds_S1, self._step, noise.GROUP, self._groups_G[None])
        group_S = self._stage.score(self._mass_G[None], u_SG).argmax(1)  # among equal ones, the first has the lowest id
        ids_SM, x_SM = self._ids_GM[group_S], self._x_GM[group_S]
        u_SM: Floats = noise.uniforms(seeds_S1, self._step, noise.TOKEN, ids_SM)
        total_SM = np.where(self._exists_GM[group_S], self._stage.score(x_SM, u_SM), -np.inf)
        return np.take_along_axis(ids_SM, total_SM.argmax(1)[:, None], 1)[:, 0]
