"""Messages from rank 0 to all other ranks: pickled values, in order, over a gloo group.

Model inputs are packed: a message has new token ids and new block ids only, not the whole sequences.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from nucleate.models.runner import ModelInput

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


class PackedInput(NamedTuple):
    """A ``ModelInput`` without what the receiver knows."""

    key: int
    token_ids: Sequence[int]  #: those that are computed
    start: int
    kept: int  #: the block ids begin with so many of the last ones,
    block_ids: Sequence[int]  #: followed by these
    num_logits: int
    parents: Sequence[int] | None


class InputPacker:
    """Packs the inputs of one runner."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}
        self._forgotten: list[int] = []

    def pack(self, inputs: Sequence[ModelInput]) -> tuple[list[int], list[PackedInput]]:
        """Also returns the keys that the receiver can forget."""
        packed = []
        for key, tokens, start, stop, blocks, num_logits, parents in inputs:
            known = self._tables.get(key, [])
            kept = len(known) if blocks[: len(known)] == known else 0
            self._tables[key] = list(blocks)
            packed.append(PackedInput(key, list(tokens[start:stop]), start, kept, blocks[kept:], num_logits, parents))
        forgotten, self._forgotten = self._forgotten, []
        return forgotten, packed

    def forget(self, key: int) -> None:
        """A sequence has finished."""
        if self._tables.pop(key, None) is not None:
            self._forgotten.append(key)


class InputUnpacker:
    """Unpacks what an ``InputPacker`` packed, in the same order."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}

    def unpack(self, forgotten: Sequence[int], packed: Sequence[PackedInput]) -> list[ModelInput]:
        """The inputs, whose token ids can be read from ``start`` to ``stop`` only."""
        for key in forgotten:
            self._tables.pop(key, None)
        inputs = []
        for key, tokens, start, kept, added, num_logits, parents in packed:
            table = self._tables[key] = [*self._tables.get(key, [])[:kept], *added]
            part = TokenPart(tokens, start)
            inputs.append(ModelInput(key, part, start, start + len(tokens), table, num_logits, parents))
        return inputs


class TokenPart(Sequence[int]):
    """The tokens of a sequence from position ``start`` on."""

    def __init__(self, token_ids: Sequence[int], start: int) -> None:
        self._token_ids, self._start = token_ids, start

    def __len__(self) -> int:
        return self._start + len(self._token_ids)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._token_ids[index.start - self._start : index.stop - self._start]
        return self._token_ids[index - self._start]
