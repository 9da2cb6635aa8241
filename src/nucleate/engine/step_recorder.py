"""Records what each token of a request was sampled from, for tools that explain the result, such as the inspector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling.stage import Pipeline


class SamplingInputs(NamedTuple):
    """What a token was sampled from."""

    logits: NDArray[np.float32]  #: [V], after guidance, before all other stages; owned by the receiver
    stages: Pipeline  #: simplified, with the state of this step
    mask: NDArray[np.int32] | None  #: [W], the tokens that the grammar allowed


class RecordedStep(NamedTuple):
    """One token of an output.

    origin: "sampled"; "given", one of ``Request.output_ids``; or "forced", the only token that the grammar allowed.
    """

    output_index: int  #: of the output among the n of the request
    position: int  #: of the token in the output: the step of its noise
    token_id: int  #: -1 if no token could be sampled
    origin: Literal["sampled", "given", "forced"]
    inputs: SamplingInputs | None = None  #: None unless it was sampled


class StepRecorder(Protocol):
    """Receives the steps of a request, on the thread that runs the engine: methods must be fast and must not raise."""

    def record(self, step: RecordedStep) -> None:
        """A token was appended. Steps come in order, before the chunk with their token."""

    def record_draft(self, output_index: int, position: int, accepted: int, rejected: Sequence[int]) -> None:
        """A draft was verified: the tokens from ``position`` on that were accepted, then the rejected alternatives."""


def copied_row(logits_LV: Any, row: int) -> NDArray[np.float32]:
    """One row of the logits, NumPy or torch, as a copy."""
    found = logits_LV[row]
    return np.array(found.float().cpu().numpy() if hasattr(found, "detach") else found, np.float32)
