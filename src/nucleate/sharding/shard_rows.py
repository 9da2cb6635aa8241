"""The rows of a ShardedSampler: one Sampler samples them, and their plans say what the shards exchange.

Of some rows only the tokens that decide them are known: they are sampled with all others at -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.outputs import StepLogprobs
from nucleate.sampling import noise, reference
from nucleate.sampling.pipeline import Params, PreparedPipeline, RequestParams, prepared, seed_of
from nucleate.sampling.presets import with_mask
from nucleate.sampling.sampler import Sampler
from nucleate.sampling.stage import Combine, Pipeline
from nucleate.sampling.stages.constraints.allowed import Mask
from nucleate.sharding.local_shard import RowShifts
from nucleate.sharding.rank_agreement import RowLog
from nucleate.sharding.shard_layout import FoundTokens
from nucleate.sharding.shard_plan import GROUPS, WHOLE, RowPlan, plan_of
from nucleate.sharding.shard_step import StepRow

CHUNK_SCORES = 1 << 21
"""The scores that are sampled at once: 8 MiB, which stay in the caches."""


class SampledRows(NamedTuple):
    """What was sampled. Keys are indices of the rows in the call."""

    tokens: dict[int, int]
    errors: dict[int, str]
    logprobs: dict[int, StepLogprobs]

    def include(self, other: SampledRows, places: Sequence[int]) -> None:
        """Add the results of rows at some places of this call."""
        self.tokens.update({places[at]: token for at, token in other.tokens.items()})
        self.errors.update({places[at]: error for at, error in other.errors.items()})
        self.logprobs.update({places[at]: one for at, one in other.logprobs.items()})


Masks = Sequence[NDArray[np.int32] | None]
"""A bitmask per row; None for all rows if the step has none."""


class FoundSampling:
    """Samples such rows with a Sampler. The buffer of their logits is reused."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._buffer_RV = np.full((0, sampler.vocab_size), -np.inf, np.float32)

    def __call__(self, numbers: Sequence[int], found: Sequence[FoundTokens], masks_R: Masks) -> SampledRows:
        """Sample rows, by their numbers in the sampler."""
        chunk, result = max(1, CHUNK_SCORES // self.sampler.vocab_size), SampledRows({}, {}, {})
        for start in range(0, len(numbers), chunk):
            part = slice(start, start + chunk)
            result.include(self._sample(list(numbers[part]), found[part], masks_R[part]), range(start, len(numbers)))
        return result

    def _sample(self, numbers: list[int], found: Sequence[FoundTokens], masks_R: Masks) -> SampledRows:
        if len(self._buffer_RV) < len(numbers):
            self._buffer_RV = np.full((len(numbers), self.sampler.vocab_size), -np.inf, np.float32)
        x_RV = self._buffer_RV[: len(numbers)]
        for x_V, (ids_N, raw_N) in zip(x_RV, found, strict=True):
            x_V[ids_N] = raw_N
        result = sampled_rows(self.sampler, x_RV, numbers, masks_R)
        for x_V, (ids_N, _) in zip(x_RV, found, strict=True):
            x_V[ids_N] = -np.inf
        return result


def sampled_rows(
    sampler: Sampler, logits_RV: object, numbers: list[int], masks_R: Masks, companion_RV: object = None
) -> SampledRows:
    """The results of a sampler's step, by index."""
    given = [mask_W for mask_W in masks_R if mask_W is not None]
    out = sampler(logits_RV, numbers, mask=np.stack(given) if given else None, companion=companion_RV)
    tokens = {at: token for at, token in enumerate(out.token_ids.tolist()) if token >= 0}
    logprobs = {at: one for at, one in enumerate(out.logprobs or ()) if one is not None}
    return SampledRows(tokens, dict(out.errors), logprobs)


class ShardRows:
    """The rows, as they are on every rank. shared_seed: from which rows without a seed get theirs."""

    def __init__(self, vocab_size: int, backend: str, shared_seed: int) -> None:
        self.sampler, self.log, self.plans = Sampler(vocab_size, backend), RowLog(), dict[int, RowPlan]()
        self.combines: dict[int, Combine] = {}
        self._stages: dict[int, Pipeline] = {}
        """Pipelines of rows as added: their Shifts and draws do not change."""
        self._size, self._shared_seed, self._added = vocab_size, shared_seed, 0
        self._own, self._other = FoundSampling(self.sampler), FoundSampling(Sampler(vocab_size, backend))
        self._other_rows: dict[int, int] = {}  # rows with a ``RowPlan.kept``: their numbers in the other sampler

    def add(
        self,
        params: Params | PreparedPipeline,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        seed: int | None,
        index: int,
        eos_token_ids: Sequence[int],
    ) -> int:
        """Add a row, see ``Sampler.add``."""
        ends = tuple(int(token) for token in eos_token_ids)
        if isinstance(params, RequestParams):
            params.check_for_sampler(ends)
        one = prepared(params, ends)
        if seed is None and seed_of(params, one.given) is None:
            seed, index = self._fresh_seed(), 0
        row = self.sampler.add(
            params, prompt_ids, output_ids=output_ids, seed=seed, index=index, eos_token_ids=eos_token_ids
        )
        self._added += 1
        stages = self._stages[row] = self.sampler.stages(row)
        plan, seed = plan_of(stages, one.combine), self.sampler.seed(row)
        self.plans[row] = plan
        if one.combine is not None:
            self.combines[row] = one.combine
        if plan.kept is not None:
            self._other_rows[row] = self._other.sampler.add(plan.kept, prompt_ids, output_ids=output_ids, seed=seed)
        self.log.record("rows", "add", row)
        self.log.record("parameters of the rows", one.given)
        self.log.record("seeds of the rows", seed)
        self.log.record("tokens of the rows", [int(token) for token in prompt_ids], self.sampler.output_ids(row))
        return row

    def _fresh_seed(self) -> int:
        """A random seed that is the same on all ranks."""
        seed, step = np.array([self._shared_seed], np.uint64), np.zeros(1, np.uint64)
        high, low, *_ = noise.block_words(seed, step, noise.TOKEN, np.array([self._added]))
        return int(high[0]) << 32 | int(low[0])

    def remove(self, row: int) -> None:
        """Remove a row."""
        self.sampler.remove(row)
        del self.plans[row]
        del self._stages[row]
        self.combines.pop(row, None)
        if row in self._other_rows:
            self._other.sampler.remove(self._other_rows.pop(row))
        self.log.record("rows", "remove", row)

    def follow(self, row: int, token: int) -> None:
        """Append a token that ``sampler`` has already."""
        if row in self._other_rows:
            self._other.sampler.accept(self._other_rows[row], token)

    def step_row(self, row: int, mask_W: NDArray[np.int32] | None) -> StepRow | str:
        """What a step exchanges for a row; or why it needs the whole row."""
        plan = self.plans[row]
        if plan.path == WHOLE:
            return plan.why
        past, shifts, stages = self.sampler.history(row), plan.shifts, self._stages[row]
        if mask_W is not None and with_mask(stages) is not stages:
            shifts = (*shifts, Mask())
        try:
            key = self.sampler.seed(row), len(past.output)
            if plan.path == GROUPS:
                key = reference.noise_of(stages, past, *key)
            return StepRow(plan, RowShifts(shifts, past, mask_W, self._size) if shifts else None, key)
        except Exception as error:  # noqa: BLE001  # a user-defined stage may raise anything; the whole row reports it
            return f"{type(error).__name__}: {error}"

    def sample(self, rows: Sequence[int], found: Sequence[FoundTokens], masks_R: Masks) -> SampledRows:
        """Sample rows from the tokens that decide them."""
        result = SampledRows({}, {}, {})
        for sampling in (self._own, self._other):
            mine = [at for at, row in enumerate(rows) if (row in self._other_rows) == (sampling is self._other)]
            numbers = [self._other_rows.get(rows[at], rows[at]) for at in mine]
            result.include(sampling(numbers, [found[at] for at in mine], [masks_R[at] for at in mine]), mine)
        for at, token in result.tokens.items():
            if rows[at] in self._other_rows:
                self.sampler.accept(rows[at], token)
        return result
