"""The tokens of a row so far, as stages read them, computed from scratch. Reference of ``incremental_history``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class TokenCounts(NamedTuple):
    """The distinct tokens that occurred, and their counts: int64 [K] each."""

    ids_K: Ids
    prompt_K: Ids
    output_K: Ids


class Context(NamedTuple):
    """The last tokens of the output."""

    tokens: tuple[int, ...]
    repeated: bool  #: whether an earlier token of this output followed the same tokens


class HistoryView(Protocol):
    """What backends and stages read of a row's history; implemented by ``History`` and ``IncrementalHistory``."""

    @property
    def prompt(self) -> Sequence[int] | Ids:
        """The tokens of the prompt."""

    @property
    def output(self) -> Sequence[int] | Ids:
        """The output tokens so far."""

    @property
    def mask(self) -> NDArray[np.int32] | None:
        """Bitmask of the allowed tokens of this step: bit i % 32 of word i // 32 is token i. None: all."""

    def counts(self, window: int | None) -> TokenCounts:
        """Token counts. window: see ``Shift.window``."""

    def listing(self, stage: Any) -> Mapping[int, float]:
        """The list of a Shift for this step."""

    def values(self, stage: Any, size: int) -> Any:
        """The values of a Shift for this step, see ``Shift.values``. size: of the vocabulary."""

    def context(self, n: int) -> Context | None:
        """The last n output tokens; None if the output is shorter."""


class History(NamedTuple):
    """The tokens of one sequence so far, and the bitmask of the next step."""

    prompt: Sequence[int] | Ids = ()
    output: Sequence[int] | Ids = ()
    mask: NDArray[np.int32] | None = None

    def last(self, window: int | None) -> tuple[Ids, Ids]:
        """Prompt and output. With a window: nothing, and the last tokens of both (-1: all)."""
        prompt, output = (np.asarray(ids, np.int64) for ids in (self.prompt, self.output))
        if window is None:
            return prompt, output
        tokens = np.concatenate((prompt, output))
        return prompt[:0], tokens if window < 0 else tokens[max(0, len(tokens) - window) :]

    def counts(self, window: int | None) -> TokenCounts:
        """See ``HistoryView``. The window is that of ``last``."""
        prompt, output = self.last(window)
        ids_K, index = np.unique(np.concatenate((prompt, output)), return_inverse=True)
        both = index[: len(prompt)], index[len(prompt) :]
        return TokenCounts(ids_K, *(np.bincount(part, minlength=len(ids_K)) for part in both))

    def listing(self, stage: Any) -> Mapping[int, float]:
        """The list of a Shift for this step, see ``Shift.listing``."""
        return dict(stage.listing(self))

    def values(self, stage: Any, size: int) -> Any:
        """The values of a Shift stage for this step, see ``Shift.values``. size: of the vocabulary."""
        return stage.values(self, size)

    def context(self, n: int) -> Context | None:
        """The last n output tokens; None if the output is shorter."""
        tokens = np.asarray(self.output, np.int64).tolist()
        if len(tokens) < n:
            return None
        earlier = (tuple(tokens[end - n : end]) for end in range(n, len(tokens)))
        last = tuple(tokens[len(tokens) - n :])
        return Context(last, last in earlier)
