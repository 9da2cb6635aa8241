"""Captures the hidden states of a Transformers model with forward hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nucleate.models.protocol import ModelError


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
