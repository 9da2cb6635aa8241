"""Some rows of a device in the order of a call, with what each step of theirs needs: gathered once. Draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.backends.cuda.device import sent
from nucleate.backends.cuda.report import Wanted
from nucleate.backends.cuda.run import Batch, batch_of
from nucleate.backends.cuda.shifts import Group, groups_of, padded
from nucleate.backends.cuda.slots import SEED, Slots
from nucleate.backends.resident import Resident
from nucleate.backends.structure import chained


@dataclass(slots=True)
class Held:
    """A row on a device."""

    slot: int
    row: Resident
    prompt: int  #: how many tokens it has,
    known: int  #: and how many of its output the host knows
    allowed_W: NDArray[np.int32] | None  #: packed


@dataclass(slots=True)
class Part:
    """Some rows, in the order of a call. It is of no use once one of them is gone."""

    rows: list[int]  #: their numbers
    held: list[Held]
    slots_R: torch.Tensor
    allowed_RW: torch.Tensor | None  #: int32, packed
    groups: list[Group]  #: by the Shifts that rows begin with
    told: list[int]  #: places of rows that want logprobs of the logits,
    told_N: torch.Tensor  #: the same
    wanted: list[Wanted]  #: what these want, or else the Tap of each row among the stages,
    asked_NA: torch.Tensor  #: and the ids among it, -1 for none
    cuts: bool  #: whether any of the rows that kernels draw have top-k or top-p,
    brief: bool  #: and nothing is to be told but of the tokens drawn, which kernels do
    batch: Batch | None  #: where tensors draw; None: kernels do
    kinds: list[tuple[list[int], torch.Tensor, Part]]  #: rows of several structures: places of each, and these alone


def part_of(numbers: Sequence[int], held: Sequence[Held], slots: Slots, size: int, *, kernels: bool) -> Part:
    """Rows by their numbers, as they are held. size: V; kernels: whether they draw the chain."""
    device, rows = slots.device, [one.row for one in held]
    where = [one.slot for one in held]
    slots_R, kinds = sent(where, device), _kinds(numbers, held, slots, size, kernels=kernels)
    staged, batch = [row.staged for row in rows if row.staged], None
    if rows and not kinds and (staged or not kernels):
        staged_rows = staged or chained([row.numbers for row in rows])
        batch = batch_of(staged_rows, slots.column(slots_R, SEED), size, slots.floats, kernel=kernels)
    told = [place for place, row in enumerate(rows) if row.wanted is not None]
    wanted = [row.wanted for row in rows if row.wanted is not None]
    if not told and not kinds:
        wanted = [one.wanted for one in staged if one.wanted is not None]
    groups = groups_of([row.shifts for row in rows], where, size, slots.floats, device)
    cuts = any(row.numbers[2] > 0 or row.numbers[4] < 1 for row in rows)
    plain = kernels and not staged and not groups
    brief = bool(told) and plain and all(one == (0, ()) for one in wanted)
    return Part(
        list(numbers), list(held), slots_R, _allowed(held, size, device), groups, told, sent(told, device), wanted,
        sent(padded([asked for _, asked in wanted], -1), device), cuts, brief, batch, kinds,
    )  # fmt: skip


def _kinds(
    numbers: Sequence[int], held: Sequence[Held], slots: Slots, size: int, *, kernels: bool
) -> list[tuple[list[int], torch.Tensor, Part]]:
    """The rows of a call by their structures; none where all have the same."""
    found: dict[object, list[int]] = {}
    for place, one in enumerate(held):
        staged = one.row.staged
        found.setdefault(staged and (staged.steps, staged.masked, staged.wanted is None), []).append(place)
    if len(found) < 2:
        return []
    made = []
    for places in found.values():
        some = [numbers[place] for place in places], [held[place] for place in places]
        made.append((places, sent(places, slots.device), part_of(*some, slots, size, kernels=kernels)))
    return made


def _allowed(held: Sequence[Held], size: int, device: torch.device) -> torch.Tensor | None:
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
