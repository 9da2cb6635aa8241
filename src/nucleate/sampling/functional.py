"""Stateless sampling: ``sample`` and ``probabilities``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.readiness import compiled
from nucleate.sampling import noise
from nucleate.sampling.backends import reference
from nucleate.sampling.backends.numba.fused.edit_program import EditProgram
from nucleate.sampling.backends.numba.fused.fused_sampler import RowTable
from nucleate.sampling.cpu_paths import chances, fused, runner
from nucleate.sampling.dispatch.fused_pipeline import FusedPipeline
from nucleate.sampling.dispatch.route import HOT, dispatch
from nucleate.sampling.history import History
from nucleate.sampling.inputs import LogitsInput, check_ids, histories, mask_layout, masks, per_row
from nucleate.sampling.pipeline import Params, prepared
from nucleate.sampling.presets import with_mask


class LogitsError(ValueError):
    """Some rows cannot be sampled. ``errors``: {row: message}; ``token_ids``: int64 [B], -1 in those rows."""

    def __init__(self, errors: Mapping[int, str], token_ids: NDArray[np.int64] | None = None) -> None:
        super().__init__(dict(errors), token_ids)  # both, so that it can be pickled
        self.errors, self.token_ids = dict(errors), token_ids

    def __str__(self) -> str:
        return "; ".join(f"row {row}: {why}" for row, why in self.errors.items())


def sample(
    logits_BV: Any,
    params: Params | Sequence[Params],
    *,
    step: int | Sequence[int] = 0,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    output_ids: Sequence[Sequence[int]] | None = None,
    mask: Any = None,
    backend: str = "auto",
) -> Any:
    """Sample one token per row, without keeping state: int64 [B], NumPy, or a tensor if the logits are a tensor.

    logits_BV: float [B, V], NumPy or torch. params: one for all rows, or a list with one per row. step: position of the
    token in the output, one for all rows or one per row; the random numbers depend on it. prompt_ids, output_ids: a
    list of token ids per row, for penalties. mask: int32 [B, V / 32], bitmask of the allowed tokens, lowest bit first.
    Stateful stages (mirostat, adaptive-p) are in their initial state; use ``Sampler`` to update them. Rows with the
    same logits, parameters and seed get the same token. Raises LogitsError, which has the tokens of the other rows, for
    a row with NaN, +inf or no finite score."""
    batch = _Batch(logits_BV, params, prompt_ids, output_ids, mask, backend)
    steps = per_row(step, len(batch), "step")
    tokens_B, errors = np.full(len(batch), -1, dtype=np.int64), {}
    seeds = [noise.fresh_seed() if seed is None else seed for seed in batch.seeds]
    _sample_fused(batch, seeds, steps, tokens_B)
    for row, (logits_V, stages, history, fast) in enumerate(batch):
        if tokens_B[row] >= 0:
            continue
        try:
            tokens_B[row] = runner(fast)(logits_V, stages, seeds[row], steps[row], history).token
        except reference.RowError as error:
            errors[row] = str(error)
    tokens = batch.logits.like(tokens_B)
    if errors:
        raise LogitsError(errors, tokens)
    return tokens


def _sample_fused(batch: _Batch, seeds: list[int], steps: list[int], tokens_B: NDArray[np.int64]) -> None:
    """Sample the rows of the fused kernel. Rows that it cannot sample keep -1 and go to another path."""
    if not batch.chains:
        return
    size, table, programs = batch.logits.shape[1], RowTable(len(batch.chains)), []
    for row, chain in batch.chains.items():
        programs.append(EditProgram(chain.edits, batch.histories[row], size))
        table.add(row, chain.numbers, programs[-1].commands_at, seeds[row], steps[row])
    part = table.select(table.rows, table.rows)
    masks_B = mask_layout([past.mask for past in batch.histories])
    fused()(size).draw(batch.logits.layout(), len(table.rows), part.control, masks_B)
    tokens_B[table.rows] = part.tokens


def probabilities(
    logits_BV: Any,
    params: Params | Sequence[Params],
    *,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    output_ids: Sequence[Sequence[int]] | None = None,
    mask: Any = None,
    backend: str = "auto",
) -> Any:
    """The distribution that ``sample`` samples from, after the whole pipeline: float64 [B, V]. Arguments as there.

    It is the distribution over all seeds; XTC is averaged over its random decision.
    """
    batch = _Batch(logits_BV, params, prompt_ids, output_ids, mask, backend)
    p_BV, errors = np.zeros(batch.logits.shape), {}
    for row, (logits_V, stages, history, fast) in enumerate(batch):
        try:
            p_BV[row] = chances(fast)(logits_V, stages, history)
        except reference.RowError as error:
            errors[row] = str(error)
    if errors:
        raise LogitsError(errors)
    return batch.logits.like(p_BV)


class _Batch:
    """The checked arguments of one call, row by row."""

    def __init__(self, logits_BV: Any, params: Any, prompt_ids: Any, output_ids: Any, mask: Any, backend: str) -> None:
        self.logits = LogitsInput(logits_BV)
        rows, size = self.logits.shape
        compiled(backend, rows * size)  # raises for an unknown backend
        given = params if isinstance(params, list) else [params]
        ready = [prepared(one) for one in given]
        for one in ready:
            check_ids(one.stages, size)
        many = 1 if given is params else rows
        if len(given) * many != rows:
            raise ValueError(f"params has {len(given)} entries, but the logits have {rows} rows")
        self.seeds = [getattr(one.given[-1], "seed", None) for one in ready] * many  # XTC needs them, even if greedy
        self._pipelines = [one.stages if mask is None else with_mask(one.stages) for one in ready] * many
        routes = [dispatch(one.stages, one.chain, size, rows, backend=backend) for one in ready] * many
        self._fast = [route.backend == "cpu" for route in routes]
        hot = [one.chain if route.path == HOT else None for one, route in zip(ready * many, routes, strict=True)]
        self.chains = {row: chain for row, chain in enumerate(hot) if isinstance(chain, FusedPipeline)}
        prompts = histories(prompt_ids, rows, size, "prompt_ids")
        outputs = histories(output_ids, rows, size, "output_ids")
        self.histories = [History(*three) for three in zip(prompts, outputs, masks(mask, rows, size), strict=True)]

    def __len__(self) -> int:
        return len(self.logits)

    def __iter__(self) -> Any:
        """Per row: logits, pipeline, history, and whether the CPU backend runs it."""
        return zip(self.logits, self._pipelines, self.histories, self._fast, strict=True)
