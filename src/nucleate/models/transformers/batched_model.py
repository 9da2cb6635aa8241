"""Any causal Transformers model as a Runner: ragged batches over a paged KV cache.

The model is called through a copy that shares its weights and calls nucleate's attention function. Whether that gives
the right results is checked for every model, see ``nucleate.models.transformers.compatibility``. Its hidden states are
captured with forward hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from nucleate.models.batch_invariance import is_batch_invariant
from nucleate.models.paged_cache import allocate_kv_cache, slots_of, token_major
from nucleate.models.protocol import ModelError
from nucleate.models.runner import BLOCK, NO_HIDDEN_STATES, ModelInput, Move, Runner, blocks_in
from nucleate.models.transformers.compatibility import compare, layers_of
from nucleate.models.transformers.ragged_attention import (
    AttentionLayer,
    AttentionPlan,
    IncompatibleModelError,
    LayerCache,
    paged_copy,
)
from nucleate.models.transformers.transformers_model import TransformersModel
from nucleate.parameters.converters import one_line


class BatchedTransformers(Runner):
    """See ``Runner``. memory: bytes for the KV cache. Raises IncompatibleModelError; ModelError if it is too small.

    batch_invariant: compute with the same kernels in every batch, on a CPU, if a test finds a way to (see
    ``is_batch_invariant``): attention with nucleate's own, and matrix products of at least a few rows.
    """

    tree_attention = copies_blocks = True
    hidden_states: Any = NO_HIDDEN_STATES  #: see ``Runner.hidden_states``; on a GPU a tensor, like the logits

    def __init__(
        self, model: TransformersModel, memory: int, block_size: int = BLOCK, *, batch_invariant: bool = False
    ) -> None:
        self.vocab_size, self.context_length, self.runtime = model.vocab_size, model.context_length, model.runtime
        self.block_size = block_size
        self.device, self.dtype = model.model.device, model.model.dtype
        self.asynchronous = self.device.type == "cuda"
        self.compiled, self._row_multiple = has_kernel(self.device, self.dtype), 0
        if batch_invariant and self.device.type == "cpu":
            self.compiled, self._row_multiple = True, 1
        self.local_logits = model.local_logits
        self._capture: HiddenStateCapture | None = None
        try:
            self.model = paged_copy(model.model)
            self.layers = layers_of(self.model)
            with torch.inference_mode():
                compare(self, model.model, model.decoding)
        except IncompatibleModelError:
            raise
        except Exception as error:  # the model's code may raise anything
            raise IncompatibleModelError(f"a batched call raises {type(error).__name__}: {one_line(error)}") from error
        self.allocate(blocks_in(memory, self.block_bytes))
        if self._row_multiple and not self._find_row_multiple():
            self.compiled, self._row_multiple = has_kernel(self.device, self.dtype), 0
            self.allocate(self.blocks)

    def _find_row_multiple(self) -> bool:
        """Use the smallest multiple of rows that makes the logits the same in every batch, if there is one.

        Otherwise compute all products in pieces of FIXED_ROWS rows, if that does.
        """
        for self._row_multiple in ROW_MULTIPLES:
            self.batch_invariant = is_batch_invariant(self, MANY_ROWS)
            if self.batch_invariant:
                return True
        self._row_multiple, linear = 1, [one for one in self.model.modules() if type(one) is torch.nn.Linear]
        for one in linear:
            one.forward = partial(in_pieces, one)
        self.batch_invariant = is_batch_invariant(self, MANY_ROWS)
        if not self.batch_invariant:
            for one in linear:
                del one.forward
        return self.batch_invariant

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all layers together."""
        return sum(cache.size for cache in self.caches) // self.blocks

    def allocate(self, blocks: int) -> None:
        """Allocate a new KV cache of so many blocks. On CPU, memory is assigned when it is first written."""
        self.blocks = blocks
        self.caches = [
            new_layer_cache(layer, blocks, self.block_size, self.device, self.dtype, compiled=self.compiled)
            for layer in self.layers
        ]

    def forward(self, inputs: Sequence[ModelInput]) -> Any:
        """See ``Runner.forward``. Float32 logits: a NumPy array on CPU, else a tensor on the model's device."""
        if not inputs:
            self.hidden_states = self.hidden_states[:0]
            return (
                torch.empty((0, self.vocab_size)) if self.asynchronous else np.empty((0, self.vocab_size), np.float32)
            )
        with torch.inference_mode():
            place = self.block_size, self.layers, self.caches, self.compiled, self.device, self._row_multiple
            plan = AttentionPlan(inputs, *place)
            out = self.model(
                input_ids=plan.ids_T[None],
                position_ids=plan.positions_T[None],
                use_cache=False,
                logits_to_keep=plan.logits_indices,
                nucleate=plan,
            )
            logits_LV = out.logits[0]
            if len(logits_LV) != len(plan.logits_indices):  # some models ignore logits_to_keep
                logits_LV = logits_LV[plan.logits_indices]
            logits_LV = self.local_logits(logits_LV[: len(plan.layout.logits_indices)]).float()
            if self._capture is not None and self.capture_enabled:
                self.hidden_states = self._output(self._capture.take()[: plan.layout.size])
        return self._output(logits_LV)

    def _output(self, tensor: Any) -> Any:
        return tensor if self.asynchronous else tensor.cpu().numpy()

    def capture_hidden_states(self, layers: Sequence[int]) -> None:
        """See ``Runner.capture_hidden_states``. Runs the model with one token. Not during a forward pass."""
        if self._capture is not None:
            self._capture.close()
        self._capture, self.hidden_states = None, NO_HIDDEN_STATES
        if layers:
            capture = HiddenStateCapture(self.model, layers)
            try:
                layers_of(self.model)
                self.hidden_states = self._output(capture.take()[:0])
            except ModelError:
                capture.close()
                raise
            self._capture = capture

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See ``Runner.copy_blocks``."""
        source, target = torch.tensor(pairs, device=self.device).T
        for tensor in (tensor for cache in self.caches for tensor in (cache.keys, cache.values)):
            tensor[target] = tensor[source]

    def move(self, moves: Sequence[Move]) -> None:
        """See ``Runner.move``."""
        size, slots = self.block_size, slots_of(moves, self.block_size)
        indices = np.stack([*np.divmod(slots[0], size), *np.divmod(slots[1], size)])
        source, source_offset, target, target_offset = torch.from_numpy(indices).to(self.device)
        for tensor in (tensor for cache in self.caches for tensor in (cache.keys, cache.values)):
            tensor[target, :, target_offset] = tensor[source, :, source_offset]


def new_layer_cache(
    layer: AttentionLayer, blocks: int, block_size: int, device: Any, dtype: Any, *, compiled: bool
) -> LayerCache:
    """Allocate the KV cache of a layer, in the memory layout that is fast on this device. compiled: for the kernel."""
    (heads, size), (_, value_size) = layer.key_shape, layer.value_shape
    if compiled:
        arrays = allocate_kv_cache(blocks, block_size, heads, size, value_size)
        views = [torch.from_numpy(view) for view in token_major(arrays, value_size)]
        return LayerCache(views[0], views[1], arrays, sum(array.nbytes for array in arrays))
    tensors = [torch.empty((blocks, heads, block_size, d), dtype=dtype, device=device) for d in (size, value_size)]
    return LayerCache(tensors[0], tensors[1], None, sum(tensor.nbytes for tensor in tensors))


ROW_MULTIPLES = (1, 4, 8)
"""Multiples of rows for which matrix products may have the same bits."""
FIXED_ROWS = 16
"""Rows of a product where they have not: some libraries choose another order of additions for each number of rows."""
MANY_ROWS = 100
"""Tokens of the largest forward pass in the test of batch invariance."""


def in_pieces(linear: Any, x: Any) -> Any:
    """The result of a linear layer [..., Y] for x [..., X], in products of FIXED_ROWS rows."""
    rows_TX = x.flatten(0, -2)
    padded = torch.nn.functional.pad(rows_TX, (0, 0, 0, -len(rows_TX) % FIXED_ROWS))
    pieces = [torch.nn.functional.linear(piece, linear.weight, linear.bias) for piece in padded.split(FIXED_ROWS)]
    return torch.cat(pieces)[: len(rows_TX)].reshape(*x.shape[:-1], len(linear.weight))


def has_kernel(device: Any, dtype: Any) -> bool:
    """Whether inputs of few new tokens use ``decode_attention``; otherwise torch."""
    return bool(device.type == "cpu" and dtype == torch.float32)


class HiddenStateCapture:
    """Captures the hidden states of some layers until ``close``, see ``Runner.capture_hidden_states``.

    Raises ModelError for a model whose layers cannot be found, ValueError for layers that it does not have.
    """

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        modules = decoder_layers(model)
        if not all(0 <= layer <= len(modules) for layer in layers):
            raise ValueError(f"the layers must be in 0..{len(modules)}, got {tuple(layers)}")
        self.layers = tuple(layers)
        self._captured: dict[int, Any] = {}
        self._hooks = [self._hook(modules, layer) for layer in {*layers}]

    def _hook(self, modules: Sequence[Any], layer: int) -> Any:
        if layer == len(modules):

            def after(module: Any, args: Any, out: Any) -> None:
                self._captured[layer] = out[0] if isinstance(out, tuple) else out

            return modules[-1].register_forward_hook(after)

        def before(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._captured[layer] = args[0] if args else named.get("hidden_states")

        return modules[layer].register_forward_pre_hook(before, with_kwargs=True)

    def take(self) -> Any:
        """The states of a forward pass of one row of T tokens: a new float32 tensor [T, layers * hidden size].

        Raises ModelError.
        """
        captured: list[Any] = [self._captured.get(layer) for layer in self.layers]
        self._captured.clear()
        for layer, x_1TX in zip(self.layers, captured, strict=True):
            shape = tuple(getattr(x_1TX, "shape", ()))
            if len(shape) != 3 or shape[0] != 1:
                raise ModelError(f"cannot capture hidden states: layer {layer} has an input of shape {shape}")
        return torch.cat([x_1TX[0] for x_1TX in captured], 1).to(torch.float32)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def decoder_layers(model: Any) -> list[Any]:
    """The decoder layers and the final norm, in order. Raises ModelError if they cannot be identified."""
    count = model.config.get_text_config().num_hidden_layers
    found: dict[str, Any] = {}
    for name, module in model.get_decoder().named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and not inside:
            found[name] = module
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise ModelError(f"cannot capture hidden states: its {count} layers cannot be identified (candidates: {names})")
    return [*next(iter(found.values()))]
