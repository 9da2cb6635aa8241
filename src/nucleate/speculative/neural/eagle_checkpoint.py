"""EAGLE heads in their public layouts, as EAGLE, vLLM, SGLang and SpecForge read and write them, for any target model.

EAGLE-1, which EAGLE-2 also uses: ``fc`` joins the embedding of a token with the target's last hidden state of the
token before, and one decoder layer (``layers.0``, without an input norm) predicts the next hidden state, which the
target unembeds.

EAGLE-3: ``fc`` joins the hidden states of three layers; one decoder layer (``midlayer`` or ``layers.0``) has two input
norms, one of them ``hidden_norm``, and ``norm`` and ``lm_head`` follow. ``d2t`` maps the smaller vocabulary of the
head: its token i is the token i + d2t[i] of the target.

Both: the attention may have biases; embeddings are the target's if the folder has none. What the folder holds decides
which of them it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from nucleate.models.cpu_operations import compiled_matmul as product
from nucleate.models.model_files import positive, positive_integer
from nucleate.models.numpy_llama import Floats, rotation_of
from nucleate.models.paged_cache import BatchLayout
from nucleate.models.protocol import Model
from nucleate.speculative.draft import Proposer
from nucleate.speculative.neural.draft_checkpoint import Checkpoint, DraftVocabulary, TargetParts
from nucleate.speculative.neural.draft_head import MAX_CACHED_TOKENS, CapturedHiddenStates, as_array, rms_normalize
from nucleate.speculative.neural.eagle import Eagle

RENAMED = {
    "input_layernorm": "input_norm", "hidden_norm": "hidden_norm",
    "self_attn.q_proj": "query", "self_attn.k_proj": "key", "self_attn.v_proj": "value", "self_attn.o_proj": "out",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down",
}  # fmt: skip
"""Modules of the layer, and their names in ``DraftLayer`` and ``PublicEagle3``."""
PREFIXES = ("midlayer.", "layers.0.")
OTHERS = {"hidden_act": "silu", "fc_norm": False, "norm_output": False, "add_para_norm": False}
"""Fields of configs that stand for another computation, and the value that stands for this one."""
LAYERS = "eagle_aux_hidden_state_layer_ids"
UNEMBEDDING = "lm_head.weight"


def load_eagle(given: Any, target: Model, tree_width: int) -> Callable[[], Proposer]:
    """A function that makes a proposer from a folder or Hugging Face id, for an engine.

    Raises ModelError for a folder that is not an EAGLE head, or not one for a target of this size.
    """
    checkpoint = EagleCheckpoint(given, TargetParts(target))
    kind = PublicEagle3 if checkpoint.is_eagle3 else PublicEagle1
    return lambda: kind(checkpoint, tree_width)


class EagleCheckpoint(Checkpoint):
    """The weights and sizes of a head, with the names of ``Llama`` for what its layer reads."""

    def __init__(self, given: Any, target: TargetParts) -> None:
        super().__init__(given)
        self.target, self.vocab_size, config = target, target.vocab_size, self.config
        self.hidden_size = positive_integer(config, "hidden_size")
        self.epsilon = np.float32(positive(config, "rms_norm_eps", 1e-6))
        self.heads = positive_integer(config, "num_attention_heads")
        self.kv_heads = positive_integer(config, "num_key_value_heads", self.heads)
        self.head_size = positive_integer(config, "head_dim", self.hidden_size // self.heads)
        rope = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise self.error(f"its rotary embedding is {kind}; default and llama3 are known")
        self.rotation = partial(rotation_of, frequencies(rope, self.head_size, scaled=kind == "llama3"))
        for name, value in OTHERS.items():
            if config.get(name, value) not in (value, None):
                raise self.error(f"{name} is {config[name]!r:.60} in its config; only {value!r} is known")
        if positive_integer(config, "num_hidden_layers", 1) != 1:
            raise self.error("it has several layers; EAGLE has one")
        self.rename({"model.embed_tokens.": "embed_tokens."})
        prefix = next((each for each in PREFIXES if f"{each}self_attn.q_proj.weight" in self), None)
        if "fc.weight" not in self or prefix is None:
            raise self.error("it has no fc and layers.0 or midlayer, so it is not an EAGLE head")
        self.is_eagle3 = f"{prefix}hidden_norm.weight" in self
        own = "embed_tokens.weight" in self
        self.embedding = self["embed_tokens.weight"] if own else target.embedding
        if len(self.embedding.shape) != 2 or self.embedding.shape[0] < target.vocab_size:
            raise self.error(
                f"it has {self.embedding.shape[0]} embeddings for {target.vocab_size} tokens of the target"
            )
        if self.embedding.shape[1] != self.hidden_size:
            whose = "its" if own else "the target's"
            size = self.embedding.shape[1]
            raise self.error(f"its hidden size is {self.hidden_size}, that of {whose} embeddings {size}")
        (self._check_eagle3 if self.is_eagle3 else self._check_eagle1)(prefix)
        self.rename({f"{prefix}{theirs}.": f"layer.{name}." for theirs, name in RENAMED.items()})

    def _check_eagle1(self, prefix: str) -> None:
        width = self.target.hidden_size
        if self.hidden_size != width:
            raise self.error(f"its hidden size is {self.hidden_size}, that of the target {width}")
        self.layers: tuple[int, ...] = (self.target.num_layers,)
        self.check_shapes({"fc.weight": (width, 2 * width)} | ({"fc.bias": (width,)} if "fc.bias" in self else {}))
        self.fc_bias = self["fc.bias"] if "fc.bias" in self else np.zeros(width, np.float32)
        self._check_layer(prefix, width)
        self.check_unused(UNEMBEDDING)  # a copy of the target's
        self.target.normalize(np.zeros((1, width), np.float32))  # fail here rather than in the first request

    def _check_eagle3(self, prefix: str) -> None:
        width, config, count = self.hidden_size, self.config, self.target.num_layers
        found = (config.get("eagle_config") or {}).get(LAYERS) or config.get(LAYERS) or default_layers(count)
        self.layers = tuple(found)
        self.norm_before_residual = bool(config.get("norm_before_residual", False))
        norms = ("norm", f"{prefix}input_layernorm", f"{prefix}hidden_norm")
        self.check_shapes({"fc.weight": (width, len(self.layers) * self.target.hidden_size)})
        self.check_shapes({f"{name}.weight": (width,) for name in norms})
        self._check_layer(prefix, 2 * width)
        if UNEMBEDDING not in self or self[UNEMBEDDING].shape[1:] != (width,):
            raise self.error("it has no lm_head of its hidden size")
        self.unembedding = self.matrix("lm_head")
        size = self.unembedding.shape[1]
        offsets = self["d2t"] if "d2t" in self else np.zeros(size, np.int64)
        if len(offsets) != size:
            raise self.error(f"d2t has {len(offsets)} entries for the {size} tokens of lm_head")
        self.vocabulary = DraftVocabulary(self, "d2t", np.arange(size) + offsets, self.vocab_size)
        self.check_unused()

    def _check_layer(self, prefix: str, width_in: int) -> None:
        width, query, key = self.hidden_size, self.heads * self.head_size, self.kv_heads * self.head_size
        inner = self[f"{prefix}mlp.up_proj.weight"].shape[0]
        shapes = {
            "self_attn.q_proj": (query, width_in), "self_attn.k_proj": (key, width_in),
            "self_attn.v_proj": (key, width_in), "self_attn.o_proj": (width, query),
            "post_attention_layernorm": (width,), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }  # fmt: skip
        self.check_shapes({f"{prefix}{name}.weight": shape for name, shape in shapes.items()})
        biases = {f"{prefix}{name}.bias": shape[:1] for name, shape in shapes.items() if "self_attn" in name}
        self.check_shapes({name: shape for name, shape in biases.items() if name in self})


class PublicEagle(Eagle):
    """See ``Proposer``. The parts of ``PublicEagle1`` and ``PublicEagle3`` that are the same."""

    def __init__(self, checkpoint: EagleCheckpoint, tree_width: int = 1, tokens: int = MAX_CACHED_TOKENS) -> None:
        super().__init__(checkpoint, checkpoint, tree_width, tokens)  # type: ignore[arg-type]
        self.layers, self._checkpoint = checkpoint.layers, checkpoint
        self._new_captured = partial(CapturedHiddenStates, as_array, np.concatenate)


class PublicEagle1(PublicEagle):
    """See ``Proposer``. Its hidden states are those after the target's final norm."""

    names = ("fc",)

    def _fused(self, hidden_TF: Floats) -> Floats:
        return self._checkpoint.target.normalize(hidden_TF)

    def _layer_input(self, layout: BatchLayout, x_TX: Floats) -> Floats:
        joined_TY = np.concatenate([self._checkpoint.embedding[layout.ids_T], x_TX], axis=1)
        return product(joined_TY, self._fuse) + self._checkpoint.fc_bias

    def _residual(self, input_TY: Floats, x_TX: Floats) -> Floats:
        return input_TY

    def _logits(self, x_RX: Floats) -> Floats:
        return self._checkpoint.target.logits(x_RX)


