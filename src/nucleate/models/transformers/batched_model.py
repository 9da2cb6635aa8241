"""Any causal Transformers model as a Runner: ragged batches over a paged KV cache.

The model is called through a twin that shares its weights and attends by the function below. Whether that is right for
a model is found out, never assumed: see ``nucleate.models.transformers.compatibility``. Knows no architecture by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nucleate.models.paged.batch_layout import slots_of
from nucleate.models.paged.kv_pool import by_token, new_pool
from nucleate.models.protocol import ModelError
from nucleate.models.runner import BLOCK, UNWATCHED, Fork, ModelInput, Move
from nucleate.models.transformers.attention_interface import twin
from nucleate.models.transformers.compatibility import compare, layers_of
from nucleate.models.transformers.hidden_state_capture import HiddenStateCapture
from nucleate.models.transformers.ragged_attention import (
    AttentionLayer,
    AttentionPlan,
    IncompatibleModelError,
    LayerCache,
)
from nucleate.models.transformers.transformers_model import TransformersModel
from nucleate.parameters.converters import one_line


class BatchedTransformers:
    """See ``Runner``. memory: bytes for the KV cache. Raises IncompatibleModelError; ModelError if it is too small."""

    paged = True
    tree_attention = True
    why = ""
    features: Any = UNWATCHED  #: see ``Runner.features``; on a device like the logits, a tensor there

    def __init__(self, model: TransformersModel, memory: int, block_size: int = BLOCK) -> None:
        self.vocab_size, self.context_length, self.runtime = model.vocab_size, model.context_length, model.runtime
        self.block_size = block_size
        self.device, self.dtype = model.model.device, model.model.dtype
        self.asynchronous = self.device.type == "cuda"
        self.compiled = has_kernel(self.device, self.dtype)
        self._watcher: HiddenStateCapture | None = None
        try:
            self.model = twin(model.model)
            self.layers = layers_of(self.model)
            with torch.inference_mode():
                compare(self, model.model)
        except IncompatibleModelError:
            raise
        except Exception as error:  # a model may raise anything
            raise IncompatibleModelError(
                f"it cannot be called so: {type(error).__name__}: {one_line(error)}"
            ) from error
        size = self.block_bytes
        if memory < size:
            raise ModelError(f"{memory} bytes for keys and values hold no block of {size}: give more")
        self.allocate(memory // size)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, over all layers."""
        return sum(pool.size for pool in self.pools) // self.blocks

    def allocate(self, blocks: int) -> None:
        """Allocate a new KV cache of so many blocks. On CPU, memory is assigned when it is first written."""
        self.blocks = blocks
        self.pools = [new_pool_of(layer, blocks, self.block_size, self.device, self.dtype) for layer in self.layers]

    def forward(self, parts: Sequence[ModelInput]) -> Any:
        """See ``Runner.forward``. NumPy of a model on CPU, a tensor on its device elsewhere; float32."""
        if not parts:
            self.features = self.features[:0]
            return (
                torch.empty((0, self.vocab_size)) if self.asynchronous else np.empty((0, self.vocab_size), np.float32)
            )
        with torch.inference_mode():
            plan = AttentionPlan(parts, self.block_size, self.layers, self.pools, self.compiled, self.device)
            out = self.model(
                input_ids=plan.ids_T[None],
                position_ids=plan.positions_T[None],
                use_cache=False,
                logits_to_keep=plan.kept_L,
                nucleate=plan,
            )
            logits_LV = out.logits[0].float()
            if self._watcher is not None:
                self.features = self._given(self._watcher.take())
        return self._given(logits_LV)

    def _given(self, tensor: Any) -> Any:
        return tensor if self.asynchronous else tensor.cpu().numpy()

    def watch(self, layers: Sequence[int]) -> None:
        """See ``Runner.watch``: hooks the layers and tries them with one token. Not during a forward pass."""
        if self._watcher is not None:
            self._watcher.close()
        self._watcher, self.features = None, UNWATCHED
        if layers:
            watcher = HiddenStateCapture(self.model, layers)
            try:
                layers_of(self.model)
                self.features = self._given(watcher.take()[:0])
            except ModelError:
                watcher.close()
                raise
            self._watcher = watcher

    def fork(self, forks: Sequence[Fork]) -> None:
        """See ``Runner.fork``."""
        pairs = [fork.block for fork in forks if fork.block is not None]
        if pairs:
            source, target = torch.tensor(pairs, device=self.device).T
            for tensor in (tensor for pool in self.pools for tensor in (pool.keys, pool.values)):
                tensor[target] = tensor[source]

    def move(self, moves: Sequence[Move]) -> None:
        """See ``Runner.move``."""
        size, slots = self.block_size, slots_of(moves, self.block_size)
        (source, place), (target, goal) = (np.divmod(each, size) for each in slots)
        source, place, target, goal = torch.from_numpy(np.stack((source, place, target, goal))).to(self.device)
        for tensor in (tensor for pool in self.pools for tensor in (pool.keys, pool.values)):
            tensor[target, :, goal] = tensor[source, :, place]

    def forget(self, key: int) -> None:
        """Nothing to do: a sequence has no state but its blocks."""

    def warm(self) -> None:
        """Nothing to do: the check at load time has compiled the kernel, if this device has one."""


def new_pool_of(layer: AttentionLayer, blocks: int, block_size: int, device: Any, dtype: Any) -> LayerCache:
    """Allocate the KV cache of a layer, in the memory layout that is fast on this device."""
    (heads, size), (_, value_size) = layer.key_shape, layer.value_shape
    if has_kernel(device, dtype):
        arrays = new_pool(blocks, block_size, heads, size, value_size)
        views = [torch.from_numpy(view) for view in by_token(arrays, value_size)]
        return LayerCache(views[0], views[1], arrays, sum(array.nbytes for array in arrays))
    tensors = [torch.empty((blocks, heads, block_size, d), dtype=dtype, device=device) for d in (size, value_size)]
    return LayerCache(tensors[0], tensors[1], None, sum(tensor.nbytes for tensor in tensors))


def has_kernel(device: Any, dtype: Any) -> bool:
    """Whether short inputs use the kernel of ``nucleate.models.kernels.paged_attention``, not by torch."""
    return bool(device.type == "cpu" and dtype == torch.float32)
