"""The state of rows on a device: a line of numbers per slot, the state of stages, and the last tokens in a ring buffer.

A row keeps its slot until it is removed, so nothing moves when other rows are added or removed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.sampling.backends.torch.torch_device import packed, sent
from nucleate.sampling.suffix_automaton import repeats

SEED, STEP, OFFSET, UNBROKEN, COLUMNS = range(7, 12)
"""Of a line, after its seven numbers: the seed; how many tokens were drawn; how many came before these; how many
since the last sequence that no repeat crosses."""


class Slots:
    """Lines and rings by slot. ``moved`` counts how often they have come to lie elsewhere.

    ring: how many of its last tokens each row keeps. ``learned_SP``: the numbers of stages that learn. ``repeats_SL``
    says of each distance d, from 1, how many tokens before the one d places back equal the last ones: the twin of
    ``suffix_automaton``, for rows that follow repeats.
    """

    def __init__(self, device: torch.device, floats: torch.dtype, ring: int) -> None:
        self.device, self.floats, self.ring, self.moved = device, floats, ring, 0
        self.lines_SC = torch.zeros((0, COLUMNS), dtype=torch.int64, device=device)
        self.columns = self.lines_SC.unbind(1)  # views
        self.ring_SL = torch.zeros((0, ring), dtype=torch.int64, device=device)
        self.learned_SP = torch.zeros((0, 0), dtype=floats, device=device)
        self.repeats_SL = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self._free: list[int] = []

    def put(self, line: NDArray[np.int64], said: list[int], end: int, *, follows: bool) -> int:
        """A new row, in one copy from the host: its slot.

        line: see ``line_of``. said: the tokens that it depends on, of which rings must hold enough, see ``widen``. end:
        how many it has in all. follows: whether the row needs ``repeats_SL``.
        """
        if not self._free:
            self._grow(max(4, 2 * len(self.lines_SC)))
        slot, said = self._free.pop(), said[max(0, len(said) - self.ring) :]
        lengths = repeats(said)[::-1] if follows else []
        parts = [np.asarray(part, np.int64) for part in (line, said, lengths)]
        line_C, said_L, lengths_L = packed(np.concatenate(parts), self.device).split([len(part) for part in parts])
        self.lines_SC[slot] = line_C
        if said:
            self.ring_SL[slot, : len(said)] = said_L
            self.ring_SL[slot] = self.ring_SL[slot].roll((end - len(said)) % self.ring)
        if follows:
            if not len(self.repeats_SL):
                self.repeats_SL = torch.zeros_like(self.ring_SL, dtype=torch.int32)
                self.moved += 1
            self.repeats_SL[slot] = 0
            self.repeats_SL[slot, : len(said)] = lengths_L
        return slot

    def learn(self, slot: int, numbers: Sequence[float]) -> None:
        """The stages of a row have these numbers as of its next step."""
        more = len(numbers) - self.learned_SP.shape[1]
        if more > 0:
            self.learned_SP, self.moved = torch.nn.functional.pad(self.learned_SP, (0, more)), self.moved + 1
        self.learned_SP[slot, : len(numbers)] = sent(torch.tensor(numbers, dtype=self.floats), self.device)

    def give_back(self, slot: int) -> None:
        """A row has gone. What is in its slot does not matter."""
        self._free.append(slot)

    def widen(self, count: int) -> None:
        """Keep at least so many of the last tokens of each row from now on."""
        if count <= self.ring:
            return
        ring = 1 << (count - 1).bit_length()
        ends_S1 = self.ends(torch.arange(len(self.lines_SC), device=self.device))[:, None]
        back_SL = (ends_S1 - 1 - torch.arange(ring, device=self.device)) % ring  # from the last token
        place_SL = (ends_S1 - 1 - back_SL) % self.ring
        self.ring_SL = torch.where(back_SL < self.ring, self.ring_SL.gather(1, place_SL), 0)
        more = ring - self.ring
        self.repeats_SL = torch.nn.functional.pad(self.repeats_SL, (0, more if len(self.repeats_SL) else 0))
        self.ring, self.moved = ring, self.moved + 1

    def _grow(self, count: int) -> None:
        had = len(self.lines_SC)
        for name in ("lines_SC", "ring_SL", "learned_SP", "repeats_SL"):
            old = getattr(self, name)
            if len(old) or name != "repeats_SL":
                setattr(self, name, torch.nn.functional.pad(old, (0, 0, 0, count - had)))
        self.columns = self.lines_SC.unbind(1)
        self._free = [*range(count - 1, had - 1, -1)]
        self.moved += 1

    def column(self, slots_R: torch.Tensor, column: int) -> torch.Tensor:
        """One of the integers of lines: [R]."""
        return self.columns[column].index_select(0, slots_R)

    def ends(self, slots_R: torch.Tensor) -> torch.Tensor:
        """How many tokens rows have, those of the prompt too: [R]."""
        return self.column(slots_R, STEP) + self.column(slots_R, OFFSET)

    def said(self, slots_R: torch.Tensor) -> torch.Tensor:
        """The last tokens, the last one first: int64 [R, ring]; -1 before the first one."""
        ends_R1 = self.ends(slots_R)[:, None]
        back_L = torch.arange(1, self.ring + 1, device=self.device)
        said_RL = self.ring_SL.index_select(0, slots_R).gather(1, (ends_R1 - back_L) % self.ring)
        return torch.where(back_L <= ends_R1, said_RL, -1)

    def push(self, slots_R: torch.Tensor, tokens_R: torch.Tensor, steps_R: torch.Tensor | None = None) -> None:
        """Rows go on with a token each; below 0 there is none, and what is written is not counted.

        steps_R: how many tokens were drawn, if that is known.
        """
        steps_R = self.column(slots_R, STEP) if steps_R is None else steps_R
        places_R = (steps_R + self.column(slots_R, OFFSET)) % self.ring
        self.ring_SL.index_put_((slots_R, places_R), tokens_R)
        self.columns[STEP].index_copy_(0, slots_R, steps_R + (tokens_R >= 0))

    def since(self, slots: Sequence[int], steps: Sequence[int], count: int) -> list[list[int]]:
        """The tokens drawn from some steps on, ``count`` at most. Waits for the device."""
        slots_R, steps_R = sent([slots, steps], self.device)
        lines_RC = self.lines_SC.index_select(0, slots_R)
        places_RN = (lines_RC[:, OFFSET] + steps_R)[:, None] + torch.arange(count, device=self.device)
        tokens_RN = self.ring_SL.index_select(0, slots_R).gather(1, places_RN % self.ring)
        found = torch.cat((lines_RC[:, STEP, None] - steps_R[:, None], tokens_RN), 1).tolist()
        return [tokens[:new] for new, *tokens in found]


def line_of(
    numbers: Sequence[float], floats: torch.dtype, seed: int, prompt: int, output: int, unbroken: int
) -> NDArray[np.int64]:
    """The line of a row. seed: 0..2**64 - 1. prompt, output: how many tokens."""
    words = np.array([seed], np.uint64).view(np.int64)
    return np.concatenate((as_bits(numbers, floats), words, [output, prompt, unbroken]))


def as_bits(numbers: Sequence[float], floats: torch.dtype) -> NDArray[np.int64]:
    """Floats as the integers of their bits."""
    column = np.asarray(numbers, np.float64)
    if floats == torch.float64:
        return column.view(np.int64)
    with np.errstate(over="ignore"):
        return column.astype(np.float32).view(np.int32).astype(np.int64)
