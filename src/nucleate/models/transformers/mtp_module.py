"""Multi-token prediction (MTP) modules of a Transformers model: loaded and batched.

From the hidden state of a token and a later token, a module predicts the hidden state of the later one (DeepSeek-V3,
arXiv 2412.19437, section 2.2). The modules are those of Transformers (``MtpModel``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers.modeling_layers import MtpModel

from nucleate.models.protocol import ModelError
from nucleate.models.runner import BLOCK, ModelInput
from nucleate.models.transformers.batched_model import decoder_layers, has_kernel, new_layer_cache
from nucleate.models.transformers.compatibility import probing
from nucleate.models.transformers.ragged_attention import (
    AttentionLayer,
    AttentionPlan,
    IncompatibleModelError,
    LayerCache,
    paged_copy,
)
from nucleate.models.transformers.transformers_model import TransformersModel
from nucleate.parameters.converters import one_line


class MtpModules:
    """The MTP modules of a model, run batched. Raises ModelError if that is not possible.

    The inputs of module m at position j are the hidden state of token j, from the final norm or the previous module,
    and token j + m + 1. The model's head turns its output into the logits of token j + m + 2.
    """

    def __init__(self, model: TransformersModel, modules: Any) -> None:
        self.count: int = len(modules.layers)
        self.depth = len(decoder_layers(model.model))  #: the layer to pass to ``Runner.capture_hidden_states``
        self.device, self.dtype = model.model.device, model.model.dtype
        self.compiled = has_kernel(self.device, self.dtype)
        try:
            self._norm = model.model.get_decoder().norm
            self._model = paged_copy(modules.eval())
            with torch.inference_mode():
                self.layers = [self._probe(module) for module in range(self.count)]
        except ModelError as error:
            raise ModelError(f"the MTP modules of the model cannot be run: {error}") from error
        except Exception as error:  # the model's code may raise anything
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise ModelError(f"the MTP modules of the model cannot be run: {reason}") from error

    def new_kv_caches(self, blocks: int) -> list[LayerCache]:
        """Create the KV cache of each module, in blocks of BLOCK tokens."""
        return [
            new_layer_cache(layer, blocks, BLOCK, self.device, self.dtype, compiled=self.compiled)
            for layer in self.layers
        ]

    def copy_states(self, x_TX: Any) -> Any:
        """A copy of a runner's hidden states, on the device and in the dtype of the modules."""
        return torch.as_tensor(x_TX).to(self.device, self.dtype, copy=True)

    def concatenate(self, parts: Sequence[Any]) -> Any:
        """Concatenate hidden states along the tokens."""
        return parts[0] if len(parts) == 1 else torch.cat([*parts])

    def hidden(self, x_TX: Any) -> Any:
        """The input of the first module: the hidden states after the final norm."""
        with torch.inference_mode():
            return self._norm(x_TX)

    def run(
        self, module: int, x_TX: Any, inputs: Sequence[ModelInput], bases: Sequence[int], cache: LayerCache
    ) -> tuple[Any, Any]:
        """The output of a module for all tokens [T, X], and for the last token of each input [P, X].

        bases: for each input, the position in the sequence of the first hidden state. ``token_ids`` of an input start
        at position base + module + 1.
        """
        with torch.inference_mode():
            plan = AttentionPlan(inputs, BLOCK, [self.layers[module]], [cache], self.compiled, self.device)
            counts = [each.stop - each.start for each in inputs]
            shift_T = torch.from_numpy(np.repeat(np.asarray(bases, np.int64) + module + 1, counts)).to(self.device)
            out_TX = self._call(module, x_TX, plan.ids_T, plan.positions_T + shift_T, plan)
            return out_TX, out_TX[plan.logits_indices]

    def logits(self, x_RX: Any) -> Any:
        """The logits for outputs of a module: a float32 NumPy array [R, V]."""
        with torch.inference_mode():
            return self._model._project_to_logits(x_RX[None])[0].float().cpu().numpy()  # noqa: SLF001

    def _call(self, module: int, x_TX: Any, ids_T: Any, positions_T: Any, plan: Any) -> Any:
        arguments = x_TX[None], positions_T[None], None
        return self._model.forward_layer(module, *arguments, input_ids=ids_T[None], nucleate=plan)[0]

    def _probe(self, module: int) -> AttentionLayer:
        """The attention settings of a module."""
        with probing(self._model) as probe:
            x_TX = torch.zeros((1, self._model.config.hidden_size), dtype=self.dtype, device=self.device)
            id_T = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._call(module, x_TX, id_T, id_T, probe)
        if len(probe.layers) != 1:
            raise IncompatibleModelError(f"a module has {len(probe.layers)} attention calls")
        return probe.layers[0]


_loaded_modules: WeakKeyDictionary[Any, MtpModules] = WeakKeyDictionary()


def brought(model: TransformersModel) -> MtpModules:
    """The MTP modules of a model with ``num_mtp_layers`` in its config, loaded once. Raises ModelError."""
    if model.model not in _loaded_modules:
        _loaded_modules[model.model] = MtpModules(model, _load(model.model))
    return _loaded_modules[model.model]


def _load(model: Any) -> Any:
    folder = model.config.name_or_path
    if not folder or not Path(folder).is_dir():
        raise ModelError("MTP modules are loaded from the folder of a model, and this model has none")
    try:
        return MtpModel.from_pretrained(model, device_map={"": model.device})
    except Exception as error:  # of torch, transformers, safetensors
        raise ModelError(f"cannot load the MTP modules in {folder}: {one_line(error)}") from error
