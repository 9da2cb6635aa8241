"""Sequences of token ids on a device, which rows share: bad words, breakers. Knows no stage."""

from __future__ import annotations

import numpy as np
import torch

from nucleate.backends.cuda.device import sent
from nucleate.backends.resident import Words

NO_LIST = -1


class Lists:
    """Lists of sequences, each once, by number. ``moved`` counts how often they have come to lie elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.moved = 0
        self.words_FNT = torch.zeros((0, 0, 0), dtype=torch.int32, device=device)
        self._numbers: dict[Words, int] = {}
        self._rows: dict[Words, int] = {}  # how many rows have it

    def take(self, words: Words) -> int:
        """The number of a list for one more row; NO_LIST of one that is empty."""
        if not words:
            return NO_LIST
        if words not in self._numbers:
            self._numbers[words] = self._room(len(words), max(map(len, words)))
            _, count, length = self.words_FNT.shape
            lying = np.full((count, length), -1, np.int32)
            for line, ids in zip(lying, words, strict=False):
                line[length - len(ids) :] = ids
            self.words_FNT[self._numbers[words]] = sent(lying, self.words_FNT.device)
        self._rows[words] = self._rows.get(words, 0) + 1
        return self._numbers[words]

    def give_back(self, words: Words) -> None:
        """A row with it has gone. It stays until there is need of its room."""
        if words:
            self._rows[words] -= 1

    def _room(self, count: int, length: int) -> int:
        """A number that is free, in arrays that are large enough."""
        had = self.words_FNT
        size, most, longest = had.shape
        unused = next((words for words in self._numbers if not self._rows[words]), None)
        number = len(self._numbers)
        if unused is not None:
            number = self._numbers.pop(unused)
            del self._rows[unused]
        lists, count, length = max(number + 1, size), max(count, most), max(length, longest)
        if (lists, count, length) != had.shape:
            lists = max(lists, 2 * size) if lists > size else size
            self.words_FNT = torch.full((lists, count, length), -1, dtype=torch.int32, device=had.device)
            self.words_FNT[:size, :most, length - longest :] = had
            self.moved += 1
        return number


def ready(words_RNT: torch.Tensor, lists_R: torch.Tensor, said_RL: torch.Tensor) -> torch.Tensor:
    """The last tokens of sequences whose earlier ones were said just now: int64 [R, N], -1 for none.

    words_RNT: -1 before the first token. lists_R: below 0 where a row has none. said_RL: the last one first.
    """
    count = words_RNT.shape[2] - 1
    said_RT = said_RL[:, :count].flip(1)
    said_RT = torch.nn.functional.pad(said_RT, (count - said_RT.shape[1], 0), value=-1)
    before_RNT = words_RNT[:, :, :count]
    there_RN = ((before_RNT < 0) | (before_RNT == said_RT[:, None])).all(2) & (lists_R[:, None] >= 0)
    return torch.where(there_RN, words_RNT[:, :, count].to(torch.int64), -1)
