"""Tokens per second of a model for OpenVINO: nucleate beside OpenVINO GenAI's continuous batching, in turns.

    pip install openvino-genai
    python benchmarks/openvino_models.py --model FOLDER [--sequences 1 8 32] [--rounds 3] [--gguf FILE] [--json FILE]

Each contender is a process of its own that waits while the others run. Greedy outputs of the same length, so that the
work is the same. "prefix": prompts that share 400 tokens, with prefix caching. --gguf adds nucleate with llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROMPTS = ("Once upon a time", "The capital of France is", "def fib(n):", "1, 2, 3,", "Dear Sir,", "A", "It was", "My")
STORY = "The old lighthouse keeper counted the ships that passed and wrote their names in a book. " * 20


def nucleate(model: str, **options: Any) -> Callable[[Sequence[str], int], None]:
    """Generate with nucleate."""
    import nucleate as nc

    llm = nc.LLM(model, generation_config="none", **options)
    return lambda prompts, tokens: llm.generate([*prompts], temperature=0, max_tokens=tokens, ignore_eos=True) and None


def genai(model: str) -> Callable[[Sequence[str], int], None]:
    """Generate with OpenVINO GenAI."""
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 1, True
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
    config = openvino_genai.GenerationConfig()
    config.ignore_eos, config.do_sample = True, False

    def run(prompts: Sequence[str], tokens: int) -> None:
        config.max_new_tokens = tokens
        pipeline.generate([*prompts], [config] * len(prompts))

    return run


def work(name: str, options: argparse.Namespace) -> None:
    """Answer requests on stdin, ``[prompts, tokens]``, with seconds on stdout."""
    run = {
        "nucleate": lambda: nucleate(options.model),
        "nucleate, batch-invariant": lambda: nucleate(options.model, batch_invariant=True),
        "OpenVINO GenAI": lambda: genai(options.model),
        "nucleate, GGUF": lambda: nucleate(options.gguf),
    }[name]()
    run(PROMPTS[:1], 4)
    print("ready", flush=True)
    for line in sys.stdin:
        prompts, tokens = json.loads(line)
        begin = time.perf_counter()
        run(prompts, tokens)
        print(time.perf_counter() - begin, flush=True)


def start(names: Sequence[str]) -> dict[str, Any]:
    """A process per contender, ready."""
    workers = {}
    for name in names:
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", name]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        while (line := worker.stdout.readline()).strip() != "ready":
            if not line:
                raise SystemExit(f"{name} ended")
        workers[name] = worker
    return workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gguf")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker")
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options)
        return
    names = ["nucleate", "OpenVINO GenAI", "nucleate, batch-invariant", *(["nucleate, GGUF"] if options.gguf else [])]
    workers = start(names)
    cases = {str(count): [PROMPTS[i % len(PROMPTS)] for i in range(count)] for count in options.sequences}
    cases["8, prefix"] = [f"{STORY} {prompt}" for prompt in PROMPTS]
    table = {}
    for case, prompts in cases.items():
        speeds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(options.rounds):
            for name in names:
                workers[name].stdin.write(json.dumps([prompts, options.tokens]) + "\n")
                workers[name].stdin.flush()
                speeds[name].append(len(prompts) * options.tokens / float(workers[name].stdout.readline()))
        table[case] = {name: round(statistics.median(each), 1) for name, each in speeds.items()}
        print(case, table[case], flush=True)
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    print("| sequences | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1))
    for case, row in table.items():
        print(f"| {case} | " + " | ".join(f"{row[name]:.0f}" for name in names) + " |")
    if options.json:
        options.json.write_text(json.dumps({"model": options.model, "table": table}, indent=1))


if __name__ == "__main__":
    main()
