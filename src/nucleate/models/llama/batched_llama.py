"""The NumPy Llama as a Runner: ragged batches over a paged KV cache. The reference is ``LlamaContext``.

It starts at once, in NumPy, and takes kernels as soon as they are there: they are read from disk in the background, and
compiled there too, once work without them has taken long (see ``Library.missed``). No forward waits for them. Only with
them are drafts read to the bit as token by token: who drafts calls ``warm`` first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

from nucleate.jit.kernel_libraries import MODELS
from nucleate.models.kernels import numpy_fallback
from nucleate.models.kernels.matmul import compiled_product, product
from nucleate.models.llama.numpy_llama import Floats, Llama, LlamaLayer, one_thread
from nucleate.models.paged.batch_layout import BatchLayout, slots_of
from nucleate.models.paged.block_attention import Decode, attend
from nucleate.models.paged.kv_pool import AttentionRule, Pool, copy_blocks, copy_places, new_pool
from nucleate.models.protocol import ModelError
from nucleate.models.runner import BLOCK, UNWATCHED, Fork, ModelInput, Move


class LlamaKernels(NamedTuple):
    """The kernels of a layer."""

    normalise: Callable[..., None]
    rotate: Callable[..., None]
    gate: Callable[..., None]
    product: Callable[..., Floats] = product
    decode: Decode | None = None  #: attention of few new tokens; without it, all attend as long parts do


def compiled() -> LlamaKernels:
    """The Numba kernels, loaded or compiled now."""
    from nucleate.models.kernels.paged_attention import decode

    return LlamaKernels(MODELS.add_and_normalise, MODELS.rotate, MODELS.gate, compiled_product, decode)


class BatchedLlama:
    """See ``Runner``. memory: bytes for the KV cache. Raises ModelError if they hold no block."""

    paged = True
    asynchronous = False
    tree_attention = True
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
        self.rule = AttentionRule(model.head_size**-0.5)
        self.kernels = LlamaKernels(numpy_fallback.add_and_normalise, numpy_fallback.rotate, numpy_fallback.gate)
        self.watch(())

    def warm(self) -> None:
        """See ``Runner.warm``."""
        self.kernels = compiled()

    def watch(self, layers: Sequence[int]) -> None:
        """See ``Runner.watch``. Raises ValueError for places outside the model."""
        count = len(self.model.layers)
        if not all(0 <= layer <= count for layer in layers):
            raise ValueError(f"watch takes places in 0..{count}, got {tuple(layers)}")
        self.watched = tuple(layers)
        self._seen = [np.empty((0, self.model.hidden_size), np.float32) for _ in layers]

    @property
    def features(self) -> Floats:
        """See ``Runner.features``."""
        return np.concatenate(self._seen, axis=1) if self._seen else UNWATCHED

    def forward(self, parts: Sequence[ModelInput]) -> Floats:
        """See ``Runner.forward``. Raises ValueError for ids outside the vocabulary and positions past the context."""
        if not parts:
            self._seen = [seen_TX[:0] for seen_TX in self._seen]
            return np.empty((0, self.vocab_size), np.float32)
        model, packing = self.model, BatchLayout(parts, self.block_size)
        ids_T = packing.ids_T
        if ids_T.min() < 0 or ids_T.max() >= model.vocab_size:
            raise ValueError(f"forward takes token ids in 0..{model.vocab_size - 1}")
        if packing.positions_T.max() >= model.context_length:
            raise ValueError(f"{packing.positions_T.max() + 1} tokens do not fit the context of {model.context_length}")
        if self.kernels.decode is None and MODELS.ready:
            self.kernels = compiled()
        slow, begin = self.kernels.decode is None, perf_counter()
        with one_thread(), np.errstate(over="ignore", invalid="ignore"):  # the sampler says what is wrong with logits
            logits_LV = self._read(packing)
        if slow:
            MODELS.missed(perf_counter() - begin)
        return logits_LV

    def fork(self, forks: Sequence[Fork]) -> None:
        """See ``Runner.fork``."""
        for pool in self.pools:
            copy_blocks(pool, (fork.block for fork in forks if fork.block is not None))

    def move(self, moves: Sequence[Move]) -> None:
        """See ``Runner.move``."""
        sources, targets = slots_of(moves, self.block_size)
        for pool in self.pools:
            copy_places(pool, sources, targets)

    def forget(self, key: int) -> None:
        """Nothing to do: a sequence has no state but its blocks."""

    def _read(self, packing: BatchLayout) -> Floats:
        model, kernels = self.model, self.kernels  # the same ones to the end
        normalise, _, gate, product, _ = kernels
        angle = packing.positions_T[:, None] * model.frequencies
        rotation = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        x_TX = model.embedding[packing.ids_T]
        more_TX, normal_TX = np.zeros_like(x_TX), np.empty_like(x_TX)
        gated = np.empty((packing.size, model.inner_size), np.float32)
        seen: dict[int, Floats] = {}
        for place, (layer, pool) in enumerate(zip(model.layers, self.pools, strict=True)):
            normalise(x_TX, more_TX, layer.attention_norm, model.epsilon, normal_TX)
            if place in self.watched:
                seen[place] = x_TX.copy()
            heads = self._attend(layer, pool, product(normal_TX, layer.query_key_value), rotation, packing, kernels)
            product(heads, layer.attention_out, more_TX)
            normalise(x_TX, more_TX, layer.mlp_norm, model.epsilon, normal_TX)
            gate(product(normal_TX, layer.gate_up), gated)
            product(gated, layer.down, more_TX)
        if self.watched:
            seen[len(model.layers)] = x_TX + more_TX
            self._seen = [seen[place] for place in self.watched]
        kept_LX = x_TX[packing.kept_L]
        normal_LX = np.empty_like(kept_LX)
        normalise(kept_LX, more_TX[packing.kept_L], model.norm, model.epsilon, normal_LX)
        return product(normal_LX, model.unembedding)

    def _attend(
        self, layer: LlamaLayer, pool: Pool, projected: Floats, rotation: tuple[Floats, Floats], packing: BatchLayout,
        kernels: LlamaKernels,
    ) -> Floats:  # fmt: skip
        """Attention [T, heads * head size] of every token over its sequence or branch, up to itself."""
        heads, keys = self.model.heads, self.model.heads + self.model.kv_heads
        all_THD = projected.reshape(packing.size, keys + self.model.kv_heads, self.model.head_size)
        kernels.rotate(all_THD[:, :keys], *rotation)
        query, key, value = all_THD[:, :heads], all_THD[:, heads:keys], all_THD[:, keys:]
        out_THD = attend(query, key, value, pool, packing, self.rule, kernels.decode)
        return out_THD.reshape(packing.size, -1)
