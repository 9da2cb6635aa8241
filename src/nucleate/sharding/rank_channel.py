"""Messages from rank 0 to all other ranks: pickled values, in order, over a gloo group."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

INLINE = 4096
"""Bytes of the first broadcast of a message, of which 8 are its size; a longer one needs a second broadcast."""

IDLE = timedelta(days=365)
"""How long a rank waits for the next message. A rank 0 that ends closes the connection, which is noticed at once."""


class RankChannel:
    """The channel on one rank. All ranks create it together. timeout: seconds until sending is an error."""

    def __init__(self, timeout: float) -> None:
        self.group = dist.new_group(backend="gloo", timeout=IDLE)
        self._timeout = timedelta(seconds=timeout)
        self.messages = self.bytes = 0

    def send(self, payload: bytes) -> None:
        """Send a message that ``encode`` returned. Raises RuntimeError."""
        first = np.zeros(INLINE, np.uint8)
        first[:8].view(np.int64)[0] = len(payload)
        head = np.frombuffer(payload[: INLINE - 8], np.uint8)
        first[8 : 8 + len(head)] = head
        self._broadcast(first, self._timeout)
        if rest := payload[INLINE - 8 :]:
            self._broadcast(np.frombuffer(rest, np.uint8).copy(), self._timeout)
        self.messages += 1
        self.bytes += max(INLINE, len(payload) + 8)

    def receive(self) -> Any:
        """Wait for the next message. Raises RuntimeError."""
        first = np.zeros(INLINE, np.uint8)
        self._broadcast(first, IDLE)
        size = int(first[:8].view(np.int64)[0])
        rest = np.zeros(max(0, size - (INLINE - 8)), np.uint8)
        if len(rest):
            self._broadcast(rest, IDLE)
        return pickle.loads(first[8 : 8 + size].tobytes() + rest.tobytes())  # noqa: S301  # of rank 0

    def _broadcast(self, data: Any, timeout: timedelta) -> None:
        dist.broadcast(torch.from_numpy(data), 0, group=self.group, async_op=True).wait(timeout)


def encode(message: Any) -> bytes:
    """The bytes of a message. Raises whatever pickle raises."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
