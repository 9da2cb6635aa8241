"""Tiny random Transformers models whose text varies, with the vocabulary of the embedded model."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SMALL = dict(vocab_size=4096, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
LLAMA = dict(SMALL, intermediate_size=64, num_key_value_heads=2, bos_token_id=0, eos_token_id=0)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=4096, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    ),
    "mistral with a window": lambda: transformers.MistralConfig(**LLAMA, sliding_window=8),
    "bloom, one sequence at a time": lambda: transformers.BloomConfig(
        vocab_size=4096, hidden_size=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    ),
}


def random_model(name: str = "llama", **settings: Any) -> Any:
    """A random model, in training mode as after its construction. settings: of its config."""
    torch.manual_seed(1)
    config = CONFIGS[name]()
    for key, value in settings.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """The tokens that Transformers' ``generate`` adds to a prompt, without a stop at EOS."""
    given = torch.tensor([ids])
    settings = dict(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    out = model.generate(input_ids=given, attention_mask=torch.ones_like(given), **settings)
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens
