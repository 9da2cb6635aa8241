"""A loop of several forward passes and samples without the host; on CUDA, one captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.backends.torch.batch_state import BatchState
from nucleate.sampling.backends.torch.batch_view import BatchView
from nucleate.sampling.backends.torch.torch_device import captured, guard, sent

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""forward(token_ids [R] int64, active [R] bool) -> logits [R, V]: reads the last token of each row. It changes nothing
of rows that are not active, whose logits are not looked at; and to be captured it does nothing that a CUDA graph does
not allow, and keeps its state in tensors that stay where they are."""


class DecodeLoop:
    """Call it for the next ``steps`` tokens of some rows: int64 [R, steps], -1 after the last one of a row.

    ended_R: bool, on the device: rows that drew one of the stop ids, which is their last token, or had logits from
    which none can be drawn, which gives -1. Such a row stays as it is; to go on, set it to False. Rows may come and go
    meanwhile, but for these.
    """

    def __init__(
        self,
        rows: BatchState,
        part: BatchView,
        forward: Forward,
        first_ids: Sequence[int],
        steps: int,
        stop_ids: Sequence[int],
    ) -> None:
        self.steps = steps
        self._rows, self._part, self._forward = rows, part, forward
        self._stop_ids = sent(list(stop_ids), rows.device)
        self._last_R = sent(list(first_ids), rows.device)
        self.ended_R = torch.zeros(len(part.rows), dtype=torch.bool, device=rows.device)
        self._drawn_RN = torch.full((len(part.rows), steps), -1, dtype=torch.int64, device=rows.device)
        self._replay: Callable[[], None] | None = None  # on CUDA, of arrays that have moved so many times:
        self._moved = -1

    def __call__(self) -> torch.Tensor:
        """The next tokens. Waits for the device once in some thousand steps, when the host must learn of them."""
        gone = [number for number in self._part.rows if number not in self._rows]
        if gone:
            raise ParameterError("rows", f"row {gone[0]} has been removed, but this loop draws for it")
        self._rows.reserve(self._part, self.steps)
        with guard(self._rows.device):
            if self._rows.device.type != "cuda":
                self._run()
            else:
                if self._replay is None or self._moved != self._rows.moved:
                    self._replay = self._capture()
                self._replay()
        return self._drawn_RN.clone()

    def _run(self) -> None:
        for place in range(self.steps):
            active_R = ~self.ended_R
            logits_RV = self._forward(self._last_R, active_R)
            drawn_R = self._rows.draw(self._part, logits_RV, None, active_R)
            self._drawn_RN[:, place] = drawn_R
            there_R = drawn_R >= 0
            self._last_R.copy_(torch.where(there_R, drawn_R, self._last_R))
            stopped_R = (drawn_R[:, None] == self._stop_ids).any(1)
            self.ended_R.logical_or_(stopped_R | (active_R & ~there_R))

    def _capture(self) -> Callable[[], None]:
        """While it is captured no row is active, so that what runs before, to have all compiled, changes nothing."""
        ended_R = self.ended_R.clone()
        self.ended_R.fill_(True)
        replay = captured(self._run)
        self.ended_R.copy_(ended_R)
        self._moved = self._rows.moved
        return replay
