"""Model inputs as messages: new token ids and new block ids only, not the whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, overload

from nucleate.models.runner import ModelInput


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

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self._token_ids[index.start - self._start : index.stop - self._start]
        return self._token_ids[index - self._start]
