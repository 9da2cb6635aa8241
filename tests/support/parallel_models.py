"""Tiny random models in folders, and mixed requests, for tests of tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import small_tokenizers
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

import nucleate as nc

HEADS = dict(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, max_position_embeddings=128)
SMALL = dict(hidden_size=32, intermediate_size=48, bos_token_id=0, eos_token_id=0, pad_token_id=None, **HEADS)
KINDS = {
    "llama": lambda **change: transformers.LlamaConfig(**{**SMALL, "vocab_size": 301, **change}),
    "tied": lambda: transformers.LlamaConfig(vocab_size=301, tie_word_embeddings=True, **SMALL),
    "qwen2": lambda: transformers.Qwen2Config(vocab_size=302, **SMALL),
    "qwen3": lambda: transformers.Qwen3Config(vocab_size=301, head_dim=16, **SMALL),
    "gemma2": lambda: transformers.Gemma2Config(vocab_size=301, head_dim=8, sliding_window=16, **SMALL),
    "mixtral": lambda: transformers.MixtralConfig(vocab_size=301, num_local_experts=4, **SMALL),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        vocab_size=301, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, bos_token_id=0, eos_token_id=0,
    ),
    "phi3": lambda: transformers.Phi3Config(vocab_size=301, **{**SMALL, "pad_token_id": 0}),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=301, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0
    ),
}  # fmt: skip

MIXED = [
    nc.SamplingParams(temperature=0, max_tokens=24),
    nc.SamplingParams(temperature=0, max_tokens=16, logprobs=3, prompt_logprobs=2),
    nc.SamplingParams(temperature=0.9, top_p=0.9, seed=1, max_tokens=24, n=2),
    nc.SamplingParams(temperature=1.1, min_p=0.02, seed=2, max_tokens=24, repetition_penalty=1.2),
    nc.SamplingParams(temperature=0.8, top_k=40, seed=3, max_tokens=24, presence_penalty=0.5, frequency_penalty=0.2),
    nc.SamplingParams(temperature=1.0, typical_p=0.8, seed=4, max_tokens=16, logprobs=1),
    nc.SamplingParams(temperature=1.0, seed=5, max_tokens=24, logit_bias={7: 2.0, 250: -100.0}, min_tokens=4),
    nc.SamplingParams(temperature=1.0, mirostat_tau=3.0, seed=6, max_tokens=16),
    nc.SamplingParams(temperature=0.9, guidance_scale=1.5, negative_prompt=(5, 6, 7), seed=7, max_tokens=16),
]


def save(folder: Path, kind: str, **change: Any) -> Path:
    """Save a random model whose text varies, with a tokenizer of 300 tokens. change: of the config of a llama."""
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(KINDS[kind](**change), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(small_tokenizers.SENTENCES, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def assert_same(found: list[nc.Completion], expected: list[nc.Completion]) -> None:
    """Compare completions: tokens and texts are equal; log-probabilities, of logits in another order of sums, about."""
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        for output, wanted in zip(one.outputs, other.outputs, strict=True):
            assert output.token_ids == wanted.token_ids, f"request {number}"
            assert (output.text, output.finish_reason) == (wanted.text, wanted.finish_reason), f"request {number}"
            assert _close(output.logprobs, wanted.logprobs), f"request {number}"
        assert _close(one.prompt_logprobs, other.prompt_logprobs), f"request {number}"


def _close(found: Any, expected: Any) -> bool:
    """Whether values are equal, with numbers equal to 1e-4."""
    if isinstance(found, float) and isinstance(expected, float):
        return found == expected or abs(found - expected) < 1e-4
    if isinstance(found, tuple | list):
        return len(found) == len(expected) and all(map(_close, found, expected))
    return bool(found == expected)
