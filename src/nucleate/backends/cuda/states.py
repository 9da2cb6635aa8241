"""The numbers of stages that learn, by slot: they lie on the device. Knows no rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nucleate.backends.cuda.bind import mines
from nucleate.backends.cuda.device import sent
from nucleate.backends.cuda.run import next_numbers
from nucleate.backends.structure import Staged


class States:
    """Numbers of rows. ``moved`` counts how often they have come to lie elsewhere."""

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
        given = torch.tensor(numbers, dtype=self._numbers_SP.dtype)
        self._numbers_SP[slot, : len(numbers)] = sent(given, self._numbers_SP.device)

    def numbers(self, slots_R: torch.Tensor) -> torch.Tensor:
        """As of this step: [R, P]."""
        return self._numbers_SP.index_select(0, slots_R)

    def learn(self, slots_R: torch.Tensor, numbers_RP: torch.Tensor) -> None:
        """Rows have these numbers from now on."""
        self._numbers_SP.index_copy_(0, slots_R, numbers_RP)

    def push(self, staged: Staged, slots_R: torch.Tensor, tokens_R: torch.Tensor) -> None:
        """A row goes on with a token that could be no other: its chance was 1."""
        numbers_RP = self.numbers(slots_R)
        sure_R1 = torch.zeros_like(numbers_RP[:, :1])
        chances = {place: [sure_R1, sure_R1] for place, step in enumerate(staged.steps) if step.learns}
        stages = mines(staged.steps, numbers_RP)
        self.learn(slots_R, next_numbers(numbers_RP, tokens_R[:, None], stages, chances))

    def told(self, slots: Sequence[int]) -> list[list[float]]:
        """The numbers of rows, on the host. Waits for the device."""
        found: list[list[float]] = self.numbers(sent(list(slots), self._numbers_SP.device)).tolist()
        return found
