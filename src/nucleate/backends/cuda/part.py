"""Some rows of a device in the order of a call, with what each step of theirs needs: gathered once. Draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.backends.cuda.apply import Group, groups_of
from nucleate.backends.cuda.device import sent
from nucleate.backends.cuda.past import Past
from nucleate.backends.cuda.report import Wanted
from nucleate.backends.cuda.run import Batch, batch_of, padded
from nucleate.backends.cuda.slots import Rules
from nucleate.backends.resident import Resident
from nucleate.backends.structure import chained


@dataclass(slots=True)
class Held:
    """A row on a device."""

    slot: int
    row: Resident
    known: int  #: how many tokens of its output the host knows
    allowed_W: NDArray[np.int32] | None  #: packed


@dataclass(slots=True)
class Part:
    """Some rows, in the order of a call. It is of no use once one of them is gone."""

    rows: list[int]  #: their numbers
    slots_R: torch.Tensor
    seeds_R: torch.Tensor
    offsets_R: torch.Tensor  #: see ``slots.Had``
    allowed_RW: torch.Tensor | None  #: int32, packed
    edits: bool  #: whether any row has entries,
    fixed: bool  #: which do the same in each step,
    looks: bool  #: or depend on the order of what any row has said
    ordered: list[Group]  #: rows whose Shifts come one after the other
    growing: list[int]  #: slots of rows whose entries grow
    growing_N: torch.Tensor | None  #: places of these, if there are any
    windows: bool  #: whether any row counts its last tokens only
    rules: Rules | None  #: where any row has entries
    told: list[int]  #: places of rows that want logprobs of the logits,
    told_N: torch.Tensor  #: the same
    wanted: list[Wanted]  #: what these want, or else the Tap of each row among the stages,
    asked_NA: torch.Tensor  #: and the ids among it, -1 for none
    numbers_RC: torch.Tensor | None  #: where kernels draw, see ``chain.Numbers``
    cuts: bool  #: whether any of these have top-k or top-p,
    brief: bool  #: and nothing is to be told but of the tokens drawn, which kernels do
    batch: Batch | None  #: where tensors draw
    kinds: list[tuple[list[int], torch.Tensor, Part]]  #: rows of several structures: places of each, and these alone
    steps_R: torch.Tensor | None = None  #: as of the last call, see ``Rows``
    kept: list[Any] = field(default_factory=list)  #: what fixed entries do, from the first step on


def part_of(numbers: Sequence[int], held: Sequence[Held], past: Past, size: int, *, kernels: bool) -> Part:
    """Rows by their numbers, as they are held. past: of these rows; size: V; kernels: whether they draw the chain."""
    device, slots = past.device, [one.slot for one in held]
    rows, slots_R = [one.row for one in held], sent(slots, device)
    kinds = _kinds(numbers, held, past, size, kernels=kernels)
    staged, batch = [row.staged for row in rows if row.staged], None
    seeds_R = past.slots.seeds(slots_R)
    if rows and not kinds and (staged or not kernels):
        staged_rows = staged or chained([row.numbers for row in rows])
        batch = batch_of(staged_rows, seeds_R, size, past.floats, kernel=kernels)
    growing = [place for place, row in enumerate(rows) if row.grows]
    told = [place for place, row in enumerate(rows) if row.wanted is not None]
    wanted = [row.wanted for row in rows if row.wanted is not None]
    if not told and not kinds:
        wanted = [one.wanted for one in staged if one.wanted is not None]
    return Part(
        list(numbers),
        slots_R,
        seeds_R,
        past.slots.offsets(slots_R),
        _allowed(held, size, device),
        any(row.edits for row in rows),
        all(row.fixed for row in rows),
        any(row.looks for row in rows),
        groups_of([row.ordered for row in rows], slots, past.floats, device),
        [slots[place] for place in growing],
        sent(growing, device) if growing else None,
        any(row.penalties.window is not None and row.penalties.window >= 0 for row in rows),
        past.slots.rules(slots_R) if any(row.edits for row in rows) else None,
        told,
        sent(told, device),
        wanted,
        sent(padded([asked for _, asked in wanted], -1), device),
        past.slots.numbers(slots_R) if kernels and not staged else None,
        any(row.numbers[2] > 0 or row.numbers[4] < 1 for row in rows),
        bool(told) and kernels and not staged and all(one == (0, ()) for one in wanted),
        batch,
        kinds,
    )


def _kinds(
    numbers: Sequence[int], held: Sequence[Held], past: Past, size: int, *, kernels: bool
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
        made.append((places, sent(places, past.device), part_of(*some, past, size, kernels=kernels)))
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
