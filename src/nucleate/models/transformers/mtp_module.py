"""Multi-token prediction (MTP) modules of a Transformers model: loaded and batched.

From the hidden state of a token and a later token, a module predicts the hidden state of the later one (DeepSeek-V3,
arXiv 2412.19437, section 2.2). The modules are those of Transformers (``MtpModel``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import MtpModel

from nucleate.models.model_files import stored_dtypes
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


class MtpLayout(NamedTuple):
    """A public layout of the modules in a model folder."""

    modules: str  #: regex of the names of their tensors, with the number of the module
    tensors: str  #: regex of the names of all tensors
    hidden_states_first: bool = False  #: whether hidden states come before embeddings in the input of the projection


MIMO_NAMES = {
    rf"^mtp_layers\.(\d+)\.{theirs}": rf"layers.\1.{ours}"
    for theirs, ours in (
        ("token_layernorm", "enorm"),
        ("hidden_layernorm", "hnorm"),
        ("final_layernorm", "post_norm"),
        ("(?:input_proj|eh_proj)", "eh_proj"),
        ("", "mtp_block."),
    )
}
"""Names of MiMo, and those of Transformers for the same. The other layouts are known to Transformers."""


def find_layout(folder: Path, num_layers: int) -> tuple[MtpLayout, int] | None:
    """The layout of the MTP modules in the folder of a model with so many layers, and the number of modules.

    DeepSeek-V3 and GLM have them as further layers, Qwen3-Next and Mellum under ``mtp``, MiMo under
    ``model.mtp_layers``. None: none of these.
    """
    names = [name for path in sorted(folder.glob("*.safetensors")) for name in stored_dtypes(path)]
    further = {int(found[1]) for name in names if (found := re.match(r"model\.layers\.(\d+)\.eh_proj\.", name))}
    later = "|".join(str(number) for number in sorted(further) if number >= num_layers)
    layouts = [
        MtpLayout(r"^mtp\.layers\.(\d+)\.", r"^mtp\."),
        MtpLayout(r"^model\.mtp_layers\.(\d+)\.", r"^model\.mtp_layers\.", hidden_states_first=True),
    ]
    if later:
        layouts.insert(0, MtpLayout(rf"^model\.layers\.({later})\.", rf"^model\.layers\.(?:{later})\."))
    for layout in layouts:
        if count := len({found[1] for name in names if (found := re.match(layout.modules, name))}):
            return layout, count
    return None


_loaded_modules: WeakKeyDictionary[Any, MtpModules] = WeakKeyDictionary()


def brought(model: TransformersModel) -> MtpModules:
    """The MTP modules in the folder of a model, loaded once. Raises ModelError."""
    if model.model not in _loaded_modules:
        _loaded_modules[model.model] = MtpModules(model, _load(model.model))
    return _loaded_modules[model.model]


def has_modules(model: Any) -> bool:
    """Whether a Transformers model has MTP modules: according to its config, or in its folder in a public layout."""
    config = model.config.get_text_config()
    if getattr(config, "num_mtp_layers", None):
        return True
    folder = model.config.name_or_path
    return bool(folder) and find_layout(Path(folder), config.num_hidden_layers) is not None


class CheckedMtpModel(MtpModel):  # type: ignore[misc]
    """That of Transformers, but a tensor of another shape is an error; there, it is replaced by a random one."""

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        for name, found, expected in sorted(loading_info.mismatched_keys):
            raise ModelError(f"{name} has the shape {tuple(found)}, the model needs {tuple(expected)}")
        super()._adjust_missing_and_unexpected_keys(loading_info)


CheckedMtpModel.__name__, CheckedMtpModel.__module__ = MtpModel.__name__, MtpModel.__module__
"""By these, Transformers finds the conversions of weights."""


def _load(model: Any) -> Any:
    folder = model.config.name_or_path
    if not folder or not Path(folder).is_dir():
        raise ModelError("MTP modules are loaded from the folder of a model, and this model has none")
    found = find_layout(Path(folder), model.config.get_text_config().num_hidden_layers)
    try:
        if found is not None:
            _declare(model, *found)
        return CheckedMtpModel.from_pretrained(model, device_map={"": model.device})
    except Exception as error:  # of torch, transformers, safetensors
        raise ModelError(f"cannot load the MTP modules in {folder}: {one_line(error)}") from error


def _declare(model: Any, layout: MtpLayout, count: int) -> None:
    """Tell Transformers what it needs to load the modules of a model; it knows this only for some models."""
    config = model.config.get_text_config()
    if not getattr(config, "num_mtp_layers", None):
        config.num_mtp_layers = count
    for name, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if getattr(config, name, None) is not None and getattr(config, f"mtp_{name}", None) is None:
            setattr(config, f"mtp_{name}", [kind] * count)
    model._keys_to_ignore_on_load_unexpected = [layout.tensors]  # noqa: SLF001 - the names that Transformers loads
    if layout.hidden_states_first:
        config.mtp_hidden_states_first = True
        known = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [*known, *(WeightRenaming(*pair) for pair in MIMO_NAMES.items())]  # noqa: SLF001
