"""Stateless sampling: ``sample`` and ``probabilities``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import compiled
from nucleate.parameters.keywords import with_suggestions
from nucleate.sampling import noise, reference
from nucleate.sampling.companion import combined_rows
from nucleate.sampling.cpu.fused_runner import EditProgram, RowTable, thread_runner
from nucleate.sampling.history import History
from nucleate.sampling.host_batch import row_path
from nucleate.sampling.inputs import LogitsInput, check_ids, histories, is_row, mask_layout, masks, per_row
from nucleate.sampling.pipeline import FusedPipeline, Params, prepared, seed_of
from nucleate.sampling.presets import with_mask
from nucleate.sampling.reference import add_values
from nucleate.sampling.route import FUSED, dispatch


def _as_batch(given: Any) -> Any:
    """An argument for one row, as a batch of one; None stays None."""
    return None if given is None else given[None] if hasattr(given, "ndim") else [given]


class LogitsError(ValueError):
    """Some rows cannot be sampled. ``errors``: {row: message}; ``token_ids``: int64 [B], -1 in those rows."""

    def __init__(self, errors: Mapping[int, str], token_ids: NDArray[np.int64] | None = None) -> None:
        super().__init__(dict(errors), token_ids)  # both, so that it can be pickled
        self.errors, self.token_ids = dict(errors), token_ids

    def __str__(self) -> str:
        return "; ".join(f"row {row}: {why}" for row, why in self.errors.items())


@with_suggestions
def sample(
    logits_BV: Any,
    params: Params | Sequence[Params],
    *,
    step: int | Sequence[int] = 0,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    output_ids: Sequence[Sequence[int]] | None = None,
    mask: Any = None,
    companion: Any = None,
    backend: str = "auto",
) -> Any:
    """Sample one token per row, without keeping state: int64 [B], NumPy, or a tensor if the logits are a tensor.

    logits_BV: float [B, V], NumPy or torch; or one row [V] with one list of token ids, mask [V / 32], companion [V],
    for which the result has no rows either. params: one for all rows, or a list with one per row. step: position of the
    token in the output, one for all rows or one per row; the random numbers depend on it. prompt_ids, output_ids: a
    list of token ids per row, for penalties. mask: int32 [B, V / 32], bitmask of the allowed tokens, lowest bit first.
    companion: float [B, V], logits of the companion sequences, for parameters with guidance or contrastive decoding.
    backend: "auto", "reference" or "cpu"; all give the same tokens.

    Stateful stages (mirostat, adaptive-p) are in their initial state; use ``Sampler`` to update them. Rows with the
    same logits, parameters and seed get the same token.

    Raises LogitsError for a row with NaN, +inf or no finite score; the error holds the tokens of the other rows.
    """
    batch = Batch(logits_BV, params, prompt_ids, output_ids, mask, companion, backend)
    steps = per_row(step, len(batch), "step")
    tokens_B, errors = np.full(len(batch), -1, dtype=np.int64), {}
    seeds = [noise.fresh_seed() if seed is None else seed for seed in batch.seeds]
    _sample_fused(batch, seeds, steps, tokens_B)
    for row, (logits_V, stages, history, fast) in enumerate(batch):
        if tokens_B[row] >= 0:
            continue
        try:
            tokens_B[row] = row_path(fast).run(logits_V, stages, seeds[row], steps[row], history).token
        except reference.RowError as error:
            errors[row] = str(error)
    if errors:
        raise LogitsError(errors, batch.logits.like(tokens_B))
    return batch.result(tokens_B)


def _sample_fused(batch: Batch, seeds: list[int], steps: list[int], tokens_B: NDArray[np.int64]) -> None:
    """Sample the rows of the fused kernel. Rows that it cannot sample keep -1 and go to another path."""
    if not batch.fused_rows:
        return
    size, table, programs = batch.logits.shape[1], RowTable(len(batch.fused_rows)), []
    logits = batch.logits
    if any(pipeline.values for pipeline in batch.fused_rows.values()):
        logits = LogitsInput(np.array([*logits], np.float32).reshape(logits.shape))
    for row, pipeline in batch.fused_rows.items():
        past = batch.histories[row]
        if pipeline.values is not None:
            add_values(logits[row], pipeline.values, past, logits[row])
        programs.append(EditProgram(pipeline.edits, past, size))
        noise_key = reference.noise_of(batch.pipelines[row], past, seeds[row], steps[row])
        table.add(row, pipeline.params, programs[-1].commands_at, *noise_key)
    rows = [*batch.fused_rows]
    part = table.select(rows, rows)
    masks_B = mask_layout([past.mask for past in batch.histories])
    thread_runner(size).draw(logits.layout(), len(rows), part.control, masks_B)
    tokens_B[rows] = part.tokens


@with_suggestions
def probabilities(
    logits_BV: Any,
    params: Params | Sequence[Params],
    *,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    output_ids: Sequence[Sequence[int]] | None = None,
    mask: Any = None,
    companion: Any = None,
    backend: str = "auto",
) -> Any:
    """The distribution that ``sample`` samples from, after the whole pipeline: float64 [B, V]. Arguments as there.

    It is the distribution over all seeds; XTC is averaged over its random decision.
    """
    batch = Batch(logits_BV, params, prompt_ids, output_ids, mask, companion, backend)
    p_BV, errors = np.zeros(batch.logits.shape), {}
    for row, (logits_V, stages, history, fast) in enumerate(batch):
        try:
            p_BV[row] = row_path(fast).probabilities(logits_V, stages, history)
        except reference.RowError as error:
            errors[row] = str(error)
    if errors:
        raise LogitsError(errors)
    return batch.result(p_BV)


class Batch:
    """The checked arguments of one call, row by row."""

    def __init__(
        self, logits_BV: Any, params: Any, prompt_ids: Any, output_ids: Any, mask: Any, companion: Any, backend: str
    ) -> None:
        self.is_row = is_row(logits_BV)  #: one row [V], and the other arguments as for one
        if self.is_row:
            given_arguments = logits_BV, prompt_ids, output_ids, mask, companion
            logits_BV, prompt_ids, output_ids, mask, companion = map(_as_batch, given_arguments)
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
        if any(one.combine for one in ready):
            self.logits = LogitsInput(combined_rows([one.combine for one in ready] * many, logits_BV, companion))
        self.seeds = [seed_of(*pair) for pair in zip(given, (one.given for one in ready), strict=True)] * many
        self.ready = ready * many
        self.pipelines = [one.stages if mask is None else with_mask(one.stages) for one in ready] * many
        routes = [dispatch(one.stages, one.fused, size, rows, backend=backend) for one in ready] * many
        self._fast = [route.backend == "cpu" for route in routes]
        paths = zip(self.ready, routes, strict=True)
        pipelines = [one.fused if route.path == FUSED else None for one, route in paths]
        self.fused_rows = {row: one for row, one in enumerate(pipelines) if isinstance(one, FusedPipeline)}
        prompts = histories(prompt_ids, rows, size, "prompt_ids")
        outputs = histories(output_ids, rows, size, "output_ids")
        self.histories = [History(*three) for three in zip(prompts, outputs, masks(mask, rows, size), strict=True)]

    def __len__(self) -> int:
        return len(self.logits)

    def result(self, values_B: NDArray[Any]) -> Any:
        """The result of a call, of the kind of the logits; without rows if they are one row."""
        result_B = self.logits.like(values_B)
        return result_B[0] if self.is_row else result_B

    def __iter__(self) -> Any:
        """Per row: logits, pipeline, history, and whether the CPU backend runs it."""
        return zip(self.logits, self.pipelines, self.histories, self._fast, strict=True)
