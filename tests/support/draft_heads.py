"""Draft heads with random weights in their public layouts, written to folders.

Their logits prefer some tokens, so that drafts are accepted now and then.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]

WIDTH, HEADS, KV_HEADS, SIZE, INNER, DRAFT_TOKENS = 48, 4, 2, 16, 64, 300
EPSILON, THETA = 1e-5, 500.0
EAGLE_CONFIG = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "rms_norm_eps": EPSILON,
}
EAGLE_CONFIG |= {"num_hidden_layers": 1, "rope_theta": THETA, "rope_scaling": None}


def matrix(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.normal(size=(rows, columns), scale=columns**-0.5).astype(np.float32)


def norm(rng: np.random.Generator, width: int) -> np.ndarray:
    return rng.normal(1, 0.1, width).astype(np.float32)


def layer(rng: np.random.Generator, prefix: str, width: int, width_in: int) -> Tensors:
    return {
        f"{prefix}self_attn.q_proj.weight": matrix(rng, HEADS * SIZE, width_in),
        f"{prefix}self_attn.k_proj.weight": matrix(rng, KV_HEADS * SIZE, width_in),
        f"{prefix}self_attn.v_proj.weight": matrix(rng, KV_HEADS * SIZE, width_in),
        f"{prefix}self_attn.o_proj.weight": matrix(rng, width, HEADS * SIZE),
        f"{prefix}mlp.gate_proj.weight": matrix(rng, INNER, width),
        f"{prefix}mlp.up_proj.weight": matrix(rng, INNER, width),
        f"{prefix}mlp.down_proj.weight": matrix(rng, width, INNER),
        f"{prefix}post_attention_layernorm.weight": norm(rng, width),
    }


def attention_biases(tensors: Tensors) -> Tensors:
    """The tensors with biases for the attention of their layer."""
    rng = np.random.default_rng(1)
    names = [name.removesuffix("weight") for name in tensors if ".self_attn." in name]
    return tensors | {f"{name}bias": matrix(rng, 1, len(tensors[f"{name}weight"]))[0] * 4 for name in names}


def draft_tokens(rng: np.random.Generator, vocab_size: int) -> np.ndarray:
    """The tokens of the target that a head can draft, in order."""
    return np.sort(rng.choice(vocab_size, DRAFT_TOKENS, replace=False)).astype(np.int64)


def eagle3(target: Any, prefix: str = "midlayer.", *, own: bool = False) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors. own: with embeddings of its own, of another width than the target's."""
    rng, width = np.random.default_rng(0), WIDTH if own else target.hidden_size
    ids = draft_tokens(rng, target.vocab_size)
    tensors = {
        "fc.weight": matrix(rng, width, 3 * target.hidden_size),
        "norm.weight": norm(rng, width),
        "lm_head.weight": matrix(rng, DRAFT_TOKENS, width) * 3,
        "d2t": ids - np.arange(DRAFT_TOKENS),
        "t2d": np.isin(np.arange(target.vocab_size), ids),
        f"{prefix}input_layernorm.weight": norm(rng, width),
        f"{prefix}hidden_norm.weight": norm(rng, width),
    } | layer(rng, prefix, width, 2 * width)
    if own:
        tensors["embed_tokens.weight"] = matrix(rng, target.vocab_size, width)
    return {**EAGLE_CONFIG, "hidden_size": width, "draft_vocab_size": DRAFT_TOKENS}, tensors


