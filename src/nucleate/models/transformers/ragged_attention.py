"""Paged attention of ragged batches in torch, on any device, in any dtype, and copies of models that attend with it.

Inputs of few new tokens use the kernel (``decode_attention``) where it is faster. The copies share the weights, and
are what runs: the caller's object keeps its mode, attention implementation, hooks and buffers.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from nucleate.models import cpu_operations
from nucleate.models.paged_cache import MAX_DECODE_TOKENS, AttentionRule, BatchLayout, TreeMask
from nucleate.models.protocol import ModelError
from nucleate.models.runner import ModelInput
from nucleate.parameters.converters import one_line


class IncompatibleModelError(ModelError):
    """The model cannot run batched; the message says why."""


class OwnMaskError(IncompatibleModelError):
    """Its attention hides tokens by a rule of its own, which may count padded ones."""


class AttentionLayer(NamedTuple):
    """The settings of an attention layer, recorded at its first call."""

    module: Any
    rule: AttentionRule
    sinks_H: Any  #: a tensor, or None
    key_shape: tuple[int, int]  #: kv heads, size of a key
    value_shape: tuple[int, int]


class LayerCache(NamedTuple):
    """The KV cache of a layer."""

    keys: Any  #: tensor [blocks, kv heads, block size, head size]
    values: Any
    arrays: Any  #: the same memory in the kernel's layout, see ``allocate_kv_cache``; None without a kernel
    size: int  #: bytes


def threads() -> int:
    """CPU threads for attention: as many as torch has, or half if torch's threads spin after their work."""
    sleeping = "GOMP_SPINCOUNT" in os.environ or os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    count = torch.get_num_threads()
    return int(count if sleeping else max(1, count // 2))


class AttentionPlan:
    """The batch layout of one forward pass, as tensors that all layers share.

    compiled: whether there is the kernel. row_multiple: tokens and logits are filled up to a multiple of it, with batch
    invariance, where the kernel attends for each token alone; 0 without.
    """

    def __init__(
        self,
        inputs: Sequence[ModelInput],
        size: int,
        layers: list[AttentionLayer],
        caches: list[LayerCache],
        compiled: bool,
        device: Any,
        row_multiple: int = 0,
    ) -> None:
        self.size, self.layers, self.caches, self.compiled, self.done = size, layers, caches, compiled, 0
        self.layout = layout = BatchLayout(inputs, size, MAX_DECODE_TOKENS if compiled else 1, split=row_multiple > 0)
        self.long = layout.long.tolist()
        self.stores = layout.has_long or not self.compiled
        filled = (layout.ids_T, layout.positions_T, layout.logits_indices)
        rows = [np.pad(row, (0, -len(row) % row_multiple)) for row in filled] if row_multiple > 1 else [*filled]
        if self.stores:
            rows += [*np.divmod(layout.slots, size), layout.blocks]
        if not self.compiled:
            windows = {layer.rule.window for layer in layers} if len(layout.short) else set()
            tables = self._block_tables(windows)
            rows += [layout.short[:, 0], *chain.from_iterable((table.ravel(), base) for table, base in tables.values())]
        tensors = iter(_moved(rows, device))
        self.ids_T, self.positions_T, self.logits_indices = next(tensors), next(tensors), next(tensors)
        if self.stores:
            self.block_T, self.offset_T, self.blocks = next(tensors), next(tensors), next(tensors)
        if not self.compiled:
            self.row_R = next(tensors)
            self.tables = {
                window: (next(tensors).view(table.shape), next(tensors)) for window, (table, _) in tables.items()
            }
        self.heads: dict[int, Any] = {}
        self.masks: dict[Any, Any] = {}

    def _block_tables(self, windows: set[int]) -> dict[int, tuple[Any, Any]]:
        """For each window, of the inputs with one token: the blocks that it reaches [R, N], and its end in them [R].

        Tables are padded with the last block.
        """
        if not windows:
            return {}
        *_, length_R, table_R = self.layout.short.T
        tables = {}
        for window in windows:
            first_R = np.maximum(length_R - window, 0) // self.size if window else np.zeros_like(length_R)
            count_R = -(-length_R // self.size) - first_R
            steps = np.minimum(np.arange(count_R.max()), count_R[:, None] - 1)
            tables[window] = self.layout.blocks[(table_R + first_R)[:, None] + steps], length_R - first_R * self.size
        return tables

    def attend(self, module: Any, query: Any, key: Any, value: Any) -> Any:
        """[1, heads, T, size] to [1, T, heads, size]: store the new keys and values, and attend."""
        layer, cache = self.layers[self.done], self.caches[self.done]
        if layer.module is not module:
            raise IncompatibleModelError("the order of its attention calls changes")
        self.done += 1
        layout = self.layout
        if self.stores:
            for stored, new in ((cache.keys, key), (cache.values, value)):
                stored[self.block_T, :, self.offset_T] = new[0, :, : layout.size].transpose(0, 1).to(stored.dtype)
        out = query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))
        out[:, layout.size :] = 0
        if not len(layout.short):
            pass
        elif self.compiled:
            q, k, v = (x.float().numpy()[0].swapaxes(0, 1) for x in (query, key, value))
            attended = out.float()
            cpu_operations.decode_attention(q, k, v, cache.arrays, layout, layer.rule, attended.numpy()[0], threads())
            if attended is not out:
                out[:] = attended
        else:
            out[0, self.row_R] = self._decode(layer, cache, query)
        for first, start, stop, table in self.long:
            end = first + stop - start
            new = query[:, :, first:end], key[:, :, first:end], value[:, :, first:end]
            tree = layout.trees.get(first)
            out[:, first:end] = self._chunk(layer, cache, new, (start, stop, table), tree).transpose(1, 2)
        return out

    def _decode(self, layer: AttentionLayer, cache: LayerCache, query: Any) -> Any:
        """Attention [R, heads, size] of all inputs with one token, in one call."""
        visible, table_RN = self._visible(layer.rule.window), self.tables[layer.rule.window][0]
        keys, values = (self._gathered(x, table_RN) for x in (cache.keys, cache.values))
        hidden = ~visible.transpose(2, 3)  # unused memory, which may be NaN
        keys.masked_fill_(hidden, 0)
        values.masked_fill_(hidden, 0)
        query_RHD = query[0].transpose(0, 1)[self.row_R]
        return attend_all(query_RHD[:, :, None], keys, values, visible, layer)[:, :, 0]

    def _visible(self, window: int) -> Any:
        """The mask of each decode over the blocks of its table, bool [R, 1, 1, N * block size]."""
        if window not in self.masks:
            table_RN, end_R = self.tables[window]
            index = torch.arange(table_RN.shape[1] * self.size, device=table_RN.device)
            visible = index < end_R[:, None]
            if window:
                visible &= index >= end_R[:, None] - window
            self.masks[window] = visible[:, None, None]
        return self.masks[window]

    def _gathered(self, blocks: Any, table: Any) -> Any:
        """Blocks [..., N] as [..., kv heads, N * block size, head size], in one copy."""
        kv_heads = blocks.shape[1]
        if kv_heads not in self.heads:
            self.heads[kv_heads] = torch.arange(kv_heads, device=blocks.device)[:, None]
        index = table[..., None, :] * kv_heads + self.heads[kv_heads]
        return blocks.flatten(0, 1)[index].flatten(-3, -2)

    def _chunk(
        self,
        layer: AttentionLayer,
        cache: LayerCache,
        new: Any,
        place: tuple[int, int, int],
        tree: TreeMask | None = None,
    ) -> Any:
        """Attention [1, heads, tokens, size] of an input with several tokens."""
        query, keys, values = new
        start, stop, table = place
        window = layer.rule.window
        base = max(0, start - window + 1) // self.size if window else 0
        if start:
            blocks = self.blocks[table + base : table + -(-stop // self.size)]
            length = stop - base * self.size
            gathered = (self._gathered(x, blocks)[None, :, :length] for x in (cache.keys, cache.values))
            keys, values = (x.to(query.dtype) for x in gathered)
        plain = not (window and stop > window) and not layer.rule.softcap and layer.sinks_H is None
        if not start and plain and tree is None:
            return sdpa(query, keys, values, is_causal=True, scale=layer.rule.scaling, enable_gqa=True)
        if (place, window) not in self.masks and tree is not None:
            mask = tree.mask(start, window)[:, base * self.size :]
            self.masks[place, window] = torch.from_numpy(mask).to(query.device)[None, None]
        elif (place, window) not in self.masks:
            key_L = torch.arange(base * self.size, stop, device=query.device)
            token_T = torch.arange(start, stop, device=query.device)[:, None]
            mask = (key_L <= token_T) & (key_L > token_T - window) if window else key_L <= token_T
            self.masks[place, window] = mask[None, None]
        return attend_all(query, keys, values, self.masks[place, window], layer)


def _moved(arrays: list[Any], device: Any) -> list[Any]:
    """Integer arrays as int64 tensors on a device, in one transfer where there is one."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array, np.int64)) for array in arrays]
    packed = torch.from_numpy(np.concatenate(arrays)).to(device, non_blocking=True)
    return list(packed.split([len(array) for array in arrays]))


def attend_all(query: Any, keys: Any, values: Any, visible: Any, layer: AttentionLayer) -> Any:
    """Reference attention: [B, heads, T, size] over keys [B, kv heads, L, size] that are ``visible`` [B, 1, T, L]."""
    rule, kv_heads = layer.rule, keys.shape[1]
    if not rule.softcap and layer.sinks_H is None:
        if query.shape[2] > 1:
            return sdpa(query, keys, values, attn_mask=visible, scale=rule.scaling, enable_gqa=True)
        rows = query.view(query.shape[0], kv_heads, -1, query.shape[3])  # grouped-query heads as extra tokens
        return sdpa(rows, keys, values, attn_mask=visible, scale=rule.scaling).flatten(1, 2)[:, :, None]
    grouped = query.unflatten(1, (kv_heads, -1))
    scores = (grouped @ keys[:, :, None].transpose(3, 4)).float() * rule.scaling
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores.masked_fill(~visible[:, :, None], -torch.inf)
    if layer.sinks_H is not None:
        sinks = layer.sinks_H.float().view(1, kv_heads, -1, 1, 1)
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : keys.shape[2]].to(values.dtype)
    return (weights @ values[:, :, None]).flatten(1, 2)


def runnable_copy(model: Any) -> Any:
    """A copy in evaluation mode of a causal language model, which shares its weights. Raises ModelError."""
    inner = unwrap(model)
    name = type(inner).__name__
    if not isinstance(inner, PreTrainedModel):
        raise ModelError(
            f"{name} is not a model of Transformers, nor a wrapper of one that is known (peft, torch.compile)"
        )
    if inner.config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder model; only causal language models can be run")
    if not inner.can_generate() or inner.get_output_embeddings() is None:
        raise ModelError(f"{name} has no language model head; load the model with AutoModelForCausalLM")
    if any(weight.is_meta for weight in inner.parameters()):
        raise ModelError(f"{name} has weights without values (on the meta device)")
    try:
        return share(inner).eval()
    except Exception as error:  # the model's code may raise anything
        raise ModelError(f"{name} cannot be copied: {type(error).__name__}: {one_line(error)}") from error


def unwrap(model: Any) -> Any:
    """The model in a wrapper of peft, with its active adapters, or of ``torch.compile``. Raises ModelError."""
    if hasattr(model, "_orig_mod"):
        return unwrap(model._orig_mod)  # noqa: SLF001 - torch has no other name for it
    if isinstance(model, PreTrainedModel) or not hasattr(model, "get_base_model"):
        return model
    config: Any = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        raise ModelError(f"the adapter adds virtual tokens to prompts ({kind}), which is not supported")
    return unwrap(model.get_base_model())


def share(model: Any) -> Any:
    """A copy of the modules that shares all tensors."""
    tensors = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers(), _attributes(model))}
    return copy.deepcopy(model, tensors)


def _attributes(model: Any) -> Iterator[Any]:
    """The tensors that modules have as plain attributes, directly or in an object, such as the state of a quantizer."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor):
                yield value
            elif not isinstance(value, type | dict) and hasattr(value, "__dict__"):
                yield from (inner for inner in vars(value).values() if isinstance(inner, torch.Tensor))


NAME, PROBE = "nucleate", "nucleate_probe"
"""The attention implementations. For the second one, Transformers also calls ``note_mask`` for each mask."""


def paged_copy(model: Any) -> Any:
    """A copy of the model that shares its weights, has its own config, and attends with ``dispatch``."""
    copied = share(model)
    if getattr(model, "_mesh_manager", None) is not None:
        rebind_hooks(copied)
    implement(copied, NAME)
    return copied


def rebind_hooks(copied: Any) -> None:
    """Bind the hooks of a copy of a sharded model to its own modules: the copied ones call those of the original."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    plan = copied._resolve_parallel_plans(copied.config.distributed_config)[0]  # noqa: SLF001
    mesh = copied._mesh_manager.get_mesh("tp")  # noqa: SLF001
    for name, module in copied.named_modules():
        if vars(module).pop("forward", None) is not None:
            ALL_PARALLEL_STYLES[plan[name]].install_forward(module, mesh)


def implement(model: Any, name: str) -> None:
    """Set the attention implementation of all modules of a model copy."""
    for config in {id(c): c for module in model.modules() if (c := getattr(module, "config", None))}.values():
        config._attn_implementation = name  # noqa: SLF001 - Transformers' setter looks for kernels on the hub


def dispatch(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **settings: Any) -> Any:
    """The attention function that Transformers calls in every layer."""
    plan = settings.pop("nucleate", None)
    if plan is None:
        raise IncompatibleModelError("it does not pass keyword arguments to its attention")
    if isinstance(plan, AttentionPlan):
        return plan.attend(module, query, key, value), None
    return plan.note(module, query, key, value, attention_mask, settings), None


def note_mask(**settings: Any) -> None:
    """The mask function that Transformers calls. It returns no mask, and records the kind and window size requested."""
    MASKS.get().append((bool(settings.get("use_vmap")), settings.get("local_size")))


MASKS: ContextVar[list[tuple[bool, int | None]]] = ContextVar("MASKS")
for _name in (NAME, PROBE):
    AttentionInterface.register(_name, dispatch)
AttentionMaskInterface.register(PROBE, note_mask)
