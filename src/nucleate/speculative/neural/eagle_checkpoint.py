"""EAGLE-3 heads in their public layout, as vLLM, SGLang and SpecForge read and write them, for any target model.

A folder has config.json and ``model.safetensors`` or ``pytorch_model.bin``: ``fc``, one decoder layer (``midlayer`` or
``layers.0``), ``norm``, ``lm_head``, and ``d2t``, which maps the head's smaller vocabulary: draft token i is the token
i + d2t[i] of the target. Embeddings are the target's if the folder has none. The head runs in NumPy, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nucleate.models.cpu_operations import compiled_matmul as product
from nucleate.models.loader import download
from nucleate.models.model_files import positive, positive_integer, read_config
from nucleate.models.numpy_llama import Floats, Llama, read
from nucleate.models.protocol import Model, ModelError
from nucleate.models.transformers.transformers_model import EmbeddingRows, TransformersModel, read_pickled
from nucleate.speculative.draft import Proposer
from nucleate.speculative.neural.draft_head import MAX_CACHED_TOKENS, CapturedHiddenStates, rms_normalize
from nucleate.speculative.neural.eagle import Eagle

FILES = ("config.json", "model.safetensors", "pytorch_model.bin")
RENAMED = {
    "self_attn.q_proj": "query", "self_attn.k_proj": "key", "self_attn.v_proj": "value", "self_attn.o_proj": "out",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down",
}  # fmt: skip
"""Modules of the layer, and their names in ``DraftLayer``."""
LAYERS = "eagle_aux_hidden_state_layer_ids"


def load_eagle(given: Any, target: Model, tree_width: int) -> Callable[[], Proposer]:
    """A function that makes a proposer from a folder or Hugging Face id, for an engine.

    Raises ModelError for a folder that is not an EAGLE-3 head, or not one for a target of this size.
    """
    folder = Path(str(given)).expanduser()
    if not folder.is_dir():
        folder = download(str(given), patterns=FILES)
    checkpoint = EagleCheckpoint(folder, target)
    return lambda: PublicEagle(checkpoint, tree_width)


class EagleCheckpoint:
    """The weights and sizes of a head, with the names of ``Llama`` and ``Weights`` for what its layer reads."""

    def __init__(self, folder: Path, target: Model) -> None:
        config = read_config(folder / "config.json")
        tensors = self._tensors = _read(folder)
        self.folder = folder
        self.hidden_size = positive_integer(config, "hidden_size")
        self.epsilon = np.float32(positive(config, "rms_norm_eps", 1e-6))
        heads = positive_integer(config, "num_attention_heads")
        self.kv_heads = positive_integer(config, "num_key_value_heads", heads)
        self.head_size = positive_integer(config, "head_dim", self.hidden_size // heads)
        self.norm_before_residual = bool(config.get("norm_before_residual", False))
        rope = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise self._error(
                f"its rotary embedding is {rope.get('rope_type', rope.get('type'))}; only the default is known"
            )
        theta = positive(rope, "rope_theta", 10000.0)
        self.frequencies = theta ** -(np.arange(0, self.head_size, 2) / self.head_size)
        if positive_integer(config, "num_hidden_layers", 1) != 1:
            raise self._error("it has several layers; EAGLE-3 has one")
        found = next(
            (prefix for prefix in ("midlayer.", "layers.0.") if f"{prefix}hidden_norm.weight" in tensors), None
        )
        if found is None or "fc.weight" not in tensors:
            raise self._error("it has no fc and midlayer.hidden_norm, so it is not an EAGLE-3 head")
        if biased := [name for name in tensors if name.endswith("_proj.bias")]:
            raise self._error(f"its layer has biases ({biased[0]})")
        for theirs, name in RENAMED.items():
            tensors[f"layer.{name}.weight"] = self[f"{found}{theirs}.weight"]
        tensors["input_norm.weight"] = self[f"{found}input_layernorm.weight"]
        tensors["hidden_norm.weight"] = self[f"{found}hidden_norm.weight"]
        self._check(config, heads, target)

    def _check(self, config: Mapping[str, Any], heads: int, target: Model) -> None:
        """Whether the shapes fit each other and the target."""
        width, size = self.hidden_size, self.head_size
        num_layers, target_width, embedding = _facts(target)
        self.layers = tuple(
            (config.get("eagle_config") or {}).get(LAYERS) or config.get(LAYERS) or default_layers(num_layers)
        )
        shapes = {
            "fc": (width, len(self.layers) * target_width), "norm": (width,),
            "layer.query": (heads * size, 2 * width), "layer.key": (self.kv_heads * size, 2 * width),
            "layer.value": (self.kv_heads * size, 2 * width), "layer.out": (width, heads * size),
            "input_norm": (width,), "hidden_norm": (width,), "layer.mlp_norm": (width,),
        }  # fmt: skip
        for name, shape in shapes.items():
            if self[f"{name}.weight"].shape != shape:
                raise self._error(f"{name} has the shape {self[f'{name}.weight'].shape}, this target needs {shape}")
        own = next(
            (
                self._tensors[name]
                for name in ("embed_tokens.weight", "model.embed_tokens.weight")
                if name in self._tensors
            ),
            None,
        )
        self.embedding = embedding if own is None else own
        if self.embedding.shape[1] != width:
            raise self._error(f"its hidden size is {width}, that of the target's embeddings {self.embedding.shape[1]}")
        if len(self.embedding.shape) != 2 or self.embedding.shape[0] < target.vocab_size:
            raise self._error(
                f"it has {self.embedding.shape[0]} embeddings for {target.vocab_size} tokens of the target"
            )
        if "lm_head.weight" not in self._tensors or self["lm_head.weight"].shape[1:] != (width,):
            raise self._error("it has no lm_head of its hidden size")
        inner = self["layer.down.weight"].shape[-1]
        if any(self[f"layer.{name}.weight"].shape != (inner, width) for name in ("gate", "up")):
            raise self._error("the shapes of its MLP do not fit each other")
        self.unembedding, self.vocab_size = self.matrix("lm_head"), target.vocab_size
        count = self.unembedding.shape[1]
        offsets = self._tensors.get("d2t", np.zeros(count, np.int64))
        self.target_ids = np.arange(count) + offsets
        if len(offsets) != count or self.target_ids.min() < 0 or self.target_ids.max() >= target.vocab_size:
            raise self._error(f"d2t does not map its {count} tokens to the {target.vocab_size} of the target")

    def _error(self, what: str) -> ModelError:
        return ModelError(f"cannot use the draft head in {self.folder}: {what}")

    def __getitem__(self, name: str) -> Floats:
        if name not in self._tensors:
            raise self._error(f"{name} is missing")
        found: Floats = self._tensors[name]
        return found

    def matrix(self, *names: str) -> Floats:
        """See ``Weights.matrix``."""
        return np.ascontiguousarray(np.concatenate([self[f"{name}.weight"] for name in names]).T)

    def rotation(self, positions_T: Any) -> tuple[Floats, Floats]:
        """See ``Llama.rotation``."""
        angle = positions_T[:, None] * self.frequencies
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


class PublicEagle(Eagle):
    """See ``Proposer``."""

    names = ("fc", "input_norm", "hidden_norm")

    def __init__(self, checkpoint: EagleCheckpoint, tree_width: int = 1, tokens: int = MAX_CACHED_TOKENS) -> None:
        super().__init__(checkpoint, checkpoint, tree_width, tokens)  # type: ignore[arg-type]
        self.layers, self._checkpoint = checkpoint.layers, checkpoint
        self._new_captured = partial(CapturedHiddenStates, _as_array, np.concatenate)
        self._all = len(checkpoint.target_ids) == checkpoint.vocab_size and not np.any(
            np.diff(checkpoint.target_ids) - 1
        )

    def _fused(self, hidden_TF: Floats) -> Floats:
        return product(hidden_TF, self._fuse)

    def _residual(self, x_TX: Floats) -> Floats:
        if not self._checkpoint.norm_before_residual:
            return x_TX
        normalized: Floats = rms_normalize(x_TX, self._checkpoint.epsilon) * self._hidden_norm
        return normalized

    def _logits(self, x_RX: Floats) -> Floats:
        logits_RD = super()._logits(x_RX)
        if self._all:
            return logits_RD
        logits_RV = np.full((len(x_RX), self._checkpoint.vocab_size), -np.inf, np.float32)
        logits_RV[:, self._checkpoint.target_ids] = logits_RD
        return logits_RV


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs an EAGLE-3 head reads if its config does not say."""
    return 2, num_layers // 2, num_layers - 3


def _as_array(states_TF: Any) -> Floats:
    """A copy of hidden states, which are tensors on a GPU."""
    return np.array(states_TF.cpu() if hasattr(states_TF, "cpu") else states_TF, np.float32)


def _facts(target: Model) -> tuple[int, int, Any]:
    """The number of layers, the hidden size and the embeddings of a target. Raises ModelError."""
    if isinstance(target, Llama):
        return len(target.layers), target.hidden_size, target.embedding
    if isinstance(target, TransformersModel):
        text = target.model.config.get_text_config()
        return (
            text.num_hidden_layers,
            text.hidden_size,
            EmbeddingRows(target.model.get_input_embeddings().weight.detach()),
        )
    raise ModelError(f"an EAGLE-3 head needs a target whose hidden states can be read, not one on {target.runtime}")


def _read(folder: Path) -> dict[str, Any]:
    """The tensors of a folder by name, floats as float32."""
    if (folder / "model.safetensors").is_file():
        return read(folder / "model.safetensors", integers=True)
    path = folder / "pytorch_model.bin"
    if not path.is_file():
        raise ModelError(f"{folder} has neither model.safetensors nor pytorch_model.bin")
    return read_pickled(path)
