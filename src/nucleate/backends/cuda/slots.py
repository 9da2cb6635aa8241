"""The rows on a device: a line of numbers per slot, and the last tokens of each in a ring. Knows no stage.

A row keeps its slot until it goes, so that nothing moves when others come and go.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nucleate.backends.cuda.bits import as_bits, as_floats, signed
from nucleate.backends.cuda.device import sent
from nucleate.backends.cuda.entries import NO_TOKEN, Rules
from nucleate.backends.cuda.resident import Resident

NUMBERS = 7
SEED, STEP, OFFSET, WINDOW, RULES, COLUMNS = 7, 8, 9, 10, 11, 14
"""Of a line: numbers; the seed; how many tokens were drawn; how many were said before these; the window of penalties or
-1; three rules of penalties."""


class Slots:
    """Lines and rings by slot, ``ring`` tokens each. ``moved`` counts how often they have come to lie elsewhere."""

    def __init__(self, device: torch.device, floats: torch.dtype, ring: int) -> None:
        self.moved = 0
        self.ring = ring
        self._floats = floats
        self._lines_SC = torch.zeros((0, COLUMNS), dtype=torch.int64, device=device)
        self._ring_SL = torch.zeros((0, ring), dtype=torch.int32, device=device)
        self._free: list[int] = []

    def __len__(self) -> int:
        """How many slots there are, free ones too."""
        return len(self._lines_SC)

    def take(self, row: Resident, seed: int, prompt: Sequence[int], output: Sequence[int]) -> int:
        """A slot for a new row: one small copy, and one of the tokens that its penalties may lose again."""
        if not self._free:
            self._grow(max(4, 2 * len(self)))
        slot = self._free.pop()
        rules, window = row.penalties, row.penalties.window
        counted = window if rules.counts and window is not None and window >= 0 else -1
        line_C = np.concatenate((
            as_bits(row.numbers, self._floats), signed([seed]), [len(output), len(prompt), counted],
            as_bits(rules[:3], self._floats),
        ))  # fmt: skip
        self._lines_SC[slot] = sent(line_C, self._lines_SC.device)
        if counted > 0 and (last := [*prompt, *output][-counted:]):
            end = len(prompt) + len(output)
            places = [place % self.ring for place in range(end - len(last), end)]
            places_N, last_N = sent([places, last], self._lines_SC.device)
            self._ring_SL[slot].index_copy_(0, places_N, last_N.to(torch.int32))
        return slot

    def give_back(self, slot: int) -> None:
        """A row has gone. What is in its slot is of no account."""
        self._free.append(slot)

    def _grow(self, count: int) -> None:
        had = len(self)
        for name in ("_lines_SC", "_ring_SL"):
            old = getattr(self, name)
            grown = torch.zeros((count, old.shape[1]), dtype=old.dtype, device=old.device)
            grown[:had] = old
            setattr(self, name, grown)
        self._free = [*range(count - 1, had - 1, -1)]
        self.moved += 1

    def numbers(self, slots_R: torch.Tensor) -> torch.Tensor:
        """See ``plan.Numbers``: [R, 7]."""
        return as_floats(self._lines_SC.index_select(0, slots_R)[:, :NUMBERS].contiguous(), self._floats)

    def rules(self, slots_R: torch.Tensor) -> Rules:
        bits_R3 = self._lines_SC.index_select(0, slots_R)[:, RULES:].contiguous()
        return Rules(*as_floats(bits_R3, self._floats)[:, :, None].unbind(1))

    def seeds(self, slots_R: torch.Tensor) -> torch.Tensor:
        return self._lines_SC[:, SEED].index_select(0, slots_R)

    def steps(self, slots_R: torch.Tensor) -> torch.Tensor:
        return self._lines_SC[:, STEP].index_select(0, slots_R)

    def push(self, slots_R: torch.Tensor, tokens_R: torch.Tensor) -> None:
        """Slots go on with a token each; below 0 there is none, and they stay as they are."""
        ends_R = self._ends(slots_R)
        places_R = slots_R * self.ring + ends_R % self.ring  # of those that stay, a place that is not read
        self._ring_SL.view(-1).index_copy_(0, places_R, tokens_R.to(torch.int32))
        self._lines_SC[:, STEP].index_add_(0, slots_R, (tokens_R >= 0).to(torch.int64))

    def leaving(self, slots_R: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        """After ``push``: the tokens that left the windows by it, int64 [R]; NO_TOKEN where none did."""
        windows_R = self._lines_SC[:, WINDOW].index_select(0, slots_R)
        places_R = self._ends(slots_R) - 1 - windows_R
        left_R = self._ring_SL.view(-1).index_select(0, slots_R * self.ring + places_R % self.ring).to(torch.int64)
        return torch.where((windows_R >= 0) & (places_R >= 0) & (tokens_R >= 0), left_R, NO_TOKEN)

    def _ends(self, slots_R: torch.Tensor) -> torch.Tensor:
        lines_RC = self._lines_SC.index_select(0, slots_R)
        return lines_RC[:, STEP] + lines_RC[:, OFFSET]

    def since(self, slots: Sequence[int], steps: Sequence[int], count: int) -> list[list[int]]:
        """The tokens drawn from some steps on, ``count`` at most. Waits for the device."""
        device = self._lines_SC.device
        slots_R, steps_R = sent([slots, steps], device)
        lines_RC = self._lines_SC.index_select(0, slots_R)
        places_RN = (lines_RC[:, OFFSET] + steps_R)[:, None] + torch.arange(count, device=device)
        tokens_RN = self._ring_SL.view(-1)[slots_R[:, None] * self.ring + places_RN % self.ring].to(torch.int64)
        found = torch.cat((lines_RC[:, STEP, None] - steps_R[:, None], tokens_RN), 1).tolist()
        return [tokens[:new] for new, *tokens in found]
