"""Converted models for tests: the embedded model, tiny random models of other architectures, vocabularies alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np

TRAINING = Path(__file__).parents[2] / "training"
EXACT = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off", "n_threads": 1}
"""Options with which llama.cpp computes in float32; one thread, as tests run in parallel."""


def training_script(name: str) -> Any:
    """A module of training/."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TRAINING / f"{name}.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def write_gguf() -> Any:
    """The module training/write_gguf.py."""
    return training_script("write_gguf")


def random_folder(kind: str, folder: Path) -> Any:
    """Write a tiny random Transformers model of an architecture to a folder, without a tokenizer. Returns the model."""
    import torch
    import transformers

    shared = dict(vocab_size=4096, hidden_size=64, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    heads = dict(
        shared, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256
    )
    configs = {
        "llama": lambda: transformers.LlamaConfig(**heads),
        "qwen2": lambda: transformers.Qwen2Config(**heads, tie_word_embeddings=True),
        "gemma2": lambda: transformers.Gemma2Config(**heads, head_dim=16, query_pre_attn_scalar=16, sliding_window=32),
        "phi3": lambda: transformers.Phi3Config(**heads),
        "mamba": lambda: transformers.MambaConfig(**shared, state_size=16, intermediate_size=128, time_step_rank=4),
    }
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(configs[kind](), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.normal_(std=0.15)
    model.eval().save_pretrained(folder)
    return model


def write_vocabulary(path: Path, kind: str) -> None:
    """Write a vocabulary without weights: SentencePiece ("llama"), Unigram ("t5") or WordPiece ("bert")."""
    import gguf

    words = ["the", "cat", "sat", "on", "mat", "a", "an", "s", "ing", "un", "é", "世界", *"ithecmong"]
    writer = gguf.GGUFWriter(path, "llama")
    tokens: list[tuple[str, float, int]] = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    if kind == "bert":
        tokens = [(name, 0.0, 3) for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")]
        tokens += [(f"▁{word}", 0.0, 1) for word in words] + [(word, 0.0, 1) for word in words]
    else:
        tokens += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)] if kind == "llama" else []
        tokens += [(f"▁{word}", -float(i), 1) for i, word in enumerate(words)]
        tokens += [(word, -20.0 - i, 1) for i, word in enumerate(words)] + [("▁", -50.0, 1), ("<added>", 0.0, 4)]
    writer.add_tokenizer_model(kind)
    writer.add_token_list([text for text, _, _ in tokens])
    writer.add_token_scores([score for _, score, _ in tokens])
    writer.add_token_types([one for _, _, one in tokens])
    ids = {text: i for i, (text, _, _) in enumerate(tokens)}
    if kind == "bert":
        writer.add_bos_token_id(ids["[CLS]"])
        writer.add_eos_token_id(ids["[SEP]"])
        writer.add_unk_token_id(ids["[UNK]"])
        writer.add_sep_token_id(ids["[SEP]"])
        writer.add_token_type_count(2)
    else:
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(True)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_feed_forward_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
