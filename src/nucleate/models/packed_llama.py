"""The NumPy Llama as a Runner: many sequences in one matrix, keys and values in blocks. Its twin: ``LlamaContext``.

Kernels are compiled, or loaded, for the first batch. One sequence alone is read by NumPy until then: it starts at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from nucleate.models import plain
from nucleate.models.llama import Floats, Layer, Llama, one_thread
from nucleate.models.model import ModelError
from nucleate.models.packing import Packing
from nucleate.models.pool import Pool, Rule, by_token, copy_blocks, new_pool
from nucleate.models.product import product
from nucleate.models.runner import BLOCK, Fork, Part


class Kernels(NamedTuple):
    """What runs the parts of a layer that are no products of matrices."""

    normalise: Callable[..., None]
    rotate: Callable[..., None]
    gate: Callable[..., None]
    decode: Callable[..., None] | None = None  #: attention of few new tokens; without it, all attend as long parts do


def compiled() -> Kernels:
    """Those of Numba."""
    from nucleate.models import attention, kernels

    attention.attend()  # loaded now, as are the others
    return Kernels(kernels.add_and_normalise(), kernels.rotate(), kernels.gate(), attention.decode)


class PackedLlama:
    """See ``Runner``. memory: bytes for keys and values. Raises ModelError if they hold no block."""

    paged = True
    asynchronous = False
    why = ""

    def __init__(self, model: Llama, memory: int, block_size: int = BLOCK) -> None:
        self.model, self.block_size = model, block_size
        self.vocab_size, self.context_length, self.runtime = model.vocab_size, model.context_length, model.runtime
        shape = block_size, model.kv_heads, model.head_size, model.head_size
        size = len(model.layers) * sum(array.nbytes for array in new_pool(1, *shape))
        self.blocks = memory // size
        if not self.blocks:
            raise ModelError(f"{memory} bytes for keys and values hold no block of {size}: give more")
        self.pools = [new_pool(self.blocks, *shape) for _ in model.layers]
        self.rule = Rule(model.head_size**-0.5)
        self.kernels = Kernels(plain.add_and_normalise, plain.rotate, plain.gate)

    def forward(self, parts: Sequence[Part]) -> Floats:
        """See ``Runner.forward``. Raises ValueError for ids outside the vocabulary and positions past the context."""
        if not parts:
            return np.empty((0, self.vocab_size), np.float32)
        model, packing = self.model, Packing(parts, self.block_size)
        ids_T = packing.ids_T
        if ids_T.min() < 0 or ids_T.max() >= model.vocab_size:
            raise ValueError(f"forward takes token ids in 0..{model.vocab_size - 1}")
        if packing.positions_T.max() >= model.context_length:
            raise ValueError(f"{packing.positions_T.max() + 1} tokens do not fit the context of {model.context_length}")
        if len(parts) > 1 and self.kernels.decode is None:
            self.kernels = compiled()
        with one_thread(), np.errstate(over="ignore", invalid="ignore"):  # the sampler says what is wrong with logits
            return self._read(packing)

    def fork(self, forks: Sequence[Fork]) -> None:
        """See ``Runner.fork``."""
        for pool in self.pools:
            copy_blocks(pool, (fork.block for fork in forks if fork.block is not None))

    def forget(self, key: int) -> None:
        """Nothing is kept of a sequence but what lies in its blocks."""

    def _read(self, packing: Packing) -> Floats:
        model = self.model
        normalise, gate = self.kernels.normalise, self.kernels.gate
        angle = packing.positions_T[:, None] * model.frequencies
        rotation = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        x_TX = model.embedding[packing.ids_T]
        more_TX, normal_TX = np.zeros_like(x_TX), np.empty_like(x_TX)
        gated = np.empty((packing.size, model.inner_size), np.float32)
        for layer, pool in zip(model.layers, self.pools, strict=True):
            normalise(x_TX, more_TX, layer.attention_norm, model.epsilon, normal_TX)
            heads = self._attend(layer, pool, product(normal_TX, layer.query_key_value), rotation, packing)
            product(heads, layer.attention_out, more_TX)
            normalise(x_TX, more_TX, layer.mlp_norm, model.epsilon, normal_TX)
            gate(product(normal_TX, layer.gate_up), gated)
            product(gated, layer.down, more_TX)
        kept_LX = x_TX[packing.kept_L]
        normal_LX = np.empty_like(kept_LX)
        normalise(kept_LX, more_TX[packing.kept_L], model.norm, model.epsilon, normal_LX)
        return product(normal_LX, model.unembedding)

    def _attend(
        self, layer: Layer, pool: Pool, projected: Floats, rotation: tuple[Floats, Floats], packing: Packing
    ) -> Floats:
        """[T, heads * head size] of every token over its own sequence up to itself."""
        model = self.model
        all_THD = projected.reshape(packing.size, model.heads + 2 * model.kv_heads, model.head_size)
        keys = model.heads + model.kv_heads
        self.kernels.rotate(all_THD[:, :keys], *rotation)
        query, key, value = all_THD[:, : model.heads], all_THD[:, model.heads : keys], all_THD[:, keys:]
        out = np.empty((packing.size, model.heads, model.head_size), np.float32)
        decode = self.kernels.decode
        alone = packing.parts if decode is None else packing.long
        if len(alone):
            for store, new in zip(by_token(pool, model.head_size), (key, value), strict=True):
                store[packing.slots // self.block_size, :, packing.slots % self.block_size] = new
        if decode is not None and len(packing.short):
            decode(query, key, value, pool, packing, self.rule, out)
        for first, start, stop, table in alone.tolist():
            blocks = packing.blocks[table : table + -(-stop // self.block_size)]
            tokens = slice(first, first + stop - start)
            out[tokens] = self._chunk(query[tokens], pool, blocks, start)
        return out.reshape(packing.size, -1)

    def _chunk(
        self, query_THD: Floats, pool: Pool, blocks: np.ndarray[tuple[int], np.dtype[np.int32]], start: int
    ) -> Floats:
        """[T, heads, head size] of some tokens from ``start`` on, over the blocks of their sequence."""
        count, heads, size = query_THD.shape
        stop, kv_heads = start + count, self.model.kv_heads
        keys, values = (x[blocks].swapaxes(0, 1).reshape(kv_heads, -1, size)[:, :stop] for x in by_token(pool, size))
        grouped = query_THD.swapaxes(0, 1).reshape(kv_heads, -1, size) * np.float32(self.rule.scaling)
        scores = (grouped @ keys.swapaxes(1, 2)).reshape(heads, count, stop)
        scores += np.where(np.arange(stop) > np.arange(start, stop)[:, None], np.float32(-np.inf), np.float32(0))
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = scores.reshape(kv_heads, -1, stop) @ values
        mixed = mixed.reshape(heads, count, size) / scores.sum(axis=-1, keepdims=True)
        out: Floats = mixed.swapaxes(0, 1)
        return out
