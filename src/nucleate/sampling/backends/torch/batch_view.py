"""The rows of one call in its order, with everything a step needs, gathered once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.sampling.backends.torch.batch_sampling import TensorBatch, batch_of
from nucleate.sampling.backends.torch.slots import SEED, Slots
from nucleate.sampling.backends.torch.tensor_logprobs import Wanted
from nucleate.sampling.backends.torch.tensor_shifts import ShiftGroup, groups_of, padded
from nucleate.sampling.backends.torch.torch_device import sent
from nucleate.sampling.dispatch.device_row import DeviceRowSpec
from nucleate.sampling.dispatch.signature import chained

AT_ONCE = 1 << 24
"""So many scores are looked at together by tensors: a dozen arrays of 128 MB are made of them."""


@dataclass(slots=True)
class DeviceRow:
    """A row on a device."""

    slot: int
    row: DeviceRowSpec
    prompt: int  #: how many tokens it has,
    known: int  #: and how many of its output the host knows
    allowed_W: NDArray[np.int32] | None  #: packed


class RowGroup(NamedTuple):
    """Rows of a call that are drawn together: they have the same structure, or run through the kernels."""

    places: Sequence[int]  #: of the rows in the call,
    places_N: torch.Tensor | None  #: the same; None: they are all of it
    slots_R: torch.Tensor
    allowed_RW: torch.Tensor | None  #: int32, packed
    groups: list[ShiftGroup]  #: by the Shifts that rows begin with
    batch: TensorBatch | None  #: where tensors draw; None: kernels do
    cuts: bool  #: whether any of the rows that kernels draw have top-k or top-p,
    brief: bool  #: and nothing is to be told but of the tokens drawn, which kernels do
    wanted: list[Wanted]  #: the Tap of each row among the stages,
    requested_NA: torch.Tensor  #: and the ids among it, -1 for none


class BatchView(NamedTuple):
    """Some rows, in the order of a call. It is of no use once one of them is gone."""

    rows: list[int]  #: their numbers
    held: list[DeviceRow]
    slots_R: torch.Tensor
    kinds: list[RowGroup]
    reporting: list[int]  #: places of rows that want logprobs of the logits,
    reporting_N: torch.Tensor  #: the same
    wanted: list[Wanted]  #: what these want,
    requested_NA: torch.Tensor  #: and the ids among it, -1 for none


def part_of(numbers: Sequence[int], held: Sequence[DeviceRow], slots: Slots, size: int, *, kernels: bool) -> BatchView:
    """Rows by their numbers, as they are held. size: V; kernels: whether they draw the chain."""
    found: dict[Any, list[int]] = {}
    for place, one in enumerate(held):
        staged = one.row.staged
        found.setdefault(staged and (staged.steps, staged.masked, staged.wanted is None), []).append(place)
    some: list[Sequence[int]] = []
    for structure, places in found.items():
        most = max(1, AT_ONCE // size) if structure or not kernels else len(places)
        some += [places[start : start + most] for start in range(0, len(places), most)]
    whole = [range(len(held))] if len(some) == 1 else some
    kinds = [_kind(places, held, slots, size, kernels=kernels) for places in whole]
    reporting = [place for place, one in enumerate(held) if one.row.wanted is not None]
    wanted = [one.row.wanted for one in held if one.row.wanted is not None]
    where = sent([one.slot for one in held], slots.device)
    return BatchView(
        [*numbers],
        [*held],
        where,
        kinds,
        reporting,
        sent(reporting, slots.device),
        wanted,
        _requested(wanted, slots.device),
    )


def _kind(places: Sequence[int], every: Sequence[DeviceRow], slots: Slots, size: int, *, kernels: bool) -> RowGroup:
    device, held = slots.device, [every[place] for place in places]
    where, rows = [one.slot for one in held], [one.row for one in held]
    slots_R, staged, batch = sent(where, device), [row.staged for row in rows if row.staged], None
    if staged or not kernels:
        some = staged or chained([row.numbers for row in rows])
        batch = batch_of(some, slots.column(slots_R, SEED), size, slots.floats, kernel=kernels)
    groups = groups_of([row.shifts for row in rows], where, size, slots.floats, device)
    cuts = any(row.numbers[2] > 0 or row.numbers[4] < 1 for row in rows)
    brief = batch is None and not groups and len(held) == len(every) and {row.wanted for row in rows} <= {None, (0, ())}
    wanted = [one.wanted for one in staged if one.wanted is not None]
    return RowGroup(
        places, None if len(held) == len(every) else sent([*places], device), slots_R, _allowed(held, size, device),
        groups, batch, cuts, brief and any(row.wanted for row in rows), wanted, _requested(wanted, device),
    )  # fmt: skip


def _requested(wanted: Sequence[Wanted], device: torch.device) -> torch.Tensor:
    return sent(padded([requested for _, requested in wanted], -1), device)


def _allowed(held: Sequence[DeviceRow], size: int, device: torch.device) -> torch.Tensor | None:
    if all(one.allowed_W is None for one in held):
        return None
    words_RW = np.full((len(held), -(-size // 32)), -1, np.int32)
    for one, words_W in zip(held, words_RW, strict=True):
        if one.allowed_W is not None:
            words_W[:] = one.allowed_W
    return sent(words_RW, device)


def allowed_words(allowed: frozenset[int] | None, size: int) -> NDArray[np.int32] | None:
    """The only token ids that a row may draw, as a bitmask; None for all."""
    if allowed is None:
        return None
    bits = np.zeros(-(-size // 32) * 32, bool)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
