"""Llama in NumPy, for small models: no torch, loads in milliseconds. Also the reference for the torch runtime.

Reads a folder in the Transformers format (config.json, model.safetensors). It supports the plain Llama architecture
only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.models.cpu_operations import one_thread
from nucleate.models.model_files import positive, positive_integer, read_config, stored_dtypes
from nucleate.models.protocol import ModelError

Floats = NDArray[np.float32]


DTYPES = ("BF16", "F16", "F32")
"""Types of weights that are converted to float32, as safetensors names them."""


class LlamaLayer(NamedTuple):
    """The weights of one layer; matrices are [in, out]; those with the same input are concatenated."""

    attention_norm: Floats
    query_key_value: Floats
    attention_out: Floats
    mlp_norm: Floats
    gate_up: Floats
    down: Floats


def unsupported_reason(folder: Path) -> str | None:
    """The reason why the numpy runtime does not support the model in a folder; None if it does."""
    config = read_config(folder / "config.json")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        return f"rope_parameters in config.json is not an object: {rope!r:.60}"
    if config.get("model_type") != "llama":
        return f"the architecture is {config.get('model_type')!r}, not 'llama'"
    if config.get("attention_bias") or config.get("mlp_bias") or config.get("hidden_act", "silu") != "silu":
        return "it has biases, or an activation other than SiLU"
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return "it uses RoPE scaling"
    return _unsupported_weights(folder, config.get("quantization_config"))


def _unsupported_weights(folder: Path, quantization: Any) -> str | None:
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        return f"its weights are quantized ({method!s:.40})"
    if not (folder / "model.safetensors").is_file():
        return "its weights are not in one model.safetensors"
    if unsupported := {*stored_dtypes(folder / "model.safetensors").values()} - {*DTYPES}:
        return f"its weights have the type {', '.join(sorted(unsupported))}, not {', '.join(DTYPES)}"
    return None


class Llama:
    """A Llama model in float32. Raises ModelError for a model that it does not support, see ``unsupported_reason``."""

    runtime = "numpy float32"

    def __init__(self, folder: Path) -> None:
        if (reason := unsupported_reason(folder)) is not None:
            raise ModelError(f"the numpy runtime does not support the model in {folder}: {reason}")
        self.folder: Path | None = folder
        config = read_config(folder / "config.json")
        try:
            self._build(config, read(folder / "model.safetensors"))
        except ModelError as error:
            raise ModelError(f"cannot load the model in {folder}: {error}") from None

    @classmethod
    def of(cls, config: dict[str, Any], tensors: Mapping[str, Floats]) -> Llama:
        """A model from the contents of config.json and model.safetensors, without a folder. Raises ModelError."""
        model = cls.__new__(cls)
        model.folder = None
        model._build(config, tensors)  # noqa: SLF001
        return model

    def _build(self, config: dict[str, Any], tensors: Mapping[str, Floats]) -> None:
        self.hidden_size = positive_integer(config, "hidden_size")
        self.heads = positive_integer(config, "num_attention_heads")
        self.kv_heads = positive_integer(config, "num_key_value_heads", self.heads)
        self.head_size = positive_integer(config, "head_dim", self.hidden_size // self.heads)
        self.inner_size = positive_integer(config, "intermediate_size")
        self.epsilon = np.float32(positive(config, "rms_norm_eps"))
        self.vocab_size = positive_integer(config, "vocab_size")
        self.context_length = positive_integer(config, "max_position_embeddings")
        theta = positive({**config, **(config.get("rope_parameters") or {})}, "rope_theta", 10000.0)
        self.frequencies = theta ** -(np.arange(0, self.head_size, 2) / self.head_size)
        self.embedding = tensor(tensors, "model.embed_tokens", self.vocab_size, self.hidden_size)
        tied = config.get("tie_word_embeddings", False)
        unembedding = self.embedding if tied else tensor(tensors, "lm_head", self.vocab_size, self.hidden_size)
        self.unembedding = np.ascontiguousarray(unembedding.T)
        self.norm = tensor(tensors, "model.norm", self.hidden_size)
        layers = positive_integer(config, "num_hidden_layers")
        self.layers = [self._layer(tensors, f"model.layers.{i}.") for i in range(layers)]

    def _layer(self, tensors: Mapping[str, Floats], prefix: str) -> LlamaLayer:
        def matrix(size_in: int, size_out: Mapping[str, int]) -> Floats:
            parts = [tensor(tensors, f"{prefix}{name}_proj", size, size_in) for name, size in size_out.items()]
            return np.ascontiguousarray(np.concatenate(parts).T)

        hidden, inner = self.hidden_size, self.inner_size
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        return LlamaLayer(
            tensor(tensors, prefix + "input_layernorm", hidden),
            matrix(hidden, {"self_attn.q": query, "self_attn.k": key, "self_attn.v": key}),
            matrix(query, {"self_attn.o": hidden}),
            tensor(tensors, prefix + "post_attention_layernorm", hidden),
            matrix(hidden, {"mlp.gate": inner, "mlp.up": inner}),
            matrix(inner, {"mlp.down": hidden}),
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache per token."""
        return 2 * len(self.layers) * self.kv_heads * self.head_size * 4

    def begin(self) -> LlamaContext:
        return LlamaContext(self)

    def rotation(self, positions_T: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Cosines and sines of the rotary embedding: [T, half of the head size] each."""
        return rotation_of(self.frequencies, positions_T)

    def normalise(self, x: Floats, weight: Floats) -> Floats:
        """Root-mean-square normalisation of the rows of x."""
        scaled: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.epsilon) * weight
        return scaled


class LlamaContext:
    """One sequence, with its KV cache [layers, 2, kv heads, context length, head size].

    The system assigns memory when the cache is first written.
    """

    def __init__(self, model: Llama) -> None:
        self.model, self.length = model, 0
        self.cache = np.empty((len(model.layers), 2, model.kv_heads, model.context_length, model.head_size), np.float32)

    def forward(self, token_ids: Sequence[int]) -> Floats:
        """See ``DecodingContext.forward``. Raises ValueError for no tokens, invalid ids, or a full context."""
        with one_thread():
            return self._logits(self._forward(token_ids)[-1])

    def forward_all(self, token_ids: Sequence[int]) -> Floats:
        """See ``DecodingContext.forward_all``. The logits are computed row by row, bit-identical to ``forward``."""
        with one_thread():
            return np.stack([self._logits(x) for x in self._forward(token_ids)])

    def _logits(self, x: Floats) -> Floats:
        logits: Floats = self.model.normalise(x, self.model.norm) @ self.model.unembedding
        return logits

    def _forward(self, token_ids: Sequence[int]) -> Floats:
        """The hidden states after the last layer, [tokens, hidden size]."""
        model, count = self.model, len(token_ids)
        ids = np.asarray(token_ids, np.int64)
        if not count or ids.min() < 0 or ids.max() >= model.vocab_size:
            raise ValueError(f"forward needs one or more token ids in 0..{model.vocab_size - 1}")
        if self.length + count > model.context_length:
            raise ValueError(f"{self.length + count} tokens exceed the context length {model.context_length}")
        rotation = model.rotation(np.arange(self.length, self.length + count))
        x = model.embedding[ids]
        for index, layer in enumerate(model.layers):
            x = x + self._attend(index, model.normalise(x, layer.attention_norm) @ layer.query_key_value, rotation)
            gate, up = np.split(model.normalise(x, layer.mlp_norm) @ layer.gate_up, 2, axis=-1)
            with np.errstate(over="ignore"):  # exp(-gate) = inf gives the correct result, 0
                x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down
        self.length += count
        return x

    def _attend(self, index: int, projected: Floats, rotation: tuple[Floats, Floats]) -> Floats:
        """Store the keys and values of the new tokens, and compute causal attention."""
        model, count, start = self.model, len(projected), self.length
        split = projected.reshape(count, model.heads + 2 * model.kv_heads, model.head_size).swapaxes(0, 1)
        query, key, value = np.split(split, (model.heads, model.heads + model.kv_heads))
        self.cache[index, 0, :, start : start + count] = rotate(key, rotation)
        self.cache[index, 1, :, start : start + count] = value
        keys, values = self.cache[index, :, :, : start + count]
        grouped = rotate(query, rotation).reshape(
            model.kv_heads, -1, model.head_size
        )  # query heads that share a key head
        scores = grouped @ keys.swapaxes(1, 2) / np.float32(np.sqrt(model.head_size))
        if count > 1:
            future = np.arange(start + count) > np.arange(start, start + count)[:, None]
            scores = np.where(np.tile(future, (model.heads // model.kv_heads, 1)), np.float32(-np.inf), scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (weights / weights.sum(axis=-1, keepdims=True)) @ values
        heads = mixed.reshape(model.heads, count, model.head_size).swapaxes(0, 1).reshape(count, -1)
        out: Floats = heads @ model.layers[index].attention_out
        return out


def rotation_of(frequencies: Any, positions_T: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Cosines and sines of the rotary embedding with these frequencies [D / 2]: [T, D / 2] each."""
    angle = positions_T[:, None] * frequencies
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate(x: Floats, rotation: tuple[Floats, Floats]) -> Floats:
    """Rotary position embedding (arXiv 2104.09864) of [heads, tokens, head size]. Element i is paired with i + half."""
    cos, sin = rotation
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def tensor(tensors: Mapping[str, Floats], name: str, *shape: int) -> Floats:
    """A weight by name. Raises ModelError if it is missing or does not have the shape given by config.json."""
    found = tensors.get(f"{name}.weight")
    if found is None:
        raise ModelError(f"{name}.weight is missing")
    if found.shape != shape:
        raise ModelError(f"{name}.weight has the shape {found.shape}, config.json gives {shape}")
    return found


INTEGERS = {"I64": "<i8", "I32": "<i4", "BOOL": "?"}


def read(path: Path, *, integers: bool = False) -> dict[str, Any]:
    """The tensors of a safetensors file as float32. bfloat16 is the upper half of a float32.

    integers: also read tensors of integers, as they are. Raises ModelError.
    """
    from safetensors import SafetensorError, deserialize

    try:
        entries: list[tuple[str, dict[str, Any]]] = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ModelError(f"{path} is not a valid safetensors file: {error}") from None
    found = {}
    array: NDArray[Any]
    for name, entry in entries:
        data, dtype = entry["data"], entry["dtype"]
        if dtype == "BF16":
            array = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif dtype in ("F16", "F32"):
            array = np.frombuffer(data, dtype.replace("F16", "<f2").replace("F32", "<f4")).astype(np.float32)
        elif integers and dtype in INTEGERS:
            array = np.frombuffer(data, INTEGERS[dtype])
        else:
            raise ModelError(f"{path}: {name} has the type {dtype}; the numpy runtime supports {', '.join(DTYPES)}")
        found[name] = array.reshape(entry["shape"])
    return found
