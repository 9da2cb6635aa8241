"""Samples rows with equal pipeline signatures by torch operations: any pipeline, on any device.

It never synchronises, and no shape depends on a value, so it can be captured in a CUDA graph. Each row is sorted once.
``make_batch`` prepares everything that does not change between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nucleate.sampling.backends.torch.bound_stage import BoundStage, bind_stages
from nucleate.sampling.backends.torch.ranked_tokens import RankedTokens, RowConstants, rank_tokens
from nucleate.sampling.backends.torch.shape_filters import apply_filter
from nucleate.sampling.backends.torch.tensor_philox import PhiloxKeys, make_keys, uniform
from nucleate.sampling.backends.torch.tensor_shifts import padded
from nucleate.sampling.backends.torch.token_draw import select_tokens
from nucleate.sampling.backends.torch.torch_device import to_device
from nucleate.sampling.dispatch.signature import PipelineSignature, StageSignature
from nucleate.sampling.noise import XTC
from nucleate.sampling.stage import SampledToken


class TensorBatch(NamedTuple):
    """Rows with equal signatures, prepared for sampling."""

    signatures: tuple[StageSignature, ...]
    mask_before_tap: bool  #: see ``PipelineSignature``, as the next
    stateful: bool
    constants: RowConstants
    keys: PhiloxKeys
    stages: list[BoundStage]  #: bound to the initial parameters
    exempt_ids: tuple[torch.Tensor, ...]  #: of each Ceiling, int64 [R, K], padded with an id >= V


class StepResult(NamedTuple):
    """The result of a step."""

    tokens_R: torch.Tensor  #: int64, -1 for rows that cannot be sampled
    params_RP: torch.Tensor | None  #: the parameters for the next step; None without stateful stages
    tapped_RV: torch.Tensor | None  #: the scores at the Tap, -inf for masked tokens; None without a Tap


def make_batch(
    rows: Sequence[PipelineSignature],
    seeds_R: torch.Tensor,
    size: int,
    floats: torch.dtype,
    *,
    use_triton: bool = False,
) -> TensorBatch:
    """Prepare rows with equal signatures. seeds_R: uint64 as int64. size: V. use_triton: see ``PhiloxKeys``."""
    first, device = rows[0], seeds_R.device
    params_RP = to_device(torch.tensor([row.params for row in rows], dtype=floats).view(len(rows), -1), device)
    needs_full_mass = any("full_mass" in rule.row for signature in first.signatures for rule in signature.rules)
    constants = RowConstants(size, len(rows), floats, device, needs_full_mass=needs_full_mass)
    past_end = -(-size // 256) * 256
    exempt = (padded([row.exempt_ids[i] for row in rows], past_end) for i in range(len(first.exempt_ids)))
    return TensorBatch(
        first.signatures, first.mask_before_tap, first.stateful, constants, make_keys(seeds_R, use_triton=use_triton),
        bind_stages(first.signatures, params_RP), tuple(to_device(ids_RK, device) for ids_RK in exempt),
    )  # fmt: skip


class StepInput(NamedTuple):
    """The inputs of a step. mask: bitmask int32 [R, V / 32 or more] of allowed tokens, lowest bit first; None: all."""

    x_RV: torch.Tensor  #: the scores after the leading Shifts, see ``to_scores``
    steps_R: torch.Tensor  #: the number of tokens sampled so far, uint64 as int64
    mask_RW: torch.Tensor | None = None  #: applied first
    mask_after_tap_RW: torch.Tensor | None = None  #: applied after a Tap that is the first stage
    params_RP: torch.Tensor | None = None  #: current parameters, for stateful stages; further columns are kept


def run(batch: TensorBatch, inputs: StepInput) -> StepResult:
    """Sample a token per row."""
    constants, size, params_RP = batch.constants, inputs.x_RV.shape[1], inputs.params_RP
    steps_R1 = inputs.steps_R[:, None]
    x_RV = apply_mask(constants, inputs.x_RV, inputs.mask_RW)
    tapped_RV = x_RV if inputs.mask_after_tap_RW is not None else None
    tokens = rank_tokens(constants, apply_mask(constants, x_RV, inputs.mask_after_tap_RW))
    uniform_R1, exempt = None, iter(batch.exempt_ids)
    if batch.exempt_ids:
        uniform_R1 = uniform(batch.keys, steps_R1, XTC, torch.zeros_like(steps_R1), constants.floats)
    stages = batch.stages if params_RP is None else bind_stages(batch.signatures, params_RP)
    around: dict[int, tuple[RankedTokens, RankedTokens]] = {}
    for i, stage in enumerate(stages):
        before = tokens = tokens.apply_cuts() if stage.signature.state_names else tokens
        if stage.signature.shape == "Tap":
            tokens = tokens.apply_cuts()
            if i > 0 or tapped_RV is None:
                tapped_RV = tokens.by_id(torch.where(tokens.surviving(), tokens.x_RN, -torch.inf))[:, :size]
        elif stage.signature.greedy or stage.signature.shape != "Draw":
            exempt_RK = next(exempt) if stage.signature.shape == "Ceiling" else None
            tokens = apply_filter(tokens, stage, uniform_R1, exempt_RK)
        if stage.signature.state_names:
            tokens = tokens.apply_cuts()
            around[i] = before, tokens
    tokens_R1 = select_tokens(tokens.apply_cuts(), stages[-1], batch.keys, steps_R1)
    tapped = any(signature.shape == "Tap" for signature in batch.signatures)
    if not around:
        return StepResult(tokens_R1[:, 0], None, tapped_RV if tapped else None)
    assert params_RP is not None  # noqa: S101  # given for stateful stages
    logprobs = {
        i: [
            tokens.logprob(tokens_R1) if name in stages[i].signature.logprobs_read else constants.zero
            for name, tokens in zip(("logprob_before", "logprob_after"), span, strict=True)
        ]
        for i, span in around.items()
    }
    tokens_R1, params_RP = _update_state(constants, params_RP, tokens_R1, stages, logprobs)
    return StepResult(tokens_R1[:, 0], params_RP, tapped_RV if tapped else None)


def to_scores(logits_RV: torch.Tensor, zero_1: torch.Tensor) -> torch.Tensor:
    """Logits in the dtype of ``zero_1``. -0.0 becomes 0.0; NaN and +inf stay."""
    if logits_RV.dtype == torch.float64 or zero_1.dtype == torch.float32:
        logits_RV = logits_RV.to(torch.float32)
    return logits_RV + zero_1


def apply_mask(constants: RowConstants, x_RV: torch.Tensor, mask_RW: torch.Tensor | None) -> torch.Tensor:
    """Scores under a bitmask: adds log(bit), which is 0 or -inf. NaN and +inf stay invalid, also for masked tokens."""
    if mask_RW is None:
        return x_RV
    return x_RV + ((mask_RW.index_select(1, constants.word_N) >> constants.bit_N) & 1).log()


def _update_state(
    constants: RowConstants,
    params_RP: torch.Tensor,
    tokens_R1: torch.Tensor,
    stages: list[BoundStage],
    logprobs: dict[int, list[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and parameters for the next step. A row whose new state is not finite gets no token."""
    updated_RP = updated_params(params_RP, tokens_R1, stages, logprobs)
    positions = [name in stage.signature.state_names for stage in stages for name in stage.signature.param_names]
    for i in (i for i, changes in enumerate(positions) if changes):
        tokens_R1 = torch.where(updated_RP[:, i : i + 1].abs() < torch.inf, tokens_R1, constants.no_token)
    return tokens_R1, torch.where(tokens_R1 >= 0, updated_RP, params_RP)


def updated_params(
    params_RP: torch.Tensor, tokens_R1: torch.Tensor, stages: list[BoundStage], logprobs: dict[int, list[torch.Tensor]]
) -> torch.Tensor:
    """The parameters for the next step, not checked. logprobs: before and after each stateful stage, [R, 1]."""
    columns, start = [], 0
    for i, stage in enumerate(stages):
        stage_RP = params_RP[:, start : start + stage.signature.num_params]
        columns.append(stage.updated_params(SampledToken(tokens_R1, *logprobs[i])) if i in logprobs else stage_RP)
        start += stage.signature.num_params
    return torch.cat([*columns, params_RP[:, start:]], 1)
