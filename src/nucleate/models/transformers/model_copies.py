"""Copies of Transformers models that share their weights: of a model in memory, and with paged attention.

The copy is what runs, so that the caller's object keeps its mode, attention implementation, hooks and buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextvars import ContextVar
from itertools import chain
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from nucleate.models.protocol import ModelError
from nucleate.models.transformers.ragged_attention import AttentionPlan, IncompatibleModelError
from nucleate.parameters.converters import one_line


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
