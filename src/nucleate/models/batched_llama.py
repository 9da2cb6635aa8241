"""The NumPy Llama as a Runner: ragged batches over a paged KV cache. The reference is ``LlamaContext``.

It starts immediately, in NumPy. The kernels are loaded in the background, or compiled there once enough time has been
spent without them (``KernelLibrary.record_fallback``); a forward pass never waits for them. Only with kernels are the
logits of draft tokens bit-identical to decoding one token at a time: speculative decoding calls ``warm`` first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

from nucleate.jit.kernel_libraries import MODELS
from nucleate.models import cpu_operations
from nucleate.models.cpu_operations import (
    attend,
    attend_compiled,
    compiled_matmul,
    invariant_matmul,
    matmul,
    one_thread,
)
from nucleate.models.numpy_llama import Floats, Llama
from nucleate.models.paged_cache import (
    AttentionRule,
    BatchLayout,
    KVCache,
    allocate_kv_cache,
    copy_blocks,
    copy_slots,
    slots_of,
)
from nucleate.models.runner import BLOCK, NO_HIDDEN_STATES, ModelInput, Move, Runner, blocks_in


class LlamaKernels(NamedTuple):
    """The operations of a layer."""

    add_and_normalise: Callable[..., None]
    rotate: Callable[..., None]
    gate: Callable[..., None]
    matmul: Callable[..., Floats]
    attend: Callable[..., Floats]


NUMPY = LlamaKernels(cpu_operations.add_and_normalise, cpu_operations.rotate, cpu_operations.gate, matmul, attend)


def compiled(*, batch_invariant: bool = False) -> LlamaKernels:
    """The Numba kernels, loaded or compiled now."""
    product = invariant_matmul if batch_invariant else compiled_matmul
    return LlamaKernels(MODELS.add_and_normalise, MODELS.rotate, MODELS.gate, product, attend_compiled)


class BatchedLlama(Runner):
    """See ``Runner``. memory: bytes for the KV cache. Raises ModelError if they are less than a block.

    batch_invariant: compute each row and token with the same kernels, which are loaded or compiled now. They need
    matrices with multiples of eight rows.
    """

    tree_attention = copies_blocks = True

    def __init__(self, model: Llama, memory: int, block_size: int = BLOCK, *, batch_invariant: bool = False) -> None:
        rows = model.hidden_size, model.inner_size, model.heads * model.head_size
        self.batch_invariant = batch_invariant and not any(size % 8 for size in rows)
        self.model, self.block_size = model, block_size
        self.vocab_size, self.context_length, self.runtime = model.vocab_size, model.context_length, model.runtime
        shape = block_size, model.kv_heads, model.head_size, model.head_size
        size = len(model.layers) * sum(array.nbytes for array in allocate_kv_cache(1, *shape))
        self.blocks = blocks_in(memory, size)
        self.caches = [allocate_kv_cache(self.blocks, *shape) for _ in model.layers]
        self.rule = AttentionRule(model.head_size**-0.5)
        self.kernels = compiled(batch_invariant=True) if self.batch_invariant else NUMPY
        self.capture_hidden_states(())

    def warm(self) -> None:
        """See ``Runner.warm``."""
        self.kernels = compiled(batch_invariant=self.batch_invariant)

    def capture_hidden_states(self, layers: Sequence[int]) -> None:
        """See ``Runner.capture_hidden_states``. Raises ValueError for layers that the model does not have."""
        count = len(self.model.layers)
        if not all(0 <= layer <= count for layer in layers):
            raise ValueError(f"the layers must be in 0..{count}, got {tuple(layers)}")
        self._captured_layers = tuple(layers)
        self._captured = [np.empty((0, self.model.hidden_size), np.float32) for _ in layers]

    @property
    def hidden_states(self) -> Floats:
        """See ``Runner.hidden_states``."""
        return np.concatenate(self._captured, axis=1) if self._captured else NO_HIDDEN_STATES

    def forward(self, inputs: Sequence[ModelInput]) -> Floats:
        """See ``Runner.forward``. Raises ValueError for ids outside the vocabulary and positions past the context."""
        if not inputs:
            self._captured = [x_TX[:0] for x_TX in self._captured]
            return np.empty((0, self.vocab_size), np.float32)
        model, layout = self.model, BatchLayout(inputs, self.block_size, split=self.batch_invariant)
        if layout.ids_T.min() < 0 or layout.ids_T.max() >= model.vocab_size:
            raise ValueError(f"token ids must be in 0..{model.vocab_size - 1}")
        if layout.positions_T.max() >= model.context_length:
            raise ValueError(f"{layout.positions_T.max() + 1} tokens exceed the context length {model.context_length}")
        if self.kernels is NUMPY and MODELS.ready:
            self.kernels = compiled()
        kernels, begin = self.kernels, perf_counter()
        with one_thread(), np.errstate(over="ignore", invalid="ignore"):  # the sampler reports invalid logits
            logits_LV = self._forward(layout, kernels)
        if kernels is NUMPY:
            MODELS.record_fallback(perf_counter() - begin)
        return logits_LV

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See ``Runner.copy_blocks``."""
        for cache in self.caches:
            copy_blocks(cache, pairs)

    def move(self, moves: Sequence[Move]) -> None:
        """See ``Runner.move``."""
        sources, targets = slots_of(moves, self.block_size)
        for cache in self.caches:
            copy_slots(cache, sources, targets)

    def _forward(self, layout: BatchLayout, kernels: LlamaKernels) -> Floats:
        """The requested logits [L, V]. The products write to ``delta_TX``, which the next normalisation adds to x."""
        model, add_and_normalise, matmul = self.model, kernels.add_and_normalise, kernels.matmul
        rotation = model.rotation(layout.positions_T)
        x_TX = model.embedding[layout.ids_T]
        delta_TX, normal_TX = np.zeros_like(x_TX), np.empty_like(x_TX)
        gated_TY = np.empty((layout.size, model.inner_size), np.float32)
        captured: dict[int, Floats] = {}
        layers = self._captured_layers if self.capture_enabled else ()
        for index, (layer, cache) in enumerate(zip(model.layers, self.caches, strict=True)):
            add_and_normalise(x_TX, delta_TX, layer.attention_norm, model.epsilon, normal_TX)
            if index in layers:
                captured[index] = x_TX.copy()
            heads_TX = self._attend(cache, matmul(normal_TX, layer.query_key_value), rotation, layout, kernels)
            matmul(heads_TX, layer.attention_out, delta_TX)
            add_and_normalise(x_TX, delta_TX, layer.mlp_norm, model.epsilon, normal_TX)
            kernels.gate(matmul(normal_TX, layer.gate_up), gated_TY)
            matmul(gated_TY, layer.down, delta_TX)
        if layers:
            captured[len(model.layers)] = x_TX + delta_TX
            self._captured = [captured[layer] for layer in layers]
        x_LX = x_TX[layout.logits_indices]
        normal_LX = np.empty_like(x_LX)
        add_and_normalise(x_LX, delta_TX[layout.logits_indices], model.norm, model.epsilon, normal_LX)
        return matmul(normal_LX, model.unembedding)

    def _attend(
        self, cache: KVCache, projected: Floats, rotation: tuple[Floats, Floats], layout: BatchLayout,
        kernels: LlamaKernels,
    ) -> Floats:  # fmt: skip
        """The attention [T, heads * head size] of every token, from the projected queries, keys and values."""
        heads, keys = self.model.heads, self.model.heads + self.model.kv_heads
        all_THD = projected.reshape(layout.size, keys + self.model.kv_heads, self.model.head_size)
        kernels.rotate(all_THD[:, :keys], *rotation)
        query, key, value = all_THD[:, :heads], all_THD[:, heads:keys], all_THD[:, keys:]
        return kernels.attend(query, key, value, cache, layout, self.rule).reshape(layout.size, -1)
