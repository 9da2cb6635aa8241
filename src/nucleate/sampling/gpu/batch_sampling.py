"""Samples rows with equal pipeline signatures by torch operations: any pipeline, on any device.

It never synchronises, and no shape depends on a value, so it can be captured in a CUDA graph. Each row is sorted once.
``make_batch`` prepares everything that does not change between steps. The random numbers are those of
``sampling.noise``, bit for bit: Philox-4x32-10, with 32-bit words stored in int64, because products need 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from nucleate.sampling.gpu.ranked_tokens import (
    BoundStage,
    RankedTokens,
    RowConstants,
    apply_filter,
    bind_stages,
    params_of_stages,
    rank_tokens,
)
from nucleate.sampling.gpu.tensor_shifts import padded
from nucleate.sampling.gpu.torch_device import to_device
from nucleate.sampling.noise import GROUP, GROUP_SIZE, TOKEN, XTC
from nucleate.sampling.signature import PipelineSignature, StageSignature
from nucleate.sampling.stage import SampledToken

LOW = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
LARGEST = 1.0 - 2.0**-53


class PhiloxKeys(NamedTuple):
    """The round keys of the seeds of rows, computed once."""

    rounds: tuple[torch.Tensor, ...]  #: [2, R, 1] each
    multipliers: tuple[torch.Tensor, torch.Tensor]  #: of even and of odd rounds, [2, 1, 1]
    seeds_R: torch.Tensor
    use_triton: bool  #: whether a Triton kernel computes the random numbers


def make_keys(seeds_R: torch.Tensor, *, use_triton: bool = False) -> PhiloxKeys:
    """seeds_R: uint64 as int64."""
    low, high = seeds_R[:, None] & LOW, (seeds_R[:, None] >> 32) & LOW
    rounds = []
    for i in range(ROUNDS):
        both = [(low + i * WEYL[0]) & LOW, (high + i * WEYL[1]) & LOW]
        rounds.append(torch.stack(both[:: 1 if i % 2 else -1]))
    even = torch.tensor(MULTIPLIERS, device=seeds_R.device)[:, None, None]
    return PhiloxKeys(tuple(rounds), (even, even.flip(0)), seeds_R.contiguous(), use_triton)


def words(
    keys: PhiloxKeys, steps_R1: torch.Tensor, stream: int, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first two words of ``noise.philox``, int64 in 0..2**32 - 1. Arguments as in ``uniform``.

    Words 0 and 2 are one tensor, words 3 and 1 another. Each round swaps them, so odd rounds store them reversed.
    """
    index, steps = torch.broadcast_tensors(index, steps_R1)
    even, odd = torch.stack((index, (steps >> 32) & LOW)), torch.stack((torch.full_like(index, stream), steps))
    for i, key in enumerate(keys.rounds):
        product = even * keys.multipliers[i % 2]
        even, odd = ((product >> 32) ^ odd ^ key) & LOW, product.flip(0)
    return even[0], odd[1] & LOW


