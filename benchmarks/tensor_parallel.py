"""A model on one process and on two that share it (gloo, CPU): tokens per second, and bytes exchanged per step.

Both generate the same requests in turn, each with all cores: one process with as many threads as there are cores, and
two with half of them each. The tokens are compared. Bytes per step and rank: messages of rank 0, exchanges of the
sampler (received), and partial sums of the layers (sent; computed from the sizes of the model).

    python benchmarks/tensor_parallel.py --json benchmarks/results/tensor_parallel.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import nucleate as nc
from nucleate.models.loader import EMBEDDED, TOKENIZER_FILES

TOKENS, REPEATS = 48, 3
CHAINS = {
    "greedy": dict(temperature=0.0),
    "T .8, top_p .9": dict(temperature=0.8, top_p=0.9),
    "typical .95": dict(typical_p=0.95),
}
CASES = [(rows, chain) for rows in (1, 8, 32) for chain in CHAINS]


def larger(folder: Path) -> Path:
    """A random Llama with 80 million weights and a vocabulary of 32,000, with the tokenizer of the embedded model."""
    config = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for pattern in TOKENIZER_FILES:
        for path in EMBEDDED.glob(pattern):
            if "tokenizer" in path.name:
                (folder / path.name).write_bytes(path.read_bytes())
    return folder


def measure(name: str, folder: Path, cores: int) -> list[dict[str, Any]]:
    """The results of all cases for a model."""
    sharded, one = nc.LLM(folder, tensor_parallel=2, device="cpu"), nc.LLM(folder, runtime="torch", device="cpu")
    rank, config, results = sharded.model._group.rank, transformers.AutoConfig.from_pretrained(folder), []  # noqa: SLF001
    for rows, chain in CASES:
        params = [nc.SamplingParams(seed=s, max_tokens=TOKENS, ignore_eos=True, **CHAINS[chain]) for s in range(rows)]
        prompts = [[*range(5 + row, 13 + row)] for row in range(rows)]
        times: dict[str, list[float]] = {"one": [], "two": []}
        tokens: dict[str, Any] = {}
        for _ in range(REPEATS + 1):
            for way, model, threads in (("one", one, cores), ("two", sharded, max(1, cores // 2))):
                torch.set_num_threads(threads)
                before = counts(rank, sharded)
                begin = time.perf_counter()
                done = model.generate(prompts, params)
                times[way].append(time.perf_counter() - begin)
                tokens[way] = [each.outputs[0].token_ids for each in done]
                if way == "two":
                    steps, messages, message_bytes, sampler_bytes = (
                        after - earlier for after, earlier in zip(counts(rank, sharded), before, strict=True)
                    )
        rates = {way: rows * TOKENS / statistics.median(seconds[1:]) for way, seconds in times.items()}
        sums = (2 * config.num_hidden_layers + 1) * config.hidden_size * 4 * rows
        results.append(
            {
                "model": name, "rows": rows, "pipeline": chain, "tokens_per_s_one": round(rates["one"], 1),
                "tokens_per_s_two": round(rates["two"], 1), "messages_per_step": round(messages / steps, 2),
                "message_bytes": round(message_bytes / steps), "sampler_bytes": round(sampler_bytes / steps),
                "sum_bytes": sums, "row_bytes": rows * config.vocab_size * 4,
                "different_rows": sum(a != b for a, b in zip(tokens["one"], tokens["two"], strict=True)),
            }
        )  # fmt: skip
        print(results[-1], flush=True)
    sharded.close()
    return results


def counts(rank: Any, llm: nc.LLM) -> tuple[int, int, int, int]:
    """Steps, messages, their bytes, and the bytes that the sampler has received so far."""
    engine = llm.shared_engine._running()  # noqa: SLF001
    stats = rank.get(engine._sampler._number).stats  # noqa: SLF001
    return engine.num_steps, rank.channel.messages, rank.channel.bytes, stats.received_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    nc.warm()
    cores, results = torch.get_num_threads(), []
    with tempfile.TemporaryDirectory() as folder:
        for name, path in (("embedded, 3M", EMBEDDED), ("random Llama, 80M", larger(Path(folder)))):
            results += measure(name, path, cores)
    if arguments.json:
        arguments.json.write_text(json.dumps({"cores": cores, "results": results}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
