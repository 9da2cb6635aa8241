"""Tiny random models of any architecture of Transformers: the default config of the type, with small sizes.

A tiny model has the first layers of the default config: at least four, and enough to have one of each kind. Where
published models have another layout, ``OVERRIDES`` has theirs.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
MULTIMODAL = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
VOCABULARY = 199
LAYERS = 4
DEPTHS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "n_enc_layers",
    "depth",
)  # fmt: skip
SIZES: tuple[tuple[str, Any], ...] = (
    # The first pattern that matches the whole name of a field gives its value.
    (r"vocab_size|vocab_size_per_layer_input", VOCABULARY),
    ("|".join(DEPTHS), LAYERS),
    (r"num_(query_|decoder_|encoder_)?(attention_)?heads|n_heads?|(en|de)coder_attention_heads|attention_heads", 4),
    (r"num_key_value_heads|num_kv_heads|kv_n_heads|num_attention_groups|num_query_groups", 2),
    (r"(global_)?head_dim|attention_head_size|v_head_dim|qk_nope_head_dim|kv_channels|d_kv|dim_head", 16),
    (r"qk_rope_head_dim|rotary_dim|partial_rotary_dim", 8),
    (r"(text_)?hidden_size|d_model|n_embd|emb_dim|embed_dim|embedding_size|attention_hidden_size|block_dim", 64),
    (r".*intermediate_size.*|.*ffn_dim|.*ffn_hidden_size|d_inner|dff|dim_ff|feed_forward_size|n_inner", 96),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_(topk|k|top_k)|num_selected_experts|top_k_experts|num_experts_per_token", 2),
    (r"n_group|topk_group|num_expert_groups?|n_shared_experts|first_k_dense_replace", 1),
    (r".*lora_rank|.*laurel_rank|hidden_size_per_layer_input", 16),
    (
        r"sliding_window(_size)?|attention_window_size|local_attention|window_size|keep_window_size|attention_chunk_size",
        9,
    ),
    (
        r"(original_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|context_length|max_.*positions",
        256,
    ),
    (r"pad_token_id|bos_token_id", 0),
    (r"eos_token_id", 1),
    (r"(linear|mamba)_(num_(key_|value_)?heads|n_heads)|num_mamba_heads|linear_num_(key|value)_heads", 4),
    (r"initializer_range|init_std", 0.1),
)


NEEDED = {"head_dim", "num_experts_per_tok", "n_group", "topk_group", "num_key_value_heads", "n_routed_experts"}
"""Fields that get their size also where the default is None."""
ALL_HEADS = {"num_key_value_heads": 4}
TWO_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
SHARED = {**TWO_WINDOWS, "num_kv_shared_layers": 2}
SPARSE_SHARED = {**SHARED, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]}
CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 24,
}
LONG = {"sliding_window": 256, "original_max_position_embeddings": 24}
PARTIAL = {**LONG_ROPE, "partial_rotary_factor": 0.75, "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
ROPE_OF_TYPES = dict.fromkeys(("sliding_attention", "full_attention"), MROPE)
COMPASS = {**TWO_WINDOWS, "rope_parameters": ROPE_OF_TYPES}
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": ALL_HEADS,
    "axk2": ALL_HEADS,
    "bailing_hybrid": {**ALL_HEADS, "layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blenderbot": {"encoder_layers": 4},
    "cosmos3_edge": {"text_config": {"rope_parameters": MROPE}},
    "cohere_compass": {"text_config": COMPASS},
    "cohere_compass_text": COMPASS,
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}, "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2}},
    "deepseek_v2": ALL_HEADS,
    "deepseek_v3": ALL_HEADS,
    "deepseek_v32": ALL_HEADS,
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"text_config": ALL_HEADS},
    "dots3_note_text": ALL_HEADS,
    "gemma3n": {"text_config": SPARSE_SHARED},
    "gemma3n_text": SPARSE_SHARED,
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gemma4_unified_assistant": {"text_config": SHARED},
    "glm46v": {"text_config": {"rope_parameters": MROPE}},
    "glm4v": {"text_config": {"rope_parameters": MROPE}},
    "glm4v_moe": {"text_config": {"rope_parameters": HALF}},
    "glm5_next": {"text_config": ALL_HEADS},
    "glm_ocr": {"text_config": {"rope_parameters": MROPE}},
    "glmga": {"text_config": {"rope_parameters": MROPE}},
    "glm4_moe_lite": ALL_HEADS,
    "glm_moe_dsa": ALL_HEADS,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite_docling": {"vision_config": {"out_hidden_size": 64}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "kimi_k25": {"text_config": ALL_HEADS},
    "kimi_linear": {**ALL_HEADS, "layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS,
    "lfm2_vl": {"text_config": CONVOLUTIONS},
    "longcat_flash": {**ALL_HEADS, "head_dim": 8},
    "mamba2": {"num_heads": 8},
    "minicpm3": ALL_HEADS,
    "mistral4": ALL_HEADS,
    "mistral_large4": {"text_config": ALL_HEADS},
    "nemotron_h": {"n_groups": 2},
    "paddleocr_vl": {"text_config": {"rope_parameters": MROPE}},
    "phi3": {"sliding_window": 9},
    "phi4_multimodal": {**LONG, "rope_parameters": PARTIAL},
    "phimoe": {**LONG, "rope_parameters": {**LONG_ROPE, "short_mscale": 1.2, "long_mscale": 1.2}},
    "qwen2_5_omni": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_5_omni_thinker": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_5_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_vl": {"text_config": {"rope_parameters": MROPE}},
    "starcoder2": {"sliding_window": 9},
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    "xlstm": {"embedding_dim": 64, "num_heads": 4, "chunk_size": 8},
    "xmod": {"default_language": "en_XX"},
    "youtu": ALL_HEADS,
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
}
"""Values of some types that the sizes above contradict, and layouts of published models that the defaults lack."""


def config_of(model_type: str) -> Any:
    """The config of a model type, in small."""
    return _small(CONFIG_MAPPING[model_type], OVERRIDES.get(model_type, {}))


def model_class(model_type: str) -> Any:
    """The class with the language model of a type: the whole model, if that has vision or audio parts."""
    whole = "text_config" in CONFIG_MAPPING[model_type].sub_configs
    name = (MULTIMODAL.get(model_type) if whole else None) or CAUSAL.get(model_type) or MULTIMODAL[model_type]
    return getattr(transformers, name[0] if isinstance(name, tuple) else name)


def save_tiny(model_type: str, folder: Path) -> Any:
    """Write a tiny random model of a type to a folder, and return it."""
    torch.manual_seed(0)
    model = model_class(model_type)(config_of(model_type)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:  # so that tokens depend on the prompt
                weight.normal_(std=0.02 if "embed" in name or "wte" in name else 1.5 * weight.shape[-1] ** -0.5)
            elif weight.is_floating_point():  # what begins at 0 or 1, such as biases and norms, has an effect
                weight.add_(torch.randn_like(weight), alpha=0.1)
    model.save_pretrained(folder)
    return model


def _small(kind: Any, overrides: dict[str, Any]) -> Any:
    inherited = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)}
    values: dict[str, Any] = {}
    own = {name: value for name, value in overrides.items() if name not in kind.sub_configs}
    layers = LAYERS if any(isinstance(value, list) for value in own.values()) else _layers(kind)
    for field in dataclasses.fields(kind):
        name, default = field.name, field.default
        if name in inherited or name in kind.sub_configs or isinstance(default, bool):
            continue
        size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
        size = layers if name in DEPTHS else size
        if size is not None and isinstance(default, int | float):
            values[name] = min(size, default) if default > 0 else default
        elif size is not None and default is None and name in NEEDED:
            values[name] = size
    if kind.sub_configs:
        whole = kind()
        for name in kind.sub_configs:
            part = getattr(whole, name)
            if part is not None:
                values[name] = _small(type(part), overrides.get(name, {})).to_dict()
    if "is_decoder" in {field.name for field in dataclasses.fields(kind)}:
        values["is_decoder"] = True
    values = {**values, **own}
    return kind(**values)


def _layers(kind: Any) -> int:
    """How many layers of a default config have, from the first one, all kinds of its layers: at least ``LAYERS``."""
    try:
        config = kind()
    except Exception:  # noqa: BLE001 - some have no default
        return LAYERS
    total = next((value for name in DEPTHS if isinstance(value := getattr(config, name, None), int)), 0)
    values = [*config.to_dict().values(), getattr(config, "layers_block_type", None)]
    per_layer = [list(map(str, each)) for each in values if isinstance(each, list | tuple) and len(each) == total]
    layers = list(zip(*(each for each in per_layer if len(set(each)) < total), strict=True))  # not those of indices
    return max([LAYERS, *(layers.index(one) + 1 for one in set(layers))])


def model_types() -> list[str]:
    """All model types with a causal language model, alone or in a vision-language model."""
    return sorted({*CAUSAL, *MULTIMODAL})