def uniform(
    keys: PhiloxKeys, steps_R1: torch.Tensor, stream: int, index: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Uniform random numbers in (0, 1), [R, N]. In float64 they are equal to ``noise.uniform``.

    steps_R1: uint64 as int64. stream: a constant of ``noise``. index: int64 [N] or [R, N], token or group ids. In
    float32, for devices without float64, they differ by one or two units in the last place. Small numbers, which decide
    a Gumbel draw, keep their resolution.
    """
    if keys.use_triton:
        from nucleate.sampling.gpu.triton.triton_numbers import launch_uniform  # imports Triton

        return launch_uniform(keys.seeds_R, steps_R1, stream, index)
    w0, w1 = words(keys, steps_R1, stream, index)
    if dtype == torch.float64:
        return ((w0.to(dtype) * 2.0**32 + w1 + 0.5) * 2.0**-64).clamp(max=LARGEST)
    return (w0.to(dtype) * 2.0**-32 + (w1.to(dtype) + 0.5) * 2.0**-64).clamp(max=1.0 - 2.0**-24)


def select_tokens(tokens: RankedTokens, stage: BoundStage, keys: PhiloxKeys, steps_R1: torch.Tensor) -> torch.Tensor:
    """The selected tokens: int64 [R, 1], -1 for invalid rows."""
    constants, uniforms = tokens.constants, stage.signature.kind.uniforms  # type: ignore[attr-defined]
    if uniforms == "one":
        u_R1 = uniform(keys, steps_R1, TOKEN, torch.zeros_like(steps_R1), constants.floats)
        return _inverse_cdf(replace(tokens.resorted(), full_mass_R1=None), stage, u_R1)
    below_RP = tokens.by_id(tokens.below_RN)
    if uniforms == "none":
        best_R1, token_R1 = _argmax_score(stage, below_RP, torch.zeros_like(below_RP))
        return torch.where(best_R1 > -torch.inf, token_R1, constants.no_token)
    mass_RG = below_RP.view(len(below_RP), -1, GROUP_SIZE).logsumexp(2)
    group_R1 = _argmax_score(stage, mass_RG, uniform(keys, steps_R1, GROUP, constants.groups_G, constants.floats))[1]
    ids_RT = constants.token_T.add(group_R1, alpha=GROUP_SIZE)
    u_RT = uniform(keys, steps_R1, TOKEN, ids_RT, constants.floats)
    best_R1, position_R1 = _argmax_score(stage, below_RP.gather(1, ids_RT), u_RT)
    return torch.where(best_R1 > -torch.inf, ids_RT.gather(1, position_R1), constants.no_token)


def _argmax_score(stage: BoundStage, x_RN: torch.Tensor, u_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest score with noise, and its first position. NaN counts as the highest."""
    score_RN = stage.apply("score", x_RN, u_RN)
    if not stage.rules["score"].is_linear:
        score_RN = score_RN.masked_fill(x_RN == -torch.inf, -torch.inf)
    best_R1, position_R1 = score_RN.max(1, keepdim=True)
    return best_R1, position_R1


def _inverse_cdf(tokens: RankedTokens, stage: BoundStage, u_R1: torch.Tensor) -> torch.Tensor:
    """The first token at which the cumulative weight reaches the target."""
    weight, target = (stage.rules[name] for name in ("weight", "target"))
    weight_RN = (
        tokens.weight()
        if weight.is_softmax_weight
        else stage.apply("weight", tokens.below_RN, tokens.stats(weight.row))
    )
    until_RN = torch.where(tokens.surviving(), weight_RN, tokens.constants.zero).cumsum(1)
    target_R1 = stage.apply("target", tokens.stats(target.row), u_R1)
    early_RN = torch.cat((target_R1 > 0, (until_RN < target_R1)[:, :-1]), 1) & tokens.surviving()
    position_R1 = torch.where(early_RN, tokens.constants.position_N, tokens.constants.no_token).amax(1, keepdim=True)
    return torch.where(position_R1 >= 0, tokens.ids_RN.gather(1, position_R1.clamp(min=0)), tokens.constants.no_token)


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
    mask_after_tap_RW: torch.Tensor | None = None  #: applied after a Tap that is the first stage; None without one
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
    if not around:
        return StepResult(tokens_R1[:, 0], None, tapped_RV)
    assert params_RP is not None  # noqa: S101  # given for stateful stages
    logprobs = {
        i: [
            tokens.logprob(tokens_R1) if name in stages[i].signature.logprobs_read else constants.zero
            for name, tokens in zip(("logprob_before", "logprob_after"), span, strict=True)
        ]
        for i, span in around.items()
    }
    tokens_R1, params_RP = _update_state(constants, params_RP, tokens_R1, stages, logprobs)
    return StepResult(tokens_R1[:, 0], params_RP, tapped_RV)


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
    columns = params_of_stages([stage.signature for stage in stages], params_RP)
    for i, before_and_after in logprobs.items():
        columns[i] = stages[i].updated_params(SampledToken(tokens_R1, *before_and_after))
    return torch.cat(columns, 1)
