"""Registers paged attention with Transformers, and makes copies of a model that use it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from nucleate.models.transformers.model_object import share
from nucleate.models.transformers.ragged_attention import AttentionPlan, IncompatibleModelError
from nucleate.models.transformers.sharded_model import rebind_hooks

NAME, PROBE = "nucleate", "nucleate_probe"
"""The attention implementations. For the second one, Transformers also calls ``note_mask`` for each mask."""


def paged_copy(model: Any) -> Any:
    """A copy of the model that shares its weights, has its own config, and attends with ``dispatch``."""
    copied = share(model)
    if getattr(model, "_mesh_manager", None) is not None:
        rebind_hooks(copied)
    implement(copied, NAME)
    return copied


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
