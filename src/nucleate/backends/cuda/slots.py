"""The rows on a device: a line of numbers per slot, and the last tokens of each in a ring. Knows no stage.

A row keeps its slot until it goes, so that nothing moves when others come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.backends.cuda.device import sent
from nucleate.backends.resident import EVERYTHING, Repeats, Resident

NUMBERS = 7
SEED, STEP, OFFSET, WINDOW, GROWS = range(7, 12)
"""Of a line, after its numbers: the seed; how many tokens were drawn; how many were said before these; the window of
penalties or -1; whether what is said becomes an entry."""
SCALE, EACH, ONCE, FACTOR, BASE, MOST = range(12, 18)
"""Bits of floats: see ``resident.Penalties`` and ``resident.Repeats``, as the next."""
ROOM, ALLOWED, LAST, UNBROKEN, NGRAM, BREAKERS, WORDS = range(18, 25)
"""Integers. How many tokens were said since the last breaker; the lists of breakers and words, -1 for none."""
COLUMNS = 25

NO_TOKEN = -2
"""Neither one that was drawn, nor one that was not."""

NOTHING = Repeats(0.0, 1.0, 0.0, 0, 0, 0, ())


class Rules(NamedTuple):
    """What the edits of rows take from their lines, [R, 1] each."""

    scale: torch.Tensor
    each: torch.Tensor
    once: torch.Tensor
    factor: torch.Tensor
    base: torch.Tensor
    most: torch.Tensor
    room: torch.Tensor  #: int64, as the next
    allowed: torch.Tensor
    last: torch.Tensor
    ngram: torch.Tensor


class Had(NamedTuple):
    """How many tokens rows have, [R] each."""

    steps_R: torch.Tensor  #: drawn
    offsets_R: torch.Tensor  #: said before these


class Slots:
    """Lines and rings by slot, ``ring`` tokens each, of which the oldest may be none.

    ``moved`` counts how often they have come to lie elsewhere.
    """

    def __init__(self, device: torch.device, floats: torch.dtype, ring: int) -> None:
        self.moved = 0
        self.ring = ring
        self._floats = floats
        self.lines_SC = torch.zeros((0, COLUMNS), dtype=torch.int64, device=device)
        self.steps_S = self.offsets_S = self.lines_SC[:, STEP]  # views
        self.ring_SL = torch.zeros((0, ring), dtype=torch.int32, device=device)
        self._free: list[int] = []

    def __len__(self) -> int:
        """How many slots there are, free ones too."""
        return len(self.lines_SC)

    def take(self) -> int:
        """A slot for a new row."""
        if not self._free:
            self._grow(max(4, 2 * len(self)))
        return self._free.pop()

    def line(
        self, row: Resident, seed: int, prompt: int, output: int, unbroken: int, lists: tuple[int, int]
    ) -> NDArray[np.int64]:
        """The line of a row. prompt, output: how many tokens; lists: its breakers and words, see ``Lists``."""
        rules, repeats = row.penalties, row.repeats or NOTHING
        window = rules.window if rules.counts and rules.window is not None and rules.window >= 0 else -1
        return np.concatenate((
            as_bits(row.numbers, self._floats), signed([seed]), [output, prompt, window, row.grows],
            as_bits((*rules[:3], *repeats[:3]), self._floats), repeats[3:6], [unbroken, row.ngram, *lists],
        ))  # fmt: skip

    def put(self, slot: int, line_C: torch.Tensor, last: torch.Tensor, end: int) -> None:
        """A row's line, and the last of the ``end`` tokens it has said; both are on the device."""
        self.lines_SC[slot] = line_C
        start = (end - len(last)) % self.ring
        until = min(self.ring - start, len(last))
        ring_L = self.ring_SL[slot]
        if len(last):
            ring_L[start : start + until] = last[:until]
        if until < len(last):
            ring_L[: len(last) - until] = last[until:]

    def give_back(self, slot: int) -> None:
        """A row has gone. What is in its slot is of no account."""
        self._free.append(slot)

    def _grow(self, count: int) -> None:
        had = len(self)
        for name in ("lines_SC", "ring_SL"):
            old = getattr(self, name)
            grown = torch.zeros((count, old.shape[1]), dtype=old.dtype, device=old.device)
            grown[:had] = old
            setattr(self, name, grown)
        self.steps_S, self.offsets_S = self.lines_SC[:, STEP], self.lines_SC[:, OFFSET]
        self._free = [*range(count - 1, had - 1, -1)]
        self.moved += 1

    def widen(self, count: int) -> None:
        """Keep at least so many of the last tokens of each row from now on."""
        if count <= self.ring:
            return
        ring = 1 << (count - 1).bit_length()
        slots_S = torch.arange(len(self), device=self.lines_SC.device)
        ends_S1 = self._ends(slots_S)[:, None]
        back_SL = (ends_S1 - 1 - torch.arange(ring, device=slots_S.device)) % ring  # from the last token
        place_SL = (ends_S1 - 1 - back_SL) % self.ring
        self.ring_SL = torch.where(back_SL < self.ring, self.ring_SL.gather(1, place_SL), 0)
        self.ring = ring
        self.moved += 1

    def numbers(self, slots_R: torch.Tensor) -> torch.Tensor:
        """See ``chain.Numbers``: [R, 7]."""
        return as_floats(self.lines_SC.index_select(0, slots_R)[:, :NUMBERS].contiguous(), self._floats)

    def rules(self, slots_R: torch.Tensor) -> Rules:
        lines_RC1 = self.lines_SC.index_select(0, slots_R)[:, :, None]
        floats_RC1 = as_floats(lines_RC1[:, SCALE : MOST + 1].contiguous(), self._floats)
        return Rules(*floats_RC1.unbind(1), *(lines_RC1[:, i] for i in (ROOM, ALLOWED, LAST, NGRAM)))

    def column(self, slots_R: torch.Tensor, column: int) -> torch.Tensor:
        """One of the integers of lines: [R]."""
        return self.lines_SC[:, column].index_select(0, slots_R)

    def seeds(self, slots_R: torch.Tensor) -> torch.Tensor:
        return self.column(slots_R, SEED)

    def steps(self, slots_R: torch.Tensor) -> torch.Tensor:
        return self.steps_S.index_select(0, slots_R)

    def offsets(self, slots_R: torch.Tensor) -> torch.Tensor:
        return self.offsets_S.index_select(0, slots_R)

    def said(self, slots_R: torch.Tensor, count: int) -> torch.Tensor:
        """The last tokens, the last one first: int64 [R, count]; -1 before the first one."""
        ends_R1 = self._ends(slots_R)[:, None]
        back_L = torch.arange(1, count + 1, device=slots_R.device)
        places_RL = slots_R[:, None] * self.ring + (ends_R1 - back_L) % self.ring
        said_RL = self.ring_SL.view(-1)[places_RL].to(torch.int64)
        return torch.where(back_L <= ends_R1, said_RL, -1)

    def push(self, slots_R: torch.Tensor, tokens_R: torch.Tensor, had: Had | None = None) -> None:
        """Slots go on with a token each; below 0 there is none, and what is written is not counted."""
        steps_R, offsets_R = had or (self.steps(slots_R), self.offsets(slots_R))
        places_R = (steps_R + offsets_R) % self.ring
        self.ring_SL.index_put_((slots_R, places_R), tokens_R.to(torch.int32))
        self.steps_S.index_copy_(0, slots_R, steps_R + (tokens_R >= 0))

    def leaving(self, slots_R: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        """After ``push``: the tokens that left the windows by it, int64 [R]; NO_TOKEN where none did."""
        windows_R = self.column(slots_R, WINDOW)
        places_R = self._ends(slots_R) - 1 - windows_R
        left_R = self.ring_SL.view(-1).index_select(0, slots_R * self.ring + places_R % self.ring).to(torch.int64)
        return torch.where((windows_R >= 0) & (places_R >= 0) & (tokens_R >= 0), left_R, NO_TOKEN)

    def _ends(self, slots_R: torch.Tensor) -> torch.Tensor:
        return self.steps(slots_R) + self.offsets(slots_R)

    def since(self, slots: Sequence[int], steps: Sequence[int], count: int) -> list[list[int]]:
        """The tokens drawn from some steps on, ``count`` at most. Waits for the device."""
        device = self.lines_SC.device
        slots_R, steps_R = sent([slots, steps], device)
        lines_RC = self.lines_SC.index_select(0, slots_R)
        places_RN = (lines_RC[:, OFFSET] + steps_R)[:, None] + torch.arange(count, device=device)
        tokens_RN = self.ring_SL.view(-1)[slots_R[:, None] * self.ring + places_RN % self.ring].to(torch.int64)
        found = torch.cat((lines_RC[:, STEP, None] - steps_R[:, None], tokens_RN), 1).tolist()
        return [tokens[:new] for new, *tokens in found]


def last_of(row: Resident, said: list[int]) -> list[int]:
    """The tokens that a new row brings along: as many as its steps may look at."""
    return said if row.span == EVERYTHING else said[max(0, len(said) - max(row.span, row.longest)) :]


def signed(words: Any) -> NDArray[np.int64]:
    """Integers in 0..2**64 - 1 as int64 of the same bits."""
    return np.asarray(words, np.uint64).view(np.int64)


def as_bits(numbers: Sequence[float], floats: torch.dtype) -> NDArray[np.int64]:
    """Floats as the integers of their bits."""
    column = np.asarray(numbers, np.float64)
    if floats == torch.float64:
        return column.view(np.int64)
    with np.errstate(over="ignore"):
        return column.astype(np.float32).view(np.int32).astype(np.int64)


def as_floats(bits: torch.Tensor, floats: torch.dtype) -> torch.Tensor:
    """The inverse, on the device."""
    return bits.view(floats) if floats == torch.float64 else bits.to(torch.int32).view(floats)
