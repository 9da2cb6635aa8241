"""Runs several steps of forward pass and sampling on a device without the host; on CUDA as one captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.backends.torch.batch_state import BatchState
from nucleate.sampling.backends.torch.batch_view import BatchView
from nucleate.sampling.backends.torch.torch_device import capture_graph, device_guard, to_device

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""forward(token_ids [R] int64, active [R] bool) -> logits [R, V]: one decoding step of the model.

token_ids are the last tokens of the rows. It must not change the state (KV cache) of inactive rows; their logits are
ignored. On CUDA it is captured in a graph: it must not synchronise, and its tensors must keep their addresses."""


class DecodeLoop:
    """Call it to sample the next ``steps`` tokens of some rows: int64 [R, steps], -1 after the last token of a row.

    ended_R: bool [R], on the device. A row has ended when it sampled a stop id, which is its last token, or when its
    logits were invalid. Ended rows do not advance; set ``ended_R`` to False to continue them. Other rows of the sampler
    may be added and removed between calls.
    """

    def __init__(
        self,
        rows: BatchState,
        view: BatchView,
        forward: Forward,
        first_ids: Sequence[int],
        steps: int,
        stop_ids: Sequence[int],
    ) -> None:
        self.steps = steps
        self._rows, self._view, self._forward = rows, view, forward
        self._stop_ids = to_device(list(stop_ids), rows.device)
        self._last_R = to_device(list(first_ids), rows.device)
        self.ended_R = torch.zeros(len(view.row_numbers), dtype=torch.bool, device=rows.device)
        self._tokens_RN = torch.full((len(view.row_numbers), steps), -1, dtype=torch.int64, device=rows.device)
        self._replay: Callable[[], None] | None = None  # the captured graph, on CUDA
        self._captured_reallocations = -1

    def __call__(self) -> torch.Tensor:
        """Sample the next tokens. Synchronises once in several thousand steps, to copy tokens to the host."""
        removed = [number for number in self._view.row_numbers if number not in self._rows]
        if removed:
            raise ParameterError("rows", f"row {removed[0]} has been removed, but this loop samples it")
        self._rows.reserve(self._view, self.steps)
        with device_guard(self._rows.device):
            if self._rows.device.type != "cuda":
                self._run()
            else:
                if self._replay is None or self._captured_reallocations != self._rows.reallocations:
                    self._replay = self._capture()
                self._replay()
        return self._tokens_RN.clone()

    def _run(self) -> None:
        for step in range(self.steps):
            active_R = ~self.ended_R
            logits_RV = self._forward(self._last_R, active_R)
            tokens_R = self._rows.sample(self._view, logits_RV, None, active_R)
            self._tokens_RN[:, step] = tokens_R
            has_token_R = tokens_R >= 0
            self._last_R.copy_(torch.where(has_token_R, tokens_R, self._last_R))
            stopped_R = (tokens_R[:, None] == self._stop_ids).any(1)
            self.ended_R.logical_or_(stopped_R | (active_R & ~has_token_R))

    def _capture(self) -> Callable[[], None]:
        """Capture the steps. All rows are inactive meanwhile, so that warm-up and capture change no state."""
        ended_R = self.ended_R.clone()
        self.ended_R.fill_(True)
        replay = capture_graph(self._run)
        self.ended_R.copy_(ended_R)
        self._captured_reallocations = self._rows.reallocations
        return replay
