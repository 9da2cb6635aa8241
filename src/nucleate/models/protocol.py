"""What a model is to the pipeline: something that turns token ids into logits. Knows no sampling and no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class ModelError(RuntimeError):
    """A model cannot be found, read or run; the message says what to do, in one line."""


class DecodingContext(Protocol):
    """One sequence that a model is reading: its tokens so far, as the model's own cache of keys and values."""

    def forward(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Read more tokens (at least one) and return the logits [V] for the token that follows the last of them."""

    def forward_all(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """The same, with the logits [T, V] for what follows each of the T tokens."""


class ModelLimits(Protocol):
    """What a request has to keep to."""

    @property
    def vocab_size(self) -> int:
        """The length of a row of logits."""

    @property
    def context_length(self) -> int:
        """The most tokens, prompt and output together, that one sequence may have."""


class Model(ModelLimits, Protocol):
    """A causal language model."""

    @property
    def runtime(self) -> str:
        """What runs it, for people to read: "numpy", "torch cpu float32"..."""

    def begin(self) -> DecodingContext:
        """A new, empty sequence."""
