"""Speculative decoding with a draft model and a much larger target: 8 layers of width 512, about 25 million parameters.

With --target, the target was trained to predict what the embedded model predicts (``training/deeper.py``). The
acceptance rate is that of a draft model made for the embedded model.

Without --target, the target is the embedded model padded with zeros to the larger size: same output, cost of the larger
model. The acceptance rate is that of the embedded model; only verification costs more.

    python benchmarks/deeper.py [--target FOLDER] [--repeat 5] [--tokens 64] [--drafted 4]

Runs with and without speculation alternate. Speedups are ratios of medians over the rounds, and of minima.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.models.loader import EMBEDDED, runner_of
from nucleate.models.numpy_llama import Floats, Llama, read
from nucleate.speculative.config import Speculation
from nucleate.speculative.neural import load
from nucleate.tokenization.tokenizer import Tokenizer

WIDTH, LAYERS, HEADS, KV_HEADS, INNER = 512, 8, 16, 4, 1408
MEMORY = 64 << 20
"""Bytes of KV cache."""
PROMPTS = (
    "Once upon a time, there was a little girl named Lily. She loved",
    "Tom and his dog Max went to the lake. They saw a big boat",
    "One day, a small bird found a shiny red button in the grass. She wanted to",
    "The old farmer had a cow that could not sleep. Every night",
    "<|user|>Tell me a story about a fox and a drum.<|end|><|assistant|>",
    "<|user|>Write a short story about a bear, a cake and a hat.<|end|><|assistant|>",
    "<|user|>Tell me a story about a queen.<|end|><|assistant|>",
    "Ben was sad because he lost his ball. His mom",
)


def padded(array: Floats, *shape: int) -> Floats:
    """Padded with zeros at the end."""
    return np.pad(array, [(0, target - size) for target, size in zip(shape, array.shape, strict=True)])


def spread(rows: Floats, groups: int, size: int, *, width: int) -> Floats:
    """The rows of grouped-query heads, with each group padded to ``size``: [groups * size, width]."""
    parts = np.split(rows, groups)
    return np.concatenate([padded(part, size, width) for part in parts])


def deeper() -> Llama:
    """The embedded model in a larger size with the same output."""
    small, tensors = Llama(EMBEDDED), read(EMBEDDED / "model.safetensors")
    part = small.hidden_size / WIDTH
    group, size = HEADS // KV_HEADS * small.head_size, small.head_size
    weights: dict[str, Floats] = {
        "model.embed_tokens.weight": padded(tensors["model.embed_tokens.weight"], small.vocab_size, WIDTH),
        "model.norm.weight": padded(tensors["model.norm.weight"] * np.float32(part**0.5), WIDTH),
    }
    names = {"q": HEADS * size, "k": KV_HEADS * size, "v": KV_HEADS * size}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        found = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weight = found.get(f"{prefix}{norm}.weight", np.ones(1, np.float32))
            weights[f"{prefix}{norm}.weight"] = padded(weight * np.float32(part**0.5), WIDTH)
        for name, rows in names.items():
            weight = found.get(f"{prefix}self_attn.{name}_proj.weight", np.zeros((small.kv_heads, 1), np.float32))
            each = group if name == "q" else size
            weights[f"{prefix}self_attn.{name}_proj.weight"] = padded(
                spread(weight, small.kv_heads, each, width=WIDTH), rows, WIDTH
            )
        out = found.get(f"{prefix}self_attn.o_proj.weight", np.zeros((1, small.kv_heads), np.float32))
        columns = spread(np.ascontiguousarray(out.T), small.kv_heads, group, width=WIDTH).T
        weights[f"{prefix}self_attn.o_proj.weight"] = padded(columns, WIDTH, HEADS * size)
        for name, shape in (("gate", (INNER, WIDTH)), ("up", (INNER, WIDTH)), ("down", (WIDTH, INNER))):
            weight = found.get(f"{prefix}mlp.{name}_proj.weight", np.zeros((1, 1), np.float32))
            weights[f"{prefix}mlp.{name}_proj.weight"] = padded(weight, *shape)
    config = {
        "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "head_dim": size,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": small.vocab_size,
        "rms_norm_eps": float(small.epsilon) * part, "max_position_embeddings": small.context_length,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return Llama.of(config, weights)


def seconds_of(
    engine: Engine, prompts: list[list[int]], params: nc.SamplingParams, rows: int
) -> tuple[float, list[Any]]:
    """The time of all outputs at this concurrency, and their tokens."""
    begin, outputs = time.perf_counter(), []
    for start in range(0, len(prompts), rows):
        request_ids = [
            engine.add(Request(ids, params.replace(seed=start + row)))
            for row, ids in enumerate(prompts[start : start + rows])
        ]
        tokens: dict[str, list[int]] = {number: [] for number in request_ids}
        while len(engine):
            for event in engine.step():
                tokens[event.request_id] += event.chunk.token_ids
        outputs += tokens.values()
    return time.perf_counter() - begin, outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--drafted", type=int, default=4, help="draft tokens per step [default 4]")
    parser.add_argument("--target", type=Path, help="folder of a Llama with the vocabulary of the embedded model")
    options = parser.parse_args()
    small, tokenizer = Llama(EMBEDDED), Tokenizer(EMBEDDED)
    large = Llama(options.target) if options.target else deeper()
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    speculations = {
        "plain": None,
        f"draft, {options.drafted} tokens": Speculation(
            lambda: load("draft", small), num_speculative_tokens=options.drafted, adaptive=False
        ),
        "draft, adaptive": Speculation(lambda: load("draft", small), num_speculative_tokens=options.drafted),
    }
    for rows, temperature in ((1, 0.0), (1, 0.7), (8, 0.0)):
        params = nc.SamplingParams(temperature=temperature, max_tokens=options.tokens, ignore_eos=True)
        engines = {  # each with its own KV cache
            name: Engine(runner_of(large, MEMORY), tokenizer, speculative_config=one)
            for name, one in speculations.items()
        }
        for engine in engines.values():
            seconds_of(engine, prompts, params.replace(max_tokens=2), len(prompts))  # warm-up: compile the kernels
        times: dict[str, list[float]] = {name: [] for name in engines}
        outputs = {}
        for turn in range(options.repeat + 1):
            for name, engine in engines.items():
                seconds, outputs[name] = seconds_of(engine, prompts, params, rows)
                if turn:  # the first turn is a warm-up
                    times[name].append(seconds)
        plain, fastest = statistics.median(times["plain"]), min(times["plain"])
        print(
            f"{rows} at once, temperature {temperature:g}: plain {len(prompts) * options.tokens / plain:.0f} tokens/s"
        )
        for name, engine in engines.items():
            gain, best = plain / statistics.median(times[name]), fastest / min(times[name])
            print(
                f"  {name:16} {gain:.2f} x  of minima {best:.2f} x  tau "
                f"{engine.stats.speculative.mean_acceptance_length:.2f}"
                f"  the same text: {outputs[name] == outputs['plain']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
