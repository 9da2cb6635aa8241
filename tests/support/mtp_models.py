"""Small models with random weights and MTP modules, in memory and in folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from nucleate.models.transformers.mtp_module import MtpModules
from nucleate.models.transformers.transformers_model import TransformersModel

SIZE = 199
SMALL: dict[str, Any] = dict(
    vocab_size=SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, bos_token_id=0, eos_token_id=1,
    pad_token_id=0, head_dim=16, num_experts_per_tok=2, moe_intermediate_size=32,
)  # fmt: skip
ROUTED = dict(n_routed_experts=3, n_group=1, topk_group=1, first_k_dense_replace=1)
LATENT = dict(
    num_key_value_heads=4, head_dim=8, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16,
    v_head_dim=16,
)  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": ("Glm4MoeConfig", {**SMALL, **ROUTED}),
    "mellum": (  # its module uses a sliding window
        "MellumConfig",
        dict(
            SMALL, num_experts=3, num_mtp_layers=1, sliding_window=11,
            layer_types=["full_attention", "sliding_attention"],
        ),
    ),
    "deepseek_v3": ("DeepseekV3Config", {**SMALL, **ROUTED, **LATENT, "num_mtp_layers": 1}),
    "deepseek_v3, 3": ("DeepseekV3Config", {**SMALL, **ROUTED, **LATENT, "num_mtp_layers": 3}),
}  # fmt: skip

PLAIN = dict(SMALL, num_mtp_layers=1, mtp_layer_types=["full_attention"])
FAMILIES["qwen3"] = ("Qwen3Config", PLAIN)
FAMILIES["qwen2"] = ("Qwen2Config", {**PLAIN, "mtp_hidden_states_first": True})
"""Transformers has no modules for these two. Saved in the layouts of Qwen3-Next and MiMo."""

LONE = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
"""Names of Mellum and Qwen3-Next for the module's weights outside its block."""
MIMO = {
    "eh_proj": "input_proj",
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "post_norm": "final_layernorm",
}


def stock_of(family: str, seed: int = 0, **more: Any) -> tuple[Any, Any]:
    """A model and its modules from Transformers. Norm weights are random."""
    config, settings = FAMILIES[family]
    torch.manual_seed(seed)
    made = getattr(transformers, config)(**{**settings, **more})
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    modules = MtpModel(model, made.num_mtp_layers).eval()
    for weight in modules.layers.parameters():  # Transformers leaves some of them uninitialized
        torch.nn.init.normal_(weight, std=0.2)
    for name, weight in [*model.named_parameters(), *modules.layers.named_parameters()]:
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    return model, modules


def predictable_of(family: str, scale: float, **more: Any) -> tuple[Any, Any]:
    """The same, but the next token depends mostly on the last one, also in the modules (scale 0: only on it)."""
    model, modules = stock_of(family, **more)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *modules.layers.named_parameters()]:
            if "norm" in name:
                weight.fill_(1.0)
            elif "o_proj" in name or "down_proj" in name:
                weight.mul_(scale)
        model.get_input_embeddings().weight[0] = 0.1  # the padding row was zero
        for layer in modules.layers:
            layer.eh_proj.weight.mul_(scale)
            parts = layer.eh_proj.weight.chunk(2, dim=1)
            parts[getattr(model.config, "mtp_hidden_states_first", False)].add_(torch.eye(model.config.hidden_size))
    return model, modules


def modules_of(model: Any, modules: Any) -> MtpModules:
    return MtpModules(TransformersModel.of(model), modules)


def save(model: Any, modules: Any, folder: Path) -> None:
    """Save a model with the weight names of published checkpoints: separate experts and modules."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    first = model.config.num_hidden_layers
    for name, tensor in modules.state_dict().items():
        if not name.startswith("layers."):
            continue  # shared with the model
        _, number, rest = name.split(".", 2)
        rest = rest.removeprefix("mtp_block.")
        kind, _, end = rest.partition(".")
        if model.config.model_type == "qwen2":
            prefix, rest = f"model.mtp_layers.{number}.", f"{MIMO.get(kind, kind)}.{end}"
        elif model.config.model_type in ("mellum", "qwen3"):
            prefix, rest = ("mtp.", f"{LONE[kind]}.{end}") if kind in LONE else ("mtp.layers.0.", rest)
        else:
            prefix, rest = f"model.layers.{first + int(number)}.", rest.replace("post_norm", "shared_head.norm")
        if rest.startswith("shared_head") or "experts." not in rest or "shared_experts" in rest:
            tensors[prefix + rest] = tensor.clone()
            continue
        for expert, own in enumerate(tensor):
            before = f"{prefix}mlp.experts.{expert}."
            if rest.endswith("gate_up_proj"):
                gate, up = own.chunk(2)
                tensors[before + "gate_proj.weight"], tensors[before + "up_proj.weight"] = gate.clone(), up.clone()
            else:
                tensors[before + "down_proj.weight"] = own.clone()
    if model.config.model_type == "glm4_moe":  # copies of what is shared with the model
        tensors[f"model.layers.{first}.embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        tensors[f"model.layers.{first}.shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for name in (
        ("num_mtp_layers", "mtp_layer_types", "mtp_hidden_states_first") if "qwen" in config["model_type"] else ()
    ):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))


def slow_draft(stock: tuple[Any, Any], ids: list[int], count: int, base: int = 0) -> tuple[list[int], float]:
    """The most likely tokens, each computed from scratch, and the smallest margin between the two best logits.

    base: hidden states before this position are unknown.
    """
    model, modules = stock
    most = len(modules.layers)
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False, output_hidden_states=True)
        x_1TX, drafted, close = out.hidden_states[-1][:, base:], [], float("inf")
        given_1TX, module, start = x_1TX, 0, base + 1
        for step in range(count):
            if step < most:
                given_1TX, module, start = x_1TX, step, base + step + 1
            else:  # the last module continues from its own output
                given_1TX = torch.cat([given_1TX, x_1TX[:, -1:]], 1)
            tokens = torch.tensor([[*ids, *drafted][start:]])
            positions = torch.arange(start, start + tokens.shape[1])[None]
            x_1TX = modules.forward_layer(module, given_1TX, positions, None, input_ids=tokens)
            scores_V = modules._project_to_logits(x_1TX[:, -1:])[0, 0]
            best = scores_V.topk(2)
            drafted.append(int(best.indices[0]))
            close = min(close, float(best.values[0] - best.values[1]))
    return drafted, close


def stock_draft(stock: tuple[Any, Any], ids: list[int]) -> list[int]:
    """The draft of Transformers, one token per module."""
    model, modules = stock
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False, output_hidden_states=True)
        drafted, _, _ = modules(
            input_ids=torch.tensor([ids[1:]]),
            last_hidden_states=out.hidden_states[-1],
            attention_mask=None,
            position_ids=torch.arange(1, len(ids))[None],
            mtp_cache=MtpCache(config=modules.config),
        )
    tokens: list[int] = drafted[0].tolist()
    return tokens
