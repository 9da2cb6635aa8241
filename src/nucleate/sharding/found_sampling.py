"""Samples rows of which only the tokens that decide them are known: all others are at -inf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.outputs import StepLogprobs
from nucleate.sampling.sampler import Sampler
from nucleate.sharding.shard_layout import FoundTokens

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
