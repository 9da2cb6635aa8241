"""The model interface: token ids in, logits out, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class ModelError(RuntimeError):
    """A model cannot be found, loaded or run. The message is one line that says what to do."""


class RunnerLostError(ModelError):
    """A process that runs a part of the model has ended: the model cannot be used again."""


class DecodingContext(Protocol):
    """The decoding state of one sequence, with the model's own KV cache."""

    def forward(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Compute more tokens (at least one), and return the logits [V] after the last one."""

    def forward_all(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """The same, with the logits [T, V] after each of the T tokens."""


class ModelLimits(Protocol):
    """The limits that a request is checked against."""

    @property
    def vocab_size(self) -> int:
        """The length of a row of logits."""

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of a sequence, prompt and output together."""


class Model(ModelLimits, Protocol):
    """A causal language model."""

    @property
    def runtime(self) -> str:
        """A readable name of the runtime: "numpy", "torch cpu float32"..."""

    def begin(self) -> DecodingContext:
        """A new, empty sequence."""
