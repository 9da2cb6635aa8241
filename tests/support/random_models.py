"""Tiny random Transformers models whose text varies, in memory or in folders, and mixed requests for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sampler_scenarios
import small_tokenizers
import torch
import transformers

import nucleate as nc

SMALL = dict(vocab_size=4096, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
LLAMA = dict(SMALL, intermediate_size=64, num_key_value_heads=2, bos_token_id=0, eos_token_id=0)
BLOCKS = dict(hidden_size=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=4096, n_positions=64, **BLOCKS),
    "mistral with a window": lambda: transformers.MistralConfig(**LLAMA, sliding_window=8),
    "bloom, one sequence at a time": lambda: transformers.BloomConfig(vocab_size=4096, **BLOCKS),
}
"""With the vocabulary of the embedded model."""

SHARDED = dict(
    vocab_size=301, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=128, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
GROUPED = dict(SHARDED, num_key_value_heads=2, pad_token_id=None)
KINDS = {
    "llama": lambda **change: transformers.LlamaConfig(**{**GROUPED, **change}),
    "tied": lambda: transformers.LlamaConfig(tie_word_embeddings=True, **GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**{**GROUPED, "vocab_size": 302}),
    "qwen3": lambda: transformers.Qwen3Config(head_dim=16, **GROUPED),
    "gemma2": lambda: transformers.Gemma2Config(head_dim=8, sliding_window=16, **GROUPED),
    "mixtral": lambda: transformers.MixtralConfig(num_local_experts=4, **GROUPED),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SHARDED),
    "phi3": lambda: transformers.Phi3Config(**{**GROUPED, "pad_token_id": 0}),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=301, n_positions=128, **BLOCKS),
}
"""For folders: with a vocabulary that two ranks cannot halve, or can."""

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


def model_of(config: Any, seed: int) -> Any:
    """A random model, in training mode as after its construction."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


def random_model(name: str = "llama", **settings: Any) -> Any:
    """A model of CONFIGS. settings: of its config."""
    config = CONFIGS[name]()
    for key, value in settings.items():
        setattr(config, key, value)
    return model_of(config, 1)


def save(folder: Path, kind: str, **change: Any) -> Path:
    """Save a model of KINDS with a tokenizer of 300 tokens. change: of the config of a llama."""
    model_of(KINDS[kind](**change), 2).save_pretrained(folder)
    small_tokenizers.byte_level(300, ["</s>"]).save(str(folder / "tokenizer.json"))
    return folder


def assert_same(found: list[nc.Completion], expected: list[nc.Completion]) -> None:
    """Compare completions: tokens and texts are equal; log-probabilities, of logits in another order of sums, about."""
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        for output, wanted in zip(one.outputs, other.outputs, strict=True):
            assert output.token_ids == wanted.token_ids, f"request {number}"
            assert (output.text, output.finish_reason) == (wanted.text, wanted.finish_reason), f"request {number}"
            assert sampler_scenarios.same(output.logprobs, wanted.logprobs, 1e-4), f"request {number}"
        assert sampler_scenarios.same(one.prompt_logprobs, other.prompt_logprobs, 1e-4), f"request {number}"


def small_llama(size: int, seed: int = 0, hidden: int = 32) -> Any:
    """A random Llama with a vocabulary of this size, whose logits are far apart."""
    torch.manual_seed(1000 * seed + size)
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=hidden, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.4, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """The tokens that Transformers' ``generate`` adds to a prompt, without a stop at EOS."""
    given = torch.tensor([ids])
    settings = dict(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    out = model.generate(input_ids=given, attention_mask=torch.ones_like(given), **settings)
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens
