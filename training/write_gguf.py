"""Writes a model folder as a GGUF file, with its tokenizer, chat template and sampling parameters.

Run: python training/write_gguf.py OUTPUT.gguf [--model FOLDER] [--type f32|f16|q8_0]

By default the embedded model. It converts plain Llama, Qwen2, Gemma 2, Phi-3 and Mamba models with a byte-level BPE
tokenizer; llama.cpp's own convert_hf_to_gguf.py converts everything else. Needs ``pip install gguf safetensors torch``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

import nucleate.models.loader

TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "mamba": gguf.MODEL_ARCH.MAMBA,
}
SAMPLING = {
    "temperature": "add_sampling_temp",
    "top_k": "add_sampling_top_k",
    "top_p": "add_sampling_top_p",
    "min_p": "add_sampling_min_p",
    "repetition_penalty": "add_sampling_penalty_repeat",
}
BLOCK = 32  # values per block of Q8_0


def write(folder: Path, target: Path, file_type: str = "f32") -> None:
    """Write the model of a folder. Raises ValueError for a model or a tokenizer that cannot be converted."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type must be one of {', '.join(ARCHITECTURES)}, got {kind!r}")
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[kind]])
    writer.add_name(folder.resolve().name)
    quantisation, stored = TYPES[file_type]
    writer.add_file_type(stored)
    (_add_mamba if kind == "mamba" else _add_transformer)(writer, config)
    writer.add_vocab_size(config["vocab_size"])
    if (folder / "tokenizer.json").is_file():
        _add_tokenizer(writer, folder, config["vocab_size"])
    else:
        writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], config["num_hidden_layers"])
    for name, array in _tensors(folder, kind, config):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ValueError(f"no counterpart of the tensor {name}")
        data, data_type = array, gguf.GGMLQuantizationType.F32
        if array.ndim > 1 and array.shape[-1] % BLOCK == 0 and ".ssm_" not in found:
            data, data_type = gguf.quants.quantize(array, quantisation), quantisation
        writer.add_tensor(found, np.ascontiguousarray(data), raw_dtype=data_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_transformer(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    heads, width = config["num_attention_heads"], config["hidden_size"]
    size = config.get("head_dim") or width // heads
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"] in ("gemma2", "phi3"):
        writer.add_sliding_window(config.get("sliding_window") or config["max_position_embeddings"])


def _add_mamba(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(config["intermediate_size"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["time_step_rank"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])


def _tensors(folder: Path, kind: str, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The tensors by their names in Transformers, as llama.cpp wants them."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                array = file.get_tensor(name).float().numpy()
                if name == "lm_head.weight" and config.get("tie_word_embeddings", kind in ("gemma2", "mamba")):
                    continue
                if kind == "llama" and ".q_proj." in name:
                    array = _interleaved(array, config["num_attention_heads"])
                elif kind == "llama" and ".k_proj." in name:
                    array = _interleaved(array, config["num_key_value_heads"])
                elif kind == "gemma2" and name.endswith("norm.weight"):
                    array = array + 1
                elif name.endswith(".A_log"):
                    array = -np.exp(array)
                elif name.endswith(".conv1d.weight"):
                    array = array.squeeze(1)
                yield name, array


def _interleaved(array: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of queries or keys in the order of llama.cpp's rotary position embedding for Llama."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    file = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    if file["model"]["type"] != "BPE" or "ByteLevel" not in json.dumps(file["pre_tokenizer"]):
        raise ValueError(f"{folder}: the tokenizer must be byte-level BPE")
    tokens = {token_id: token for token, token_id in file["model"]["vocab"].items()}
    types = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    for added in file["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(token, f"[PAD{token}]") for token in range(vocab_size)])
    writer.add_token_types([types.get(token, gguf.TokenType.UNUSED) for token in range(vocab_size)])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in file["model"]["merges"]])
    _add_special_tokens(writer, folder, {token: token_id for token_id, token in tokens.items()}, file)


def _add_special_tokens(writer: gguf.GGUFWriter, folder: Path, ids: Mapping[str, int], file: Mapping[str, Any]) -> None:
    settings = {}
    for name in ("tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file():
            settings[name] = json.loads((folder / name).read_text("utf-8"))
    tokenizer, generation = (settings.get(f"{name}_config.json", {}) for name in ("tokenizer", "generation"))
    eos = generation.get("eos_token_id", ids.get(tokenizer.get("eos_token")))
    first, *others = eos if isinstance(eos, list) else [eos]
    writer.add_add_bos_token(file.get("post_processor", {}).get("type") == "TemplateProcessing")
    writer.add_bos_token_id(ids[tokenizer["bos_token"]])
    writer.add_eos_token_id(first)
    if others:
        writer.add_eot_token_id(others[0])
    if tokenizer.get("chat_template"):
        writer.add_chat_template(tokenizer["chat_template"])
    for name, method in SAMPLING.items():
        if generation.get("do_sample") and name in generation:
            getattr(writer, method)(generation[name])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", type=Path, default=nucleate.models.loader.EMBEDDED)
    parser.add_argument("--type", choices=TYPES, default="f32")
    given = parser.parse_args()
    write(given.model, given.output, given.type)