class PublicEagle3(PublicEagle):
    """See ``Proposer``."""

    names = ("fc", "layer.input_norm", "layer.hidden_norm", "norm")

    def _fused(self, hidden_TF: Floats) -> Floats:
        return product(hidden_TF, self._fuse)

    def _residual(self, input_TY: Floats, x_TX: Floats) -> Floats:
        if not self._checkpoint.norm_before_residual:
            return x_TX
        normalized: Floats = rms_normalize(x_TX, self._checkpoint.epsilon) * self._norms[1]
        return normalized

    def _logits(self, x_RX: Floats) -> Floats:
        return self._checkpoint.vocabulary.logits(super()._logits(x_RX))


def frequencies(rope: dict[str, Any], head_size: int, *, scaled: bool) -> Any:
    """The frequencies of the rotary embedding [head_size / 2]. scaled: as of Llama 3.1, long wavelengths are longer.

    Raises ModelError for invalid parameters.
    """
    plain = positive(rope, "rope_theta", 10000.0) ** -(np.arange(0, head_size, 2) / head_size)
    if not scaled:
        return plain
    factor, low, high = (positive(rope, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = positive(rope, "original_max_position_embeddings") * plain / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return plain * (kept + (1 - kept) / factor)


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs an EAGLE-3 head reads if its config does not say."""
    return 2, num_layers // 2, num_layers - 3
