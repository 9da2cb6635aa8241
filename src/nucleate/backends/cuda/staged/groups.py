"""Rows of one structure in a call, and their numbers by slot, which lie on the device. Knows no rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nucleate.backends.cuda.device import sent
from nucleate.backends.cuda.report import Report, Wanted, reported
from nucleate.backends.cuda.staged.bind import mines
from nucleate.backends.cuda.staged.run import Drawing, Outcome, next_numbers
from nucleate.backends.cuda.staged.structure import Staged, Step

NEVER = -1
"""No token."""


class Group(NamedTuple):
    """What the rows of a structure share, and their lists."""

    steps: tuple[Step, ...]
    masked: bool
    learns: bool
    no_kernel: str  #: see ``Staged``
    spared: tuple[torch.Tensor, ...]  #: of each Ceiling, int64 [R, K], ``NEVER`` where there is none
    wanted: list[Wanted]  #: what each row's Tap wants; none without one
    asked_RA: torch.Tensor  #: the ids among it


class Heard(NamedTuple):
    """What the Taps of some rows of a call were told."""

    places: Sequence[int]  #: of the rows
    report: Report
    wanted: list[Wanted]


def structure_of(staged: Staged | None) -> object:
    """What is equal for rows that are drawn in one go."""
    return None if staged is None else (staged.steps, staged.masked, staged.wanted is None)


def group_of(rows: list[Staged], device: torch.device) -> Group:
    """Rows of one structure."""
    one = rows[0]
    spared = [[row.spared[i] for row in rows] for i in range(len(one.spared))]
    wanted = [row.wanted for row in rows if row.wanted is not None]
    asked = [ids for _, ids in wanted]
    return Group(
        one.steps,
        one.masked,
        one.learns,
        one.no_kernel,
        tuple(_padded(lists, device) for lists in spared),
        wanted,
        _padded(asked, device),
    )


def _padded(lists: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    most = max(map(len, lists), default=0)
    made = sent([[*ids, *[NEVER] * (most - len(ids))] for ids in lists], device)
    return made.reshape(len(lists), most)


def heard_of(group: Group, places: Sequence[int], outcome: Outcome, tokens_R: torch.Tensor) -> Heard:
    """What the Taps of rows are told."""
    assert outcome.told_RV is not None  # noqa: S101  # there is a Tap
    made = reported(outcome.told_RV, tokens_R, group.asked_RA, max(top for top, _ in group.wanted))
    return Heard(places, made, group.wanted)


class States:
    """The numbers of rows by slot. ``moved`` counts how often they have come to lie elsewhere."""

    def __init__(self, device: torch.device, floats: torch.dtype) -> None:
        self.moved = 0
        self._numbers_SP = torch.zeros((0, 0), dtype=floats, device=device)

    def put(self, slot: int, numbers: Sequence[float]) -> None:
        """Those of a row; more than there is room for make room."""
        slots, count = self._numbers_SP.shape
        if slot >= slots or len(numbers) > count:
            shape = max(slots, 1 << slot.bit_length()), max(count, len(numbers))
            grown_SP = self._numbers_SP.new_zeros(shape)
            grown_SP[:slots, :count] = self._numbers_SP
            self._numbers_SP, self.moved = grown_SP, self.moved + 1
        if numbers:
            given = torch.tensor(numbers, dtype=self._numbers_SP.dtype)
            self._numbers_SP[slot, : len(numbers)] = sent(given, self._numbers_SP.device)

    def drawing(self, group: Group, slots_R: torch.Tensor, seeds_R: torch.Tensor, steps_R: torch.Tensor) -> Drawing:
        """Rows as they are in this step."""
        return Drawing(group.steps, self._numbers_SP.index_select(0, slots_R), group.spared, seeds_R, steps_R)

    def learn(self, slots_R: torch.Tensor, tokens_R: torch.Tensor, numbers_RP: torch.Tensor) -> None:
        """Rows with a token have new numbers."""
        old_RP = self._numbers_SP.index_select(0, slots_R)
        self._numbers_SP.index_copy_(0, slots_R, torch.where(tokens_R[:, None] >= 0, numbers_RP, old_RP))

    def push(self, staged: Staged, slot: int, slots_R: torch.Tensor, tokens_R: torch.Tensor) -> None:
        """A row goes on with a token that could be no other: its chance was 1."""
        numbers_RP = self._numbers_SP[slot : slot + 1]
        sure_R1 = torch.zeros_like(numbers_RP[:, :1])
        stages = mines(staged.steps, numbers_RP)
        chances = {place: [sure_R1, sure_R1] for place, step in enumerate(staged.steps) if step.learns}
        self.learn(slots_R, tokens_R, next_numbers(numbers_RP, tokens_R, stages, chances))

    def told(self, slots: Sequence[int]) -> list[list[float]]:
        """The numbers of rows, on the host. Waits for the device."""
        found: list[list[float]] = self._numbers_SP.index_select(0, sent(list(slots), self._numbers_SP.device)).tolist()
        return found
