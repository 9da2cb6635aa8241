"""Buffers the target's hidden states of a sequence until the draft head has processed them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nucleate.speculative.draft import TargetOutput

MAX_PENDING = 512
"""Maximum number of hidden states that are buffered between drafts; then the older half is dropped."""


@dataclass
class CapturedHiddenStates:
    """Hidden states of ``count`` tokens of a sequence from position ``base`` on; those from ``first`` on are stored.

    num_processed: for how many of these tokens the draft head has KV cache entries.
    """

    copy: Callable[[Any], Any] = np.array  #: copies an array
    concatenate: Callable[[Sequence[Any]], Any] = np.concatenate
    base: int = 0
    first: int = 0
    count: int = 0
    num_processed: int = 0
    _chunks: list[Any] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """The position after the last token with a known hidden state."""
        return self.base + self.count

    def add(self, output: TargetOutput) -> None:
        """Add hidden states. After a gap, the earlier ones are dropped."""
        num_known = self.stop - output.start if self.count else -1
        new_TX = output.hidden_states_TF[max(0, num_known) :]
        if not len(new_TX):
            return
        if num_known < 0:
            self._begin(output.start, [])
        self._chunks.append(self.copy(new_TX))
        self.count += len(new_TX)
        if self.count - self.num_processed > MAX_PENDING:
            kept_TX = self.copy(self._all_states()[-(MAX_PENDING // 2) :])
            self._begin(self.stop - len(kept_TX), [kept_TX])

    def states(self, start: int) -> Any:
        """The hidden states from index ``start`` on, relative to ``base``: [count - start, X]."""
        return self._all_states()[start - self.first :]

    def mark_processed(self, keep: int = 1) -> None:
        """Mark all tokens as processed; the last ``keep`` hidden states stay stored."""
        last_TX = self._all_states()[-keep:]
        self.num_processed, self.first = self.count, self.count - len(last_TX)
        self._chunks = [self.copy(last_TX)]

    def _all_states(self) -> Any:
        if len(self._chunks) > 1:
            self._chunks = [self.concatenate(self._chunks)]
        return self._chunks[0]

    def _begin(self, base: int, chunks: list[Any]) -> None:
        self.base, self.first, self.num_processed, self._chunks = base, 0, 0, chunks
        self.count = sum(map(len, chunks))
