"""How many of the last tokens of a row are the same as those so far back: kept up to date on the device. No stage.

For each distance d: how many tokens before the one d places back equal the last ones of all. A new token makes it one
more where it is the token d places back, and none elsewhere. The twin of ``core.suffixes``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nucleate.core.suffixes import repeats


class Matches:
    """Lengths by slot and distance. ``moved`` counts how often they have come to lie elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.moved = 0
        self.lengths_SL = torch.zeros((0, 0), dtype=torch.int32, device=device)  # of distance 1 first

    def grow(self, slots: int, ring: int) -> None:
        """Have room for so many slots that keep so many tokens."""
        had = self.lengths_SL
        if had.shape == (slots, ring):
            return
        self.lengths_SL = torch.zeros((slots, ring), dtype=torch.int32, device=had.device)
        self.lengths_SL[: len(had), : had.shape[1]] = had
        self.moved += 1

    def put(self, slot: int, lengths: torch.Tensor) -> None:
        """The lengths of a new row, on the device."""
        lengths_L = self.lengths_SL[slot]
        lengths_L.zero_()
        lengths_L[: len(lengths)] = lengths

    def push(self, slots_R: torch.Tensor, tokens_R: torch.Tensor, said_RL: torch.Tensor) -> None:
        """Slots go on with a token each, below 0 for none. said_RL: what was said before, the last one first."""
        had_RL, token_R1 = self.lengths_SL.index_select(0, slots_R), tokens_R[:, None]
        now_RL = torch.where(said_RL == token_R1, had_RL + 1, 0)
        self.lengths_SL.index_copy_(0, slots_R, torch.where(token_R1 >= 0, now_RL, had_RL))


def lengths_of(said: Sequence[int]) -> list[int]:
    """What ``Matches`` keeps of these tokens, on the host."""
    return repeats(said)[::-1]
