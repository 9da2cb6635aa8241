"""The rows of a call, grouped for sampling, and their logprobs. What does not change between steps is prepared once.

Logprobs and ranks of a few tokens of each row are computed on the device, equal to ``token_logprobs``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.outputs import StepLogprobs, TokenLogprob
from nucleate.sampling.gpu.batch_sampling import TensorBatch, make_batch
from nucleate.sampling.gpu.tensor_shifts import ShiftGroup, groups_of, padded
from nucleate.sampling.gpu.torch_device import SEED, Slots, to_device
from nucleate.sampling.inputs import RowId
from nucleate.sampling.signature import DeviceRowSpec, fused_signatures

LogprobsRequest = tuple[int, tuple[int, ...]]
"""(number of most likely tokens, token ids), see ``Tap.request``."""


class TensorLogprobs(NamedTuple):
    """Logprobs per row on the device, [R, N]: the sampled token, the requested ids, the most likely tokens."""

    ids_RN: torch.Tensor  #: int64; -1 for padding and for rows without a token
    logprobs_RN: torch.Tensor
    ranks_RN: torch.Tensor  #: int64


def compute_logprobs(
    x_RV: torch.Tensor, tokens_R: torch.Tensor, requested_RA: torch.Tensor, top: int, floats: torch.dtype
) -> TensorLogprobs:
    """Logprobs and ranks of a few tokens per row, without synchronising.

    x_RV: scores, float32 or float64, -inf for masked tokens. tokens_R: the sampled tokens, -1 for none. requested_RA:
    int64, further token ids, padded with -1. top: the number of most likely tokens. floats: dtype of the logprobs.
    """
    x_RV = torch.where(x_RV == 0, 0.0, x_RV)  # -0.0 becomes 0.0
    given_ids_RN = torch.cat((tokens_R[:, None], requested_RA), 1)
    given_x_RN = x_RV.gather(1, given_ids_RN.clamp(min=0))
    id_V = torch.arange(x_RV.shape[1], device=x_RV.device)
    ranks = [
        ((x_RV > x_R1) | ((x_RV == x_R1) & (id_V < id_R1))).sum(1, keepdim=True) + 1
        for x_R1, id_R1 in zip(given_x_RN.split(1, 1), given_ids_RN.split(1, 1), strict=True)
    ]
    num_top = min(top, x_RV.shape[1])
    best_RN = x_RV.argsort(dim=1, descending=True, stable=True)[:, :num_top] if num_top else given_ids_RN[:, :0]
    best_x_RN = x_RV.gather(1, best_RN)
    ids_RN, x_RN = torch.cat((given_ids_RN, best_RN), 1), torch.cat((given_x_RN, best_x_RN), 1).to(floats)
    nth_RN = torch.arange(1, num_top + 1, device=x_RV.device).expand(len(x_RV), -1)
    below_RV = x_RV.to(floats) - x_RV.amax(1, keepdim=True).to(floats)
    logprobs_RN = x_RN - x_RV.amax(1, keepdim=True).to(floats) - below_RV.exp().sum(1, keepdim=True).log()
    return TensorLogprobs(ids_RN, logprobs_RN, torch.cat((*ranks, nth_RN), 1))


def to_step_logprobs(report: TensorLogprobs, requests: Sequence[LogprobsRequest]) -> list[StepLogprobs | None]:
    """Copy logprobs to the host: one StepLogprobs per row, None for a row without a token. Synchronises."""
    ids_RN, logprobs_RN, ranks_RN = (column.tolist() for column in report)
    max_requested = max((len(requested) for _, requested in requests), default=0)
    steps: list[StepLogprobs | None] = []
    for (top, requested), ids, logprobs, ranks in zip(requests, ids_RN, logprobs_RN, ranks_RN, strict=True):
        entries = [
            TokenLogprob(token, logprob, rank) if logprob > -np.inf else TokenLogprob(token, -np.inf, None)
            for token, logprob, rank in zip(ids, logprobs, ranks, strict=True)
        ]
        best = [one for one in entries[1 + max_requested : 1 + max_requested + top] if one.rank is not None]
        step = StepLogprobs(entries[0], tuple(best), tuple(entries[1 : 1 + len(requested)]))
        steps.append(step if ids[0] >= 0 else None)
    return steps


MAX_GROUP_SCORES = 1 << 24
"""The maximum number of scores that tensor code processes at once: a dozen temporaries of 128 MB each."""


@dataclass(slots=True)
class DeviceRow:
    """A row on a device."""

    slot: int  #: its index in ``Slots``
    spec: DeviceRowSpec
    prompt_length: int  #: tokens of the prompt
    host_output_length: int  #: output tokens that have been copied to the host
    allowed_mask_W: NDArray[np.int32] | None  #: bitmask of ``DeviceRowSpec.allowed_ids``


class RowGroup(NamedTuple):
    """Rows of a call that are sampled together: by tensor code, with equal signatures, or by the Triton kernels."""

    positions: Sequence[int]  #: of the rows in the call
    positions_N: torch.Tensor | None  #: the same as a tensor; None: all rows of the call, in order
    slots_R: torch.Tensor
    allowed_RW: torch.Tensor | None  #: int32, bitmask of ``DeviceRowSpec.allowed_ids``; None: all
    shift_groups: list[ShiftGroup]  #: the rows with leading Shifts
    batch: TensorBatch | None  #: for tensor code; None: the Triton kernels sample these rows
    truncates: bool  #: whether any row has top-k or top-p
    kernel_logprobs: bool  #: whether the kernels compute logprobs: only those of sampled tokens are requested
    requests: list[LogprobsRequest]  #: of the Taps after the Shifts
    requested_NA: torch.Tensor  #: their token ids, padded with -1


class BatchView(NamedTuple):
    """The rows of a call, in its order. Invalid after one of them has been removed."""

    row_numbers: list[RowId]  #: the row numbers of ``Sampler``
    rows: list[DeviceRow]
    slots_R: torch.Tensor
    groups: list[RowGroup]
    reporting: list[int]  #: positions of the rows that report raw logprobs
    reporting_N: torch.Tensor  #: the same as a tensor
    requests: list[LogprobsRequest]  #: of these rows
    requested_NA: torch.Tensor  #: their token ids, padded with -1


def make_view(
    numbers: Sequence[RowId], rows: Sequence[DeviceRow], slots: Slots, size: int, *, use_triton: bool
) -> BatchView:
    """Prepare rows for calls in this order. numbers: of the rows. size: V. use_triton: for the fused pipeline."""
    by_signature: dict[Any, list[int]] = {}
    for position, row in enumerate(rows):
        own = row.spec.signature
        key = own and (own.signatures, own.mask_before_tap, own.request is None)
        by_signature.setdefault(key, []).append(position)
    parts: list[Sequence[int]] = []
    for key, positions in by_signature.items():
        max_rows = max(1, MAX_GROUP_SCORES // size) if key or not use_triton else len(positions)
        parts += [positions[start : start + max_rows] for start in range(0, len(positions), max_rows)]
    if len(parts) == 1:
        parts = [range(len(rows))]
    groups = [_make_group(positions, rows, slots, size, use_triton=use_triton) for positions in parts]
    reporting = [position for position, row in enumerate(rows) if row.spec.request is not None]
    requests = [row.spec.request for row in rows if row.spec.request is not None]
    slots_R = to_device([row.slot for row in rows], slots.device)
    reporting_N = to_device(reporting, slots.device)
    requested_NA = _requested_ids(requests, slots.device)
    return BatchView([*numbers], [*rows], slots_R, groups, reporting, reporting_N, requests, requested_NA)


def _make_group(
    positions: Sequence[int], call_rows: Sequence[DeviceRow], slots: Slots, size: int, *, use_triton: bool
) -> RowGroup:
    device, rows = slots.device, [call_rows[position] for position in positions]
    slot_list, specs, covers_call = [row.slot for row in rows], [row.spec for row in rows], len(rows) == len(call_rows)
    slots_R, batch = to_device(slot_list, device), None
    signatures = [spec.signature for spec in specs if spec.signature]
    if signatures or not use_triton:
        row_signatures = signatures or fused_signatures([spec.params for spec in specs])
        seeds_R = slots.gather_column(slots_R, SEED)
        batch = make_batch(row_signatures, seeds_R, size, slots.floats, use_triton=use_triton)
    shift_groups = groups_of([spec.shifts for spec in specs], slot_list, size, slots.floats, device)
    truncates = any(spec.params[2] > 0 or spec.params[4] < 1 for spec in specs)
    requested = {spec.request for spec in specs}
    sampled_only = requested <= {None, (0, ())} and (0, ()) in requested
    kernel_logprobs = batch is None and not shift_groups and covers_call and sampled_only
    requests = [one.request for one in signatures if one.request is not None]
    positions_N = None if covers_call else to_device([*positions], device)
    return RowGroup(
        positions, positions_N, slots_R, _allowed_masks(rows, size, device), shift_groups,
        batch, truncates, kernel_logprobs, requests, _requested_ids(requests, device),
    )  # fmt: skip


def _requested_ids(requests: Sequence[LogprobsRequest], device: torch.device) -> torch.Tensor:
    return to_device(padded([requested for _, requested in requests], -1), device)


def _allowed_masks(rows: Sequence[DeviceRow], size: int, device: torch.device) -> torch.Tensor | None:
    if all(one.allowed_mask_W is None for one in rows):
        return None
    all_W = np.full(-(-size // 32), -1, np.int32)
    return to_device(np.stack([all_W if one.allowed_mask_W is None else one.allowed_mask_W for one in rows]), device)
