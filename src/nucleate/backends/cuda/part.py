"""Some rows of a device in the order of a call, with what each step of theirs needs: gathered once. Draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.backends.cuda.apply import Group as Shifted
from nucleate.backends.cuda.apply import groups_of
from nucleate.backends.cuda.device import sent
from nucleate.backends.cuda.past import Past
from nucleate.backends.cuda.report import Wanted
from nucleate.backends.cuda.resident import Resident
from nucleate.backends.cuda.staged.groups import Group, group_of, structure_of


@dataclass(slots=True)
class Held:
    """A row on a device."""

    slot: int
    row: Resident
    known: int  #: how many tokens of its output the host knows
    allowed_W: NDArray[np.int32] | None  #: packed


class Part(NamedTuple):
    """Some rows, in the order of a call. It is of no use once one of them is gone."""

    rows: list[int]
    slots: list[int]
    slots_R: torch.Tensor
    numbers_RC: torch.Tensor
    seeds_R: torch.Tensor
    allowed_RW: torch.Tensor | None  #: int32, packed
    edits: bool  #: whether any row has entries,
    fixed: bool  #: which do the same in each step;
    kept: list[Any]  #: then what they do, from the first one on
    looks: bool  #: whether what any row has said is looked at in its order
    ordered: list[Shifted]  #: rows whose Shifts come one after the other
    growing: list[int]  #: slots of rows whose entries grow
    growing_N: torch.Tensor | None  #: places of these, if there are any
    told: list[int]  #: places of rows with logprobs,
    told_N: torch.Tensor  #: the same,
    wanted: list[Wanted]  #: what these want,
    asked_NA: torch.Tensor  #: and the ids among it, -1 for none
    group: Group | None  #: what rows of one structure share; None for the chain,
    parts: list[
        tuple[list[int], torch.Tensor, Part]
    ]  #: and where some differ: the places of each kind, and these alone


def part_of(numbers: Sequence[int], held: Sequence[Held], past: Past, size: int) -> Part:
    """Rows by their numbers, as they are held. past: of these rows; size: V."""
    device = past.device
    rows, slots = [one.row for one in held], [one.slot for one in held]
    slots_R = sent(slots, device)
    staged, parts = [row.staged for row in rows if row.staged], _parts(numbers, held, past, size)
    growing = [place for place, row in enumerate(rows) if row.grows]
    told = [place for place, row in enumerate(rows) if row.wanted is not None]
    wanted = [row.wanted for row in rows if row.wanted is not None]
    most = max((len(asked) for _, asked in wanted), default=0)
    asked_NA = sent([[*asked, *[-1] * (most - len(asked))] for _, asked in wanted], device)
    return Part(
        list(numbers),
        slots,
        slots_R,
        past.slots.numbers(slots_R),
        past.slots.seeds(slots_R),
        _allowed(held, size, device),
        any(row.edits for row in rows),
        all(row.fixed for row in rows),
        [],
        any(row.looks for row in rows),
        groups_of([row.ordered for row in rows], slots, past.floats, device),
        [slots[place] for place in growing],
        sent(growing, device) if growing else None,
        told,
        sent(told, device),
        wanted,
        asked_NA.reshape(len(told), most),
        group_of(staged, device) if staged and not parts else None,
        parts,
    )


def _parts(
    numbers: Sequence[int], held: Sequence[Held], past: Past, size: int
) -> list[tuple[list[int], torch.Tensor, Part]]:
    """The rows of a call by their structures; none where all have the same."""
    kinds: dict[object, list[int]] = {}
    for place, one in enumerate(held):
        kinds.setdefault(structure_of(one.row.staged), []).append(place)
    if len(kinds) < 2:
        return []
    return [
        (
            places,
            sent(places, past.device),
            part_of([numbers[place] for place in places], [held[place] for place in places], past, size),
        )
        for places in kinds.values()
    ]


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
