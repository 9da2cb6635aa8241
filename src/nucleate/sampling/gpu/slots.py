"""The state of rows on a device: parameters and counters, the state of stages, and a ring buffer of the last tokens.

A row keeps its slot until it is removed, so nothing moves when other rows are added or removed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.sampling.gpu.torch_device import to_device, to_device_pinned
from nucleate.sampling.suffix_automaton import repeat_lengths

SEED, STEP, PROMPT_LENGTH, SINCE_BREAKER, COLUMNS = range(7, 12)
"""Columns of the row state after the seven FusedParams: seed, number of output tokens, length of the prompt, number of
tokens since the last DRY sequence breaker. COLUMNS is their number."""


class Slots:
    """Device buffers of S slots. ``reallocations`` counts how often buffers have been replaced by larger ones.

    - ``state_SC``: int64, the row state, see ``pack_row_state``.
    - ``tokens_SL``: int64, ring buffers of the last ``ring_size`` tokens; token i is at i % ring_size.
    - ``stage_params_SP``: the numeric parameters of pipelines with stateful stages.
    - ``repeat_lengths_SL``: int32, for the token at each distance from the end, how many tokens directly before it
      equal the last tokens of the sequence. For DRY and n-gram bans; equal to ``suffix_automaton.repeat_lengths``.
    """

    def __init__(self, device: torch.device, floats: torch.dtype, ring_size: int) -> None:
        self.device, self.floats, self.ring_size, self.reallocations = device, floats, ring_size, 0
        self.state_SC = torch.zeros((0, COLUMNS), dtype=torch.int64, device=device)
        self.columns = self.state_SC.unbind(1)  # views
        self.tokens_SL = torch.zeros((0, ring_size), dtype=torch.int64, device=device)
        self.stage_params_SP = torch.zeros((0, 0), dtype=floats, device=device)
        self.repeat_lengths_SL = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self._free: list[int] = []

    def add(self, state: NDArray[np.int64], last_tokens: list[int], length: int, *, tracks_repeats: bool) -> int:
        """Add a row with one copy from the host; returns its slot.

        state: see ``pack_row_state``. last_tokens: those that its stages read; see ``ensure_ring_size``. length: the
        number of all its tokens. tracks_repeats: whether it needs ``repeat_lengths_SL``.
        """
        if not self._free:
            self._grow(max(4, 2 * len(self.state_SC)))
        slot, last_tokens = self._free.pop(), last_tokens[max(0, len(last_tokens) - self.ring_size) :]
        lengths = repeat_lengths(last_tokens)[::-1] if tracks_repeats else []
        parts = [np.asarray(part, np.int64) for part in (state, last_tokens, lengths)]
        packed = to_device_pinned(np.concatenate(parts), self.device)
        state_C, tokens_L, repeat_lengths_L = packed.split([len(part) for part in parts])
        self.state_SC[slot] = state_C
        if last_tokens:
            self.tokens_SL[slot, : len(last_tokens)] = tokens_L
            self.tokens_SL[slot] = self.tokens_SL[slot].roll((length - len(last_tokens)) % self.ring_size)
        if tracks_repeats:
            if not len(self.repeat_lengths_SL):
                self.repeat_lengths_SL = torch.zeros_like(self.tokens_SL, dtype=torch.int32)
                self.reallocations += 1
            self.repeat_lengths_SL[slot] = 0
            self.repeat_lengths_SL[slot, : len(last_tokens)] = repeat_lengths_L
        return slot

    def set_stage_params(self, slot: int, params: Sequence[float]) -> None:
        """Set the numeric parameters of the stages of a row for its next step."""
        more = len(params) - self.stage_params_SP.shape[1]
        if more > 0:
            self.stage_params_SP = torch.nn.functional.pad(self.stage_params_SP, (0, more))
            self.reallocations += 1
        self.stage_params_SP[slot, : len(params)] = to_device(torch.tensor(params, dtype=self.floats), self.device)

    def release(self, slot: int) -> None:
        """Free the slot of a removed row."""
        self._free.append(slot)

    def ensure_ring_size(self, count: int) -> None:
        """Enlarge the ring buffers to at least ``count`` tokens."""
        if count <= self.ring_size:
            return
        ring_size = 1 << (count - 1).bit_length()
        lengths_S1 = self.lengths(torch.arange(len(self.state_SC), device=self.device))[:, None]
        back_SL = (lengths_S1 - 1 - torch.arange(ring_size, device=self.device)) % ring_size  # to the last token
        index_SL = (lengths_S1 - 1 - back_SL) % self.ring_size
        self.tokens_SL = torch.where(back_SL < self.ring_size, self.tokens_SL.gather(1, index_SL), 0)
        more = ring_size - self.ring_size if len(self.repeat_lengths_SL) else 0
        self.repeat_lengths_SL = torch.nn.functional.pad(self.repeat_lengths_SL, (0, more))
        self.ring_size, self.reallocations = ring_size, self.reallocations + 1

    def _grow(self, count: int) -> None:
        old_count = len(self.state_SC)
        for name in ("state_SC", "tokens_SL", "stage_params_SP", "repeat_lengths_SL"):
            old = getattr(self, name)
            if len(old) or name != "repeat_lengths_SL":
                setattr(self, name, torch.nn.functional.pad(old, (0, 0, 0, count - old_count)))
        self.columns = self.state_SC.unbind(1)
        self._free = [*range(count - 1, old_count - 1, -1)]
        self.reallocations += 1

    def gather_column(self, slots_R: torch.Tensor, column: int) -> torch.Tensor:
        """One column of the row state: int64 [R]."""
        return self.columns[column].index_select(0, slots_R)

    def lengths(self, slots_R: torch.Tensor) -> torch.Tensor:
        """Number of prompt and output tokens: [R]."""
        return self.gather_column(slots_R, STEP) + self.gather_column(slots_R, PROMPT_LENGTH)

    def last_tokens(self, slots_R: torch.Tensor) -> torch.Tensor:
        """The last tokens, latest first: int64 [R, ring_size], padded with -1."""
        lengths_R1 = self.lengths(slots_R)[:, None]
        back_L = torch.arange(1, self.ring_size + 1, device=self.device)
        tokens_RL = self.tokens_SL.index_select(0, slots_R).gather(1, (lengths_R1 - back_L) % self.ring_size)
        return torch.where(back_L <= lengths_R1, tokens_RL, -1)

    def push(self, slots_R: torch.Tensor, tokens_R: torch.Tensor, steps_R: torch.Tensor | None = None) -> None:
        """Append a token to each row; -1 appends nothing. steps_R: the STEP column, if known."""
        steps_R = self.gather_column(slots_R, STEP) if steps_R is None else steps_R
        index_R = (steps_R + self.gather_column(slots_R, PROMPT_LENGTH)) % self.ring_size
        self.tokens_SL.index_put_((slots_R, index_R), tokens_R)
        self.columns[STEP].index_copy_(0, slots_R, steps_R + (tokens_R >= 0))

    def sampled_since(self, slots: Sequence[int], steps: Sequence[int], count: int) -> list[list[int]]:
        """The output tokens of each row from a step on, at most ``count``. Synchronises."""
        slots_R, steps_R = to_device([slots, steps], self.device)
        state_RC = self.state_SC.index_select(0, slots_R)
        index_RN = (state_RC[:, PROMPT_LENGTH] + steps_R)[:, None] + torch.arange(count, device=self.device)
        tokens_RN = self.tokens_SL.index_select(0, slots_R).gather(1, index_RN % self.ring_size)
        found = torch.cat((state_RC[:, STEP, None] - steps_R[:, None], tokens_RN), 1).tolist()
        return [tokens[:new] for new, *tokens in found]


def pack_row_state(
    params: Sequence[float], floats: torch.dtype, seed: int, prompt: int, output: int, since_breaker: int
) -> NDArray[np.int64]:
    """The state of a new row, int64 [COLUMNS]. params: FusedParams. seed: 0..2**64 - 1. prompt, output: lengths."""
    words = np.array([seed], np.uint64).view(np.int64)
    return np.concatenate((as_bits(params, floats), words, [output, prompt, since_breaker]))


def as_bits(params: Sequence[float], floats: torch.dtype) -> NDArray[np.int64]:
    """Reinterpret floats as integers."""
    column = np.asarray(params, np.float64)
    if floats == torch.float64:
        return column.view(np.int64)
    with np.errstate(over="ignore"):
        return column.astype(np.float32).view(np.int32).astype(np.int64)
