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

from nucleate.backends.cuda.bits import as_bits, as_floats
from nucleate.backends.cuda.device import sent
from nucleate.backends.cuda.edits import Edits
from nucleate.backends.cuda.resident import Resident

ID, BEFORE, UNTIL, OUTPUT, PROMPT = range(5)
"""Columns: a token, or the size of the vocabulary; bits of what is added; the step at which a ban ends; how often it is
in the output; in the prompt."""

NO_TOKEN = -2
"""Neither one that was drawn, nor one that was not."""
SPARE = 64
"""So many tokens may come before entries need more room."""


class Rules(NamedTuple):
    """Penalties of rows, [R, 1] each, see ``resident.Penalties``."""

    scale: torch.Tensor
    each: torch.Tensor
    once: torch.Tensor


class Entries:
    """Room for entries of slots; it is made when the first row asks for some, and grows.

    floats: the type of what is computed with. ``moved`` counts how often the arrays have come to lie elsewhere.
    """

    def __init__(self, size: int, device: torch.device, floats: torch.dtype) -> None:
        self.moved = 0
        self._size, self._device, self._floats = size, device, floats
        self._state_SKC = torch.empty((0, 0, 5), dtype=torch.int64, device=device)
        self._most: dict[int, int] = {}  # entries that a slot may have by now

    def put(self, slot: int, slots: int, row: Resident, prompt: list[int], output: list[int]) -> None:
        """The entries of a new row. slots: how many there are."""
        block_KC = self._block(row, prompt, output)
        spare = SPARE if row.penalties.counts else 0
        self._grow(slots, min(len(block_KC) + spare, self._size))
        state_KC = self._state_SKC[slot]
        state_KC.zero_()
        state_KC[:, ID] = self._size
        state_KC[: len(block_KC)] = sent(block_KC, self._device)
        self._most[slot] = len(block_KC)

    def clear(self, slot: int, slots: int) -> None:
        """The same of one that has none."""
        if len(self._state_SKC):
            self._grow(slots, 0)
        if self._most.pop(slot, 0):
            self._state_SKC[slot, :, ID] = self._size

    def reserve(self, slots: Iterable[int], count: int) -> None:
        """Have room for so many more tokens in each of some slots, which are to come."""
        most = 0
        for slot in slots:
            self._most[slot] += count
            most = max(most, self._most[slot])
        self._grow(len(self._state_SKC), min(most, self._size))

    def _block(self, row: Resident, prompt: list[int], output: list[int]) -> NDArray[np.int64]:
        """A line per token, in ascending order."""
        counts = row.penalties.counts
        said = prompt + output if row.penalties.window is not None else output
        if row.penalties.window is not None and row.penalties.window >= 0:
            said = said[max(0, len(said) - row.penalties.window) :]
        before = {} if row.penalties.window is not None or not counts else dict.fromkeys(prompt, 1)
        ids = np.array(sorted({*row.before, *row.until, *before, *(said if counts else ())}), np.int64)
        block_KC = np.zeros((len(ids), 5), np.int64)
        block_KC[:, ID] = ids
        places = {int(token): place for place, token in enumerate(ids)}
        for column, values in ((UNTIL, row.until), (PROMPT, before)):
            block_KC[[places[token] for token in values], column] = list(values.values())
        block_KC[[places[token] for token in row.before], BEFORE] = as_bits([*row.before.values()], self._floats)
        if counts:
            np.add.at(block_KC, ([places[token] for token in said], OUTPUT), 1)
        return block_KC

    def _grow(self, slots: int, count: int) -> None:
        had, room = self._state_SKC.shape[:2]
        if slots <= had and count <= room:
            return
        room = max(room, min(self._size, 1 << (count - 1).bit_length()) if count else 0)
        grown = torch.zeros((max(slots, had), room, 5), dtype=torch.int64, device=self._device)
        grown[:, :, ID] = self._size
        grown[:had, : self._state_SKC.shape[1]] = self._state_SKC
        self._state_SKC = grown
        self.moved += 1

    def edits(self, slots_R: torch.Tensor, steps_R: torch.Tensor, rules: Rules) -> Edits:
        """What the entries do in this step, tokens ascending; those at the size of the vocabulary are none."""
        ids_RK, before_RK, until_RK, output_RK, prompt_RK = self._state_SKC.index_select(0, slots_R).unbind(2)
        before_RK = as_floats(before_RK.contiguous(), self._floats)
        before_RK = torch.where(steps_R[:, None] < until_RK, -torch.inf, before_RK)
        scale_RK = torch.where(output_RK + prompt_RK > 0, rules.scale, 1.0)
        after_RK = torch.where(output_RK > 0, rules.each * output_RK.to(self._floats) + rules.once, 0.0)
        return Edits(ids_RK, before_RK, scale_RK, after_RK)

    def push(self, slots_R: torch.Tensor, tokens_R: torch.Tensor, leaving_R: torch.Tensor) -> None:
        """Slots go on with a token each, below 0 for none, and lose one from what they count, NO_TOKEN for none."""
        state_RKC, token_R1 = self._state_SKC.index_select(0, slots_R), tokens_R[:, None]
        place_R1 = (state_RKC[:, :, ID] < token_R1).sum(1, keepdim=True)
        place_K = torch.arange(state_RKC.shape[1], device=tokens_R.device)
        here_RK = (place_K == place_R1) & (token_R1 >= 0)
        known_R1 = (state_RKC[:, :, ID] == token_R1).any(1, keepdim=True) | (token_R1 < 0)
        behind_RK = (place_K > place_R1) & ~known_R1
        state_RKC = torch.where(behind_RK[:, :, None], state_RKC.roll(1, 1), state_RKC)
        fresh_RKC = torch.nn.functional.pad(token_R1[:, :, None], (0, 4))
        state_RKC = torch.where((here_RK & ~known_R1)[:, :, None], fresh_RKC, state_RKC)
        gone_RK = (state_RKC[:, :, ID] == leaving_R[:, None]).to(torch.int64)
        state_RKC[:, :, OUTPUT] += here_RK.to(torch.int64) - gone_RK
        self._state_SKC.index_copy_(0, slots_R, state_RKC)
