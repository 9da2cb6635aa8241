"""What rows on a device have said, and what that does to their scores, as plain tensors. Knows no stage.

``special.edits`` is the same as kernels, on the same arrays. A new row is one copy from the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from nucleate.backends.cuda.device import packed
from nucleate.backends.cuda.edits import Edits
from nucleate.backends.cuda.entries import WIDTH, Entries, Found
from nucleate.backends.cuda.lists import Lists, ready
from nucleate.backends.cuda.matches import Matches, lengths_of
from nucleate.backends.cuda.slots import (
    ALLOWED,
    BREAKERS,
    NGRAM,
    NO_TOKEN,
    STEP,
    UNBROKEN,
    WORDS,
    Had,
    Rules,
    Slots,
    last_of,
)
from nucleate.backends.resident import EVERYTHING, Resident


class Far(NamedTuple):
    """A row that looks further back than rings reached when it came."""

    prompt: int
    end: int  #: how many tokens there may be by now
    span: float  #: how far it looks


class Past:
    """Slots with all that belongs to them. size: V; ring: how many tokens of a row are kept, at least."""

    def __init__(self, size: int, device: torch.device, floats: torch.dtype, ring: int) -> None:
        self.device, self.floats = device, floats
        self.slots = Slots(device, floats, ring)
        self.entries = Entries(size, device, floats)
        self.matches = Matches(device)
        self.lists = Lists(device)
        self._far: dict[int, Far] = {}  # by slot

    @property
    def moved(self) -> int:
        """It changes when arrays come to lie elsewhere."""
        return self.slots.moved + self.entries.moved + self.matches.moved + self.lists.moved

    def put(self, row: Resident, seed: int, prompt: list[int], output: list[int]) -> int:
        """A new row: its slot."""
        said, slot = prompt + output, self.slots.take()
        last = last_of(row, said)
        self._widen(slot, row, len(prompt), len(said))
        lists = self.lists.take(row.repeats.breakers if row.repeats else ()), self.lists.take(row.words)
        line_C = self.slots.line(row, seed, len(prompt), len(output), unbroken(row, said), lists)
        block_KC = self.entries.block(row, prompt, output)
        lengths = lengths_of(last) if row.follows else []
        parts = [np.asarray(part, np.int64) for part in (line_C, last, lengths, block_KC.ravel())]
        here = packed(np.concatenate(parts), self.device).split([len(part) for part in parts])
        self.slots.put(slot, here[0], here[1], len(said))
        if row.follows:
            self.matches.put(slot, here[2])
        if row.edits:
            self.entries.room(slot, len(self.slots), row, len(block_KC))
            self.entries.put(slot, here[3].view(-1, WIDTH))
        else:
            self.entries.clear(slot, len(self.slots))
        return slot

    def give_back(self, slot: int, row: Resident) -> None:
        """A row goes. Nothing is copied."""
        self._far.pop(slot, None)
        self.lists.give_back(row.repeats.breakers if row.repeats else ())
        self.lists.give_back(row.words)
        self.slots.give_back(slot)

    def reserve(self, growing: Iterable[int], count: int) -> None:
        """Have room for so many more tokens in each of some slots, which are to come."""
        growing = list(growing)
        if growing:
            self.entries.reserve(growing, count)
        for slot in growing:
            if slot in self._far:
                far = self._far[slot] = self._far[slot]._replace(end=self._far[slot].end + count)
                self.slots.widen(int(min(far.end, far.span)) + 1)
        self._fit()

    def tight(self, growing: Iterable[int], count: int) -> bool:
        """Whether rings must get longer for so many more tokens, if there are as many already as there may be."""
        some = (self._far[slot] for slot in growing if slot in self._far)
        return any(min(far.end + count, far.span) + 1 > self.slots.ring for far in some)

    def told(self, slot: int, output: int) -> None:
        """So many tokens were drawn, no more."""
        if slot in self._far:
            self._far[slot] = self._far[slot]._replace(end=self._far[slot].prompt + output)

    def _widen(self, slot: int, row: Resident, prompt: int, count: int) -> None:
        span = math.inf if row.span == EVERYTHING else row.span
        if span >= self.slots.ring:
            self._far[slot] = Far(prompt, count, span)
        self.slots.widen(int(max(min(count, span), row.longest)) + 1)
        if row.follows:
            self.matches.grow(len(self.slots), self.slots.ring)
        self._fit()

    def _fit(self) -> None:
        """Lengths have the shape of the rings, if there are any."""
        if len(self.matches.lengths_SL):
            self.matches.grow(len(self.slots), self.slots.ring)

    def edits(self, slots_R: torch.Tensor, looks: bool, steps_R: Any = None, rules: Rules | None = None) -> Edits:
        """What the entries of rows do in this step, tokens ascending.

        looks: whether what any row said is looked at. steps_R, rules: those of the rows, if they are known.
        """
        rules = rules or self.slots.rules(slots_R)
        found = self.found(slots_R, rules) if looks else None
        return self.entries.edits(slots_R, self.slots.steps(slots_R) if steps_R is None else steps_R, rules, found)

    def found(self, slots_R: torch.Tensor, rules: Rules) -> Found:
        """What their last tokens mean for their entries."""
        ids_RK = self.entries.ids(slots_R).contiguous()
        said_RL = self.slots.said(slots_R, self.slots.ring)
        reach_RK = banned_RK = spared_RK = torch.zeros_like(ids_RK, dtype=torch.int32)
        if len(self.matches.lengths_SL):
            lengths_RL = self.matches.lengths_SL.index_select(0, slots_R)
            back_L = torch.arange(1, self.slots.ring + 1, device=slots_R.device)
            ends_R1 = (said_RL >= 0).sum(1, keepdim=True)
            unbroken_R1 = self.slots.column(slots_R, UNBROKEN)[:, None]
            window_R1 = torch.where(rules.last < 0, ends_R1, rules.last)
            reach_RL = torch.minimum(lengths_RL, torch.minimum(window_R1 - back_L, unbroken_R1))
            counts_RL = (rules.allowed > 0) & (reach_RL >= rules.allowed)
            reach_RK = highest(ids_RK, said_RL, torch.where(counts_RL, reach_RL, 0))
            again_RL = (rules.ngram > 0) & (lengths_RL >= rules.ngram - 1)
            banned_RK = highest(ids_RK, said_RL, again_RL)
        if len(self.lists.words_FNT):
            spared_RK = highest(ids_RK, self._ready(slots_R, said_RL, BREAKERS), True)
            back_L = torch.arange(1, self.slots.ring + 1, device=slots_R.device)
            output_RL = torch.where(back_L <= self.slots.column(slots_R, STEP)[:, None], said_RL, -1)
            banned_RK = banned_RK | highest(ids_RK, self._ready(slots_R, output_RL, WORDS), True)
        return Found(reach_RK, banned_RK, spared_RK)

    def _ready(self, slots_R: torch.Tensor, said_RL: torch.Tensor, column: int) -> torch.Tensor:
        lists_R = self.slots.column(slots_R, column)
        return ready(self.lists.words_FNT.index_select(0, lists_R.clamp(min=0)), lists_R, said_RL)

    def push(
        self,
        slots_R: torch.Tensor,
        tokens_R: torch.Tensor,
        growing_N: torch.Tensor | None,
        looks: bool,
        had: Had | None = None,
        *,
        windows: bool = True,
    ) -> None:
        """Rows go on with a token each, below 0 for none.

        growing_N: places of those whose entries grow; None: none. had: of the rows, if it is known. windows: whether
        any row counts its last tokens only.
        """
        if growing_N is None:
            self.slots.push(slots_R, tokens_R, had)
            return
        slots_N, tokens_N = (column_R.index_select(0, growing_N) for column_R in (slots_R, tokens_R))
        if looks:
            self._follow(slots_N, tokens_N)
        self.slots.push(slots_R, tokens_R, had)
        self.entries.push(slots_N, tokens_N, self.slots.leaving(slots_N, tokens_N) if windows else None)

    def _follow(self, slots_R: torch.Tensor, tokens_R: torch.Tensor) -> None:
        """What repeats what, before the tokens are there."""
        said_RL = self.slots.said(slots_R, self.slots.ring)
        repeats_R, had_R = self.slots.column(slots_R, ALLOWED) > 0, self.slots.column(slots_R, UNBROKEN)
        if len(self.matches.lengths_SL):
            follows_R = repeats_R | (self.slots.column(slots_R, NGRAM) > 0)
            self.matches.push(slots_R, torch.where(follows_R, tokens_R, NO_TOKEN), said_RL)
        goes_on_R = (tokens_R >= 0) & repeats_R
        unbroken_R = had_R + goes_on_R.to(torch.int64)
        if len(self.lists.words_FNT):
            ended_R = (self._ready(slots_R, said_RL, BREAKERS) == tokens_R[:, None]).any(1)
            unbroken_R = torch.where(ended_R & goes_on_R, 0, unbroken_R)
        self.slots.lines_SC[:, UNBROKEN].index_copy_(0, slots_R, unbroken_R)


def places_of(ids_RK: torch.Tensor, tokens_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where tokens are among ascending ids, int64 [R, N]; and which of them are there."""
    place_RN = torch.searchsorted(ids_RK, tokens_RN.contiguous()).clamp(max=ids_RK.shape[1] - 1)
    return place_RN, (ids_RK.gather(1, place_RN) == tokens_RN) & (tokens_RN >= 0)


def highest(ids_RK: torch.Tensor, tokens_RN: torch.Tensor, values_RN: torch.Tensor | bool) -> torch.Tensor:
    """For each id the highest of the values of these tokens, at least 0: int32 [R, K]. ids_RK: ascending."""
    place_RN, there_RN = places_of(ids_RK, tokens_RN)
    values_RN = torch.where(there_RN, values_RN, 0).to(torch.int32)
    return torch.zeros_like(ids_RK, dtype=torch.int32).scatter_reduce(1, place_RN, values_RN, "amax")


def unbroken(row: Resident, said: list[int]) -> int:
    """How many tokens were said since the last breaker."""
    breakers = {} if row.repeats is None else {*row.repeats.breakers}
    lengths = sorted({*map(len, breakers)})
    for count in range(len(said)):
        end = len(said) - count
        if any(length <= end and tuple(said[end - length : end]) in breakers for length in lengths):
            return count
    return len(said)
