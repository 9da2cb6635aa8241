"""A model whose logits are whatever a function says: for tests and teaching. Holds no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


class Toy:
    """A Model of ``vocab_size`` tokens. ``rule`` gets all token ids so far and returns the logits [V] of the next."""

    runtime = "toy"

    def __init__(
        self, rule: Callable[[tuple[int, ...]], NDArray[np.float32]], vocab_size: int, context_length: int = 1024
    ) -> None:
        self.rule, self.vocab_size, self.context_length = rule, vocab_size, context_length

    @classmethod
    def script(cls, token_ids: Sequence[int], vocab_size: int, prompt_length: int, context_length: int = 1024) -> Toy:
        """A model that, after a prompt of the given length, says these tokens, then the last of them for ever."""

        def rule(seen: tuple[int, ...]) -> NDArray[np.float32]:
            logits_V = np.zeros(vocab_size, np.float32)
            logits_V[token_ids[min(len(seen) - prompt_length, len(token_ids) - 1)]] = 1000.0
            return logits_V

        return cls(rule, vocab_size, context_length)

    def begin(self) -> ToyContext:
        return ToyContext(self)


class ToyContext:
    """One sequence: the ids so far."""

    def __init__(self, model: Toy) -> None:
        self.model = model
        self.seen: tuple[int, ...] = ()

    def forward(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See ``Context.forward``."""
        self.seen += tuple(token_ids)
        return self.model.rule(self.seen)

    def forward_all(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See ``Context.forward_all``."""
        logits = []
        for token in token_ids:
            self.seen += (token,)
            logits.append(self.model.rule(self.seen))
        return np.stack(logits)
