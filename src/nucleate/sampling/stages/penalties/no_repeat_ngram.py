"""No repeated n-grams (Paulus, Xiong, Socher, arXiv 1705.04304)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from nucleate.parameters.converters import changed_copy
from nucleate.sampling.maths import INFINITY
from nucleate.sampling.stage import History, IncrementalListing, Shift, TokenInfo, param
from nucleate.sampling.suffix_automaton import RepeatIndex


class NoRepeatNgram(Shift):
    """Ban tokens that would complete an n-gram that already occurs in prompt or output."""

    rank = 24
    touches = "listed"
    n: int = param("Length of the n-grams that must not repeat; 0: off", neutral=0, low=0, name="no_repeat_ngram_size")

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x + token.listed

    def listing(self, history: History) -> Mapping[int, float]:
        tokens = history.last(-1)[1].tolist()
        before = tokens[len(tokens) - self.n + 1 :] if self.n <= len(tokens) else None
        return {
            tokens[end]: -INFINITY for end in range(self.n - 1, len(tokens)) if tokens[end - self.n + 1 : end] == before
        }

    def incremental_listing(self, history: History) -> IncrementalListing:
        return IncrementalNgrams(self.n, history)


class IncrementalNgrams:
    """The incremental form of ``NoRepeatNgram.listing``."""

    def __init__(self, n: int, history: History) -> None:
        self._index = RepeatIndex(history.last(-1)[1].tolist(), n - 1, n - 1)
        self._length = n - 1

    def fork(self) -> Self:
        return changed_copy(self, _index=self._index.fork())

    def push(self, token: int) -> None:
        self._index.push(token)

    def listing(self) -> Mapping[int, float]:
        return dict.fromkeys(self._index.continuations(self._length), -INFINITY)
