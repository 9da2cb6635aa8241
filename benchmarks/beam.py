"""Beam search on the engine compared with ``generate(num_beams=...)`` of Transformers, in turn in one process.

Same weights, prompts and searches; one prompt at a time, and several at once (Transformers: a batch). Both run on torch
and CPU; the embedded model is also measured on the NumPy runtime. The outputs are compared.

    python benchmarks/beam.py [--rounds 5] [--out benchmarks/results/beam.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

import nucleate as nc
from nucleate.engine.beam_params import BeamCompletion
from nucleate.models.loader import EMBEDDED

PROMPTS = ("Once upon a time", "Lily had a red ball", "Tom went to the park", "The little dog was sad")
WIDTH, TOKENS = 4, 24

Outputs = list[list[tuple[int, ...]]]


class NucleateSearch:
    """Searches on an engine of an LLM."""

    def __init__(self, llm: nc.LLM) -> None:
        self.llm, self.engine = llm, llm.new_engine()

    def __call__(self, prompts: list[list[int]]) -> Outputs:
        params = nc.BeamParams(num_beams=WIDTH, max_tokens=TOKENS)
        indices = {self.engine.add(nc.BeamRequest(ids, params)): at for at, ids in enumerate(prompts)}
        chunks: list[list[Any]] = [[] for _ in prompts]
        while len(self.engine):
            for event in self.engine.step():
                chunks[indices[event.request_id]].append(event.chunk)
        completions = [BeamCompletion.from_chunks(ids, own) for ids, own in zip(prompts, chunks, strict=True)]
        return [[beam.token_ids for beam in one.outputs] for one in completions]


class TransformersSearch:
    """``generate`` of Transformers; prompts of a batch are padded on the left."""

    def __init__(self, model: Any, ends: list[int]) -> None:
        self.model, self.ends = model, ends

    def __call__(self, prompts: list[list[int]]) -> Outputs:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
        config = transformers.GenerationConfig(
            num_beams=WIDTH, num_return_sequences=WIDTH, max_new_tokens=TOKENS, eos_token_id=self.ends, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        out = self.model.generate(ids, attention_mask=mask, generation_config=config)
        lengths = (out.beam_indices >= 0).sum(1).tolist()
        texts = [tuple(text[longest:][:n]) for text, n in zip(out.sequences.tolist(), lengths, strict=True)]
        return [texts[at : at + WIDTH] for at in range(0, len(texts), WIDTH)]


def measure(run: Callable[[list[list[int]]], Outputs], batches: list[list[list[int]]]) -> tuple[float, Outputs]:
    begin = perf_counter()
    completions = [output for batch in batches for output in run(batch)]
    return perf_counter() - begin, completions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    native, packed = nc.LLM(), nc.LLM(EMBEDDED, runtime="torch", device="cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig()  # the model's own would make it sample
    runs: dict[str, Callable[[list[list[int]]], Outputs]] = {
        "engine, numpy": NucleateSearch(native),
        "engine, torch": NucleateSearch(packed),
        "transformers": TransformersSearch(model, sorted(native.tokenizer.eos_token_ids)),
    }
    prompts = [native.encode(prompt) for prompt in PROMPTS]
    ways = {"one prompt at a time": [[prompt] for prompt in prompts], "all prompts at once": [prompts]}
    seconds: dict[str, dict[str, list[float]]] = {way: {name: [] for name in runs} for way in ways}
    outputs: dict[str, dict[str, Outputs]] = {way: {} for way in ways}
    for turn in range(options.rounds + 1):  # the first one warms up
        for way, batches in ways.items():
            for name, run in runs.items():
                durations, outputs[way][name] = measure(run, batches)
                if turn:
                    seconds[way][name].append(durations)
    report(seconds, outputs, options.out)


def report(
    seconds: dict[str, dict[str, list[float]]], outputs: dict[str, dict[str, Outputs]], out: Path | None
) -> None:
    result: dict[str, Any] = {
        "what": f"{len(PROMPTS)} prompts, num_beams {WIDTH}, {TOKENS} tokens, the embedded model, float32",
        "where": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
    }
    for way, durations in seconds.items():
        fastest = {name: min(times) for name, times in durations.items()}
        median = {name: statistics.median(times) for name, times in durations.items()}
        expected = outputs[way]["transformers"]
        equal = {name: [a == b for a, b in zip(own, expected, strict=True)] for name, own in outputs[way].items()}
        result[way] = {
            name: {
                "seconds, least": round(fastest[name], 4),
                "seconds, median": round(median[name], 4),
                "times as fast as transformers": round(median["transformers"] / median[name], 2),
                "answers equal": f"{sum(equal[name])} of {len(expected)}",
            }
            for name in durations
        }
        for name, row in result[way].items():
            print(f"{way}, {name}: {row}")
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
