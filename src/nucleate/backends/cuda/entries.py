"""The tokens whose scores change, per slot: sorted, counted, kept up to date on the device. Knows no stage.

A slot has an entry for each token that is biased, banned or counted. Each step may add one, without a word from the
host: what is behind its place moves on by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.backends.cuda.edits import Edits
from nucleate.backends.cuda.slots import Rules, as_bits, as_floats
from nucleate.backends.resident import Resident

ID, BEFORE, UNTIL, OUTPUT, PROMPT, LATE = range(6)
"""Columns: a token, or the size of the vocabulary; bits of what is added; the step at which a ban ends; how often it is
in the output; in the prompt; bits of what is added after the penalties."""
WIDTH = 6

SPARE = 64
"""So many tokens may come before entries need more room."""
EXPONENT = 24
"""Bits of the longest repeat."""


class Found(NamedTuple):
    """What the last tokens of rows mean for their entries in a step, int32 [R, K] each."""

    reach_RK: torch.Tensor  #: the longest repeat that the token goes on, if it is one that counts; else 0
    banned_RK: torch.Tensor  #: 1: it would end an n-gram or a word that is not to be
    spared_RK: torch.Tensor  #: 1: it would end a breaker


class Entries:
    """Room for entries of slots; it is made when the first row asks for some, and grows.

    floats: the type of what is computed with. ``moved`` counts how often the arrays have come to lie elsewhere.
    """

    def __init__(self, size: int, device: torch.device, floats: torch.dtype) -> None:
        self.moved = 0
        self.size, self._device, self._floats = size, device, floats
        self.state_SKC = torch.empty((0, 0, WIDTH), dtype=torch.int64, device=device)
        self._most: dict[int, int] = {}  # entries that a slot may have by now

    def room(self, slot: int, slots: int, row: Resident, count: int) -> None:
        """Have room for a new row with so many entries. slots: how many there are."""
        self._grow(slots, min(count + (SPARE if row.grows else 0), self.size))
        self._most[slot] = count

    def put(self, slot: int, block_KC: torch.Tensor) -> None:
        """The entries of a new row, on the device."""
        state_KC = self.state_SKC[slot]
        state_KC.zero_()
        state_KC[:, ID] = self.size
        state_KC[: len(block_KC)] = block_KC

    def clear(self, slot: int, slots: int) -> None:
        """The same of one that has none."""
        if len(self.state_SKC):
            self._grow(slots, 0)
        if self._most.pop(slot, 0):
            self.state_SKC[slot, :, ID] = self.size

    def reserve(self, slots: Iterable[int], count: int) -> None:
        """Have room for so many more tokens in each of some slots, which are to come."""
        most = 0
        for slot in slots:
            self._most[slot] += count
            most = max(most, self._most[slot])
        self._grow(len(self.state_SKC), min(most, self.size))

    def block(self, row: Resident, prompt: list[int], output: list[int]) -> NDArray[np.int64]:
        """A line per token, in ascending order: of a new row, on the host."""
        counts, window = row.penalties.counts, row.penalties.window
        said = prompt + output if window is not None else output
        if window is not None and window >= 0:
            said = said[max(0, len(said) - window) :]
        before = {} if window is not None or not counts else dict.fromkeys(prompt, 1)
        counted = said if counts else []
        every = prompt + output if row.follows or any(one.counts for one in row.ordered) else []
        more = [*(word[-1] for word in row.words), *(token for one in row.ordered for token in one.listing)]
        ids = np.array(sorted({*row.before, *row.until, *row.late, *before, *counted, *every, *more}), np.int64)
        block_KC = np.zeros((len(ids), WIDTH), np.int64)
        block_KC[:, ID] = ids
        places = {int(token): place for place, token in enumerate(ids)}
        for column, values in ((UNTIL, row.until), (PROMPT, before)):
            block_KC[[places[token] for token in values], column] = list(values.values())
        for column, numbers in ((BEFORE, row.before), (LATE, row.late)):
            block_KC[[places[token] for token in numbers], column] = as_bits([*numbers.values()], self._floats)
        np.add.at(block_KC, ([places[token] for token in counted], OUTPUT), 1)
        return block_KC

    def _grow(self, slots: int, count: int) -> None:
        had, room = self.state_SKC.shape[:2]
        if slots <= had and count <= room:
            return
        room = max(room, min(self.size, 1 << (count - 1).bit_length()) if count else 0)
        grown = torch.zeros((max(slots, had), room, WIDTH), dtype=torch.int64, device=self._device)
        grown[:, :, ID] = self.size
        grown[:had, : self.state_SKC.shape[1]] = self.state_SKC
        self.state_SKC = grown
        self.moved += 1

    def ids(self, slots_R: torch.Tensor) -> torch.Tensor:
        """The tokens, ascending: int64 [R, K]; at the size of the vocabulary there is none."""
        return self.state_SKC[:, :, ID].index_select(0, slots_R)

    def edits(self, slots_R: torch.Tensor, steps_R: torch.Tensor, rules: Rules, found: Found | None) -> Edits:
        """What the entries do in this step, tokens ascending; those at the size of the vocabulary are none."""
        state_RKC = self.state_SKC.index_select(0, slots_R)
        ids_RK, _, until_RK, output_RK, prompt_RK, _ = state_RKC.unbind(2)
        _, before_RK, *_, late_RK = as_floats(state_RKC, self._floats).unbind(2)
        banned_RK = steps_R[:, None] < until_RK
        scale_RK = torch.where(output_RK + prompt_RK > 0, rules.scale, 1.0)
        after_RK = torch.where(output_RK > 0, rules.each * output_RK + rules.once, 0.0) - late_RK
        if found is not None:
            banned_RK = banned_RK | (found.banned_RK > 0)
            after_RK = after_RK + repeated(found, rules)
        return Edits(ids_RK, torch.where(banned_RK, -torch.inf, before_RK), scale_RK, after_RK)

    def push(self, slots_R: torch.Tensor, tokens_R: torch.Tensor, leaving_R: torch.Tensor | None) -> None:
        """Slots go on with a token each, below 0 for none, and lose one from what they count; None: none of them."""
        state_RKC, token_R1 = self.state_SKC.index_select(0, slots_R), tokens_R[:, None]
        ids_RK, place_K = state_RKC[:, :, ID], torch.arange(state_RKC.shape[1], device=tokens_R.device)
        place_R1 = (ids_RK < token_R1).sum(1, keepdim=True)
        here_RK = (place_K == place_R1) & (token_R1 >= 0)
        known_R1 = (ids_RK == token_R1).any(1, keepdim=True) | (token_R1 < 0)
        behind_RK1, fresh_RK1 = (((place_K > place_R1) & ~known_R1)[:, :, None], (here_RK & ~known_R1)[:, :, None])
        fresh_R1C = torch.nn.functional.pad(token_R1[:, :, None], (0, WIDTH - 1))
        state_RKC = torch.where(behind_RK1, state_RKC.roll(1, 1), state_RKC)
        state_RKC = torch.where(fresh_RK1, fresh_R1C, state_RKC)
        output_RK = state_RKC[:, :, OUTPUT].add_(here_RK)
        if leaving_R is not None:
            output_RK.sub_((state_RKC[:, :, ID] == leaving_R[:, None]).to(torch.int64))
        self.state_SKC.index_copy_(0, slots_R, state_RKC)


def repeated(found: Found, rules: Rules) -> torch.Tensor:
    """What is subtracted from tokens that go on a repeat, see ``resident.Repeats``: [R, K]."""
    over_RK = found.reach_RK.to(torch.int64) - rules.allowed
    power_RK, square_R1 = torch.ones_like(over_RK, dtype=rules.base.dtype), rules.base
    for bit in range(EXPONENT):  # by squaring, so that the kernel has the same bits
        power_RK = torch.where((over_RK >> bit) & 1 == 1, power_RK * square_R1, power_RK)
        square_R1 = square_R1 * square_R1
    penalty_RK = torch.where(over_RK < rules.room, torch.minimum(rules.factor * power_RK, rules.most), rules.most)
    return torch.where((found.reach_RK > 0) & (found.spared_RK == 0), penalty_RK, 0.0)