def eagle1(target: Any, *, own: bool = False, bias: bool = True) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors. own: with embeddings of its own."""
    rng, width = np.random.default_rng(0), target.hidden_size
    tensors = {"fc.weight": matrix(rng, width, 2 * width)} | layer(rng, "layers.0.", width, width)
    if bias:
        tensors["fc.bias"] = matrix(rng, 1, width)[0]
    if own:
        tensors["embed_tokens.weight"] = matrix(rng, target.vocab_size, width)
    return {**EAGLE_CONFIG, "hidden_size": width, "architectures": ["LlamaForCausalLMEagle"]}, tensors


def medusa(target: Any, layout: str = "medusa", *, blocks: int = 2, heads: int = 3) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors. layout: "medusa", "vllm", "vllm, shared" (one unembedding) or "vllm, map" (token_map)."""
    rng, width = np.random.default_rng(0), target.hidden_size
    tensors: Tensors = {}
    config: dict[str, Any] = {"medusa_num_heads": heads, "medusa_num_layers": blocks}
    names = (
        ("{}.{}.linear", f"{{}}.{blocks}")
        if layout == "medusa"
        else ("medusa_heads.blocks.{}.layers.{}", "lm_heads.{}")
    )
    size = target.vocab_size
    if layout == "vllm, map":
        tensors["token_map"] = draft_tokens(rng, size)
        size, config["truncated_vocab_size"] = DRAFT_TOKENS, DRAFT_TOKENS
    for head in range(heads):
        for block in range(blocks):
            name = names[0].format(head, block)
            tensors[f"{name}.weight"] = matrix(rng, width, width)
            if layout == "medusa":
                tensors[f"{name}.bias"] = matrix(rng, 1, width)[0]
        if not head or layout != "vllm, shared":
            tensors[f"{names[1].format(head)}.weight"] = matrix(rng, size, width)
    if layout == "vllm, shared":
        config["original_lm_head"] = True
    return config, tensors


def write(
    folder: Path, config: dict[str, Any], tensors: Tensors, file: str = "model.safetensors", **changes: Any
) -> Tensors:
    """Write a head. file: its name; one that does not end with "safetensors" is a file of torch."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    if file.endswith("safetensors"):
        save_file(tensors, folder / file)
    else:
        import torch

        torch.save({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, folder / file)
    return tensors


LAYOUTS: dict[str, tuple[str, Callable[[Any], tuple[dict[str, Any], Tensors]], str]] = {
    "eagle3": ("eagle", eagle3, "model.safetensors"),
    "eagle1": ("eagle", eagle1, "pytorch_model.bin"),
    "medusa": ("medusa", medusa, "medusa_lm_head.pt"),
    "medusa of vllm": ("medusa", lambda target: medusa(target, "vllm, map"), "model.safetensors"),
}
"""Method, function that makes config and tensors for a target, and file."""


def plain_norm(x: Any, weight: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weight


def plain_layer(w: Tensors, inputs: list[Any], residual: Any) -> Any:
    """The output of the layer for the last of its inputs, in float64. w: its weights without prefix."""

    def rotate(x: Any, position: int) -> Any:
        angle = position * THETA ** -(np.arange(0, SIZE, 2) / SIZE)
        first, second = np.split(x, 2, -1)
        return np.concatenate(
            [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], -1
        )

    def linear(name: str, y: Any) -> Any:
        return w[f"self_attn.{name}"] @ y + w.get(f"self_attn.{name}.bias", 0.0)

    query = rotate(linear("q_proj", inputs[-1]).reshape(HEADS, SIZE), len(inputs) - 1)
    keys = np.stack([rotate(linear("k_proj", y).reshape(KV_HEADS, SIZE), i) for i, y in enumerate(inputs)])
    values = np.stack([linear("v_proj", y).reshape(KV_HEADS, SIZE) for y in inputs])
    mixed = []
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = keys[:, group] @ query[head] * SIZE**-0.5
        weights = np.exp(scores - scores.max())
        mixed.append(weights @ values[:, group] / weights.sum())
    x = residual + linear("o_proj", np.concatenate(mixed))
    y = plain_norm(x, w["post_attention_layernorm"])
    gate = w["mlp.gate_proj"] @ y
    return x + w["mlp.down_proj"] @ (gate / (1 + np.exp(-gate)) * (w["mlp.up_proj"] @ y))
