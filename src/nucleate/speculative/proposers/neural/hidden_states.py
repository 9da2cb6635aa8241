"""Buffers the target's hidden states of a sequence until the draft head has processed them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nucleate.speculative.draft import TargetOutput

PENDING = 512
"""The most hidden states that are buffered while no draft is requested; then the head restarts from the latest."""


@dataclass
class CapturedHiddenStates:
    """Of one sequence, from the place ``base`` on: ``count`` hidden states, of which those from ``first`` on are kept.

    ``taken``: of how many who drafts has keys and values, the last of them perhaps of tokens that were only guessed.
    """

    own: Callable[[Any], Any] = np.array  #: makes a copy of states
    joined: Callable[[Sequence[Any]], Any] = np.concatenate
    base: int = 0
    first: int = 0
    count: int = 0
    taken: int = 0
    _pieces: list[Any] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """The place after the last token of which something is known."""
        return self.base + self.count

    def add(self, read: TargetOutput) -> None:
        """The target has read some tokens. Where some are missing, it is as if the sequence began after them."""
        known = self.stop - read.start if self.count else -1
        new_TX = read.hidden_states_TF[max(0, known) :]
        if not len(new_TX):
            return
        if known < 0:
            self._begin(read.start, [])
        self._pieces.append(self.own(new_TX))
        self.count += len(new_TX)
        if self.count - self.taken > PENDING:
            kept_TX = self.own(self._whole()[-(PENDING // 2) :])
            self._begin(self.stop - len(kept_TX), [kept_TX])

    def states(self, start: int) -> Any:
        """Those from a place on, which is counted from ``base``; [count - start, X]."""
        return self._whole()[start - self.first :]

    def take(self, kept: int = 1) -> None:
        """All there is has been taken in; the last few states are kept."""
        last_TX = self._whole()[-kept:]
        self.taken, self.first = self.count, self.count - len(last_TX)
        self._pieces = [self.own(last_TX)]

    def _whole(self) -> Any:
        if len(self._pieces) > 1:
            self._pieces = [self.joined(self._pieces)]
        return self._pieces[0]

    def _begin(self, base: int, pieces: list[Any]) -> None:
        self.base, self.first, self.taken, self._pieces = base, 0, 0, pieces
        self.count = sum(map(len, pieces))
