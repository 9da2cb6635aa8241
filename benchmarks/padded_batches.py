"""Tokens per second of models whose cache is not paged: padded batches, one sequence at a time, and ``generate``.

Random models with 6 layers of 512. As many prompts of 16 to 64 tokens as ``--rows``, 64 greedy tokens each. The
contenders run in turn in one process; ``generate`` gets all prompts as one static batch, and the engine may compute as
many in one step. Ratios above 1: nucleate is faster.

    python benchmarks/padded_batches.py [--types lfm2,mamba] [--rows 16] [--repeat 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from engine import GREEDY, LoadRequest, by_engine, by_generate, workload
from sampler import machine

import nucleate as nc
from nucleate.models.loader import EMBEDDED, runner_of
from nucleate.models.runner import SequentialRunner
from nucleate.models.transformers.transformers_model import TransformersModel, libraries
from nucleate.tokenization.tokenizer import Tokenizer

torch, transformers = libraries()
LAYERS, VOCABULARY, OUTPUTS = 6, 32_000, 64
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1408}
MIXED = {"layer_types": (["linear_attention"] * 2 + ["full_attention"]) * 2}
TYPES: dict[str, dict[str, Any]] = {
    "lfm2": {**HEADS, "layer_types": (["conv"] * 2 + ["full_attention"]) * 2},
    "qwen3_5_text": {**HEADS, **MIXED, "linear_num_value_heads": 8, "linear_num_key_heads": 4},
    "falcon_h1": {**HEADS, "mamba_d_ssm": 1024, "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64},
    "mamba": {"state_size": 16},
    "mamba2": {"state_size": 64, "num_heads": 16, "head_dim": 64},
    "llama4_text": {**HEADS, "num_local_experts": 2, "intermediate_size_mlp": 1408, "attention_chunk_size": 64},
    "bloom": {"n_layer": LAYERS, "n_head": 8},
}


def random_model(model_type: str) -> TransformersModel:
    """A model of a type."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 512, "num_hidden_layers": LAYERS, **TYPES[model_type]}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    return TransformersModel.of(transformers.AutoModelForCausalLM.from_config(config).eval())


def compare(model_type: str, rows: int, repeat: int) -> dict[str, float]:
    """Median tokens per second of each contender."""
    model = random_model(model_type)
    tokenizer = Tokenizer(EMBEDDED, padded_size=VOCABULARY)
    requests = [LoadRequest(one.prompt_ids[:64], OUTPUTS) for one in workload(rows, 4000)]
    runner = runner_of(model, 1 << 30)
    single = SequentialRunner(model, runner.blocks)
    contenders = {
        type(runner).__name__: lambda: by_engine(runner, tokenizer, requests, GREEDY, rows, 64 * rows),
        "one by one": lambda: by_engine(single, tokenizer, requests[:2], GREEDY),
        "generate": lambda: by_generate(model.model, requests, rows),
    }
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeat):
        for name, run in contenders.items():
            start = time.perf_counter()
            tokens = run()
            speeds[name].append(sum(map(len, tokens)) / (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    results: dict[str, Any] = {}
    for model_type in given.types.split(","):
        ours, single, static = speeds = [*(found := compare(model_type, given.rows, given.repeat)).values()]
        print(
            f"{model_type:14} {next(iter(found)):20} {ours:7.1f} tokens/s, one by one {single:6.1f}, "
            f"generate {static:7.1f}: {ours / single:5.2f} x, {ours / static:5.2f} x",
            flush=True,
        )
        results[model_type] = dict(zip(found, speeds, strict=True))
    if given.json:
        versions = {"nucleate": nc.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        record = {"machine": machine(), "versions": versions, "rows": given.rows, "tokens per second": results}
        given.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
