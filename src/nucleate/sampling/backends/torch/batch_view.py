"""The rows of a call, grouped for sampling. Everything that does not change between steps is prepared once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.sampling.backends.torch.batch_sampling import TensorBatch, make_batch
from nucleate.sampling.backends.torch.slots import SEED, Slots
from nucleate.sampling.backends.torch.tensor_logprobs import LogprobsRequest
from nucleate.sampling.backends.torch.tensor_shifts import ShiftGroup, groups_of, padded
from nucleate.sampling.backends.torch.torch_device import to_device
from nucleate.sampling.dispatch.device_row import DeviceRowSpec
from nucleate.sampling.dispatch.signature import fused_signatures

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

    row_numbers: list[int]  #: the row numbers of ``Sampler``
    rows: list[DeviceRow]
    slots_R: torch.Tensor
    groups: list[RowGroup]
    reporting: list[int]  #: positions of the rows that report raw logprobs
    reporting_N: torch.Tensor  #: the same as a tensor
    requests: list[LogprobsRequest]  #: of these rows
    requested_NA: torch.Tensor  #: their token ids, padded with -1


def make_view(
    numbers: Sequence[int], rows: Sequence[DeviceRow], slots: Slots, size: int, *, use_triton: bool
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
    words_RW = np.full((len(rows), -(-size // 32)), -1, np.int32)
    for one, words_W in zip(rows, words_RW, strict=True):
        if one.allowed_mask_W is not None:
            words_W[:] = one.allowed_mask_W
    return to_device(words_RW, device)


def pack_allowed_ids(allowed: frozenset[int] | None, size: int) -> NDArray[np.int32] | None:
    """Pack token ids into a bitmask, int32 [V / 32], lowest bit first; None stays None."""
    if allowed is None:
        return None
    bits = np.zeros(-(-size // 32) * 32, bool)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
