"""Engine throughput compared with static and continuous batching of Transformers.

Requests of mixed lengths arrive together. All contenders run the same model in the same process, in turn, greedily.
Tokens per second count the requested tokens; a static batch runs to its longest output. Also measures the engine's
overhead, the time outside the forward pass.

    python benchmarks/engine.py [--json FILE] [--repeat 3] [--requests 64]
    python benchmarks/engine.py --model FOLDER|FILE [--dtype bfloat16] [--rows 1 8 16] [--batch-invariant]

The second form runs any model: a folder for Transformers beside ``generate`` in its best case, a static batch of equal
lengths. Both show what a step consists of.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from sampler import machine

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.models.loader import EMBEDDED, load, runner_of
from nucleate.models.protocol import Model
from nucleate.models.runner import Runner
from nucleate.models.transformers.transformers_model import TransformersModel, libraries
from nucleate.tokenization.tokenizer import Tokenizer

torch, transformers = libraries()  # for all contenders, idle torch threads sleep early
TEXT = Path(__file__).parents[1] / "docs" / "semantics.md"
ROWS, PROFILED = 32, 40
"""Sequences, and the steps of a profile."""
MEMORY = 256 << 20
SAMPLED = nc.SamplingParams(temperature=0.8, top_k=40, top_p=0.9, ignore_eos=True)
GREEDY = nc.SamplingParams(temperature=0.0, ignore_eos=True)


class LoadRequest(NamedTuple):
    """A prompt, and the number of output tokens."""

    prompt_ids: list[int]
    tokens: int


def workload(count: int, size: int, seed: int = 0) -> list[LoadRequest]:
    """Prompts and outputs of 16 to 256 tokens."""
    rng = random.Random(seed)
    return [
        LoadRequest([rng.randrange(1, size) for _ in range(rng.randint(16, 256))], rng.randint(16, 256))
        for _ in range(count)
    ]


class StepProfile:
    """The seconds of an engine's steps, by part, in steps without prompts: ``with StepProfile(engine) as profile``."""

    def __init__(self, engine: Engine) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(("schedule", "forward", "sample", "text", "step"), 0.0)
        self._parts = {
            "schedule": (engine._scheduler, "schedule"),  # noqa: SLF001
            "forward": (engine.runner, "forward"),
            "sample": (engine._token_sampler, "sample"),  # noqa: SLF001
            "text": (engine._token_sampler, "flush"),  # noqa: SLF001
            "step": (engine, "step"),
        }  # fmt: skip

    def __enter__(self) -> Self:
        for part, (owner, name) in self._parts.items():
            setattr(owner, name, self._timed(getattr(owner, name), part))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name in self._parts.values():
            delattr(owner, name)

    def _timed(self, inner: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*arguments)
            finally:
                self.seconds[part] += time.perf_counter() - start

        return call

    def shares(self) -> dict[str, float]:
        """The share of each part. "sample" is without the text that it makes; "other": the rest of a step."""
        found = {part: seconds / self.seconds["step"] for part, seconds in self.seconds.items() if part != "step"}
        found["sample"] -= found["text"]
        return {**found, "other": 1.0 - sum(found.values())}


def by_engine(
    runner: Runner,
    tokenizer: Tokenizer,
    requests: Sequence[LoadRequest],
    params: nc.SamplingParams,
    rows: int = 2 * ROWS,
    batched_tokens: int | None = None,
) -> list[list[int]]:
    """Run all requests on one engine. Returns the tokens of each."""
    engine = Engine(runner, tokenizer, max_num_seqs=rows, max_num_batched_tokens=batched_tokens)
    ids = [engine.add(Request(one.prompt_ids, params.replace(max_tokens=one.tokens))) for one in requests]
    tokens: dict[str, list[int]] = {number: [] for number in ids}
    while len(engine):
        for event in engine.step():
            tokens[event.request_id] += event.chunk.token_ids
    return list(tokens.values())


def by_generate(model: Any, requests: Sequence[LoadRequest], rows: int) -> list[list[int]]:
    """Static batches in the order of arrival, prompts padded on the left."""
    out = []
    for start in range(0, len(requests), rows):
        batch = requests[start : start + rows]
        longest = max(len(one.prompt_ids) for one in batch)
        ids = torch.tensor([[0] * (longest - len(one.prompt_ids)) + one.prompt_ids for one in batch])
        mask = torch.tensor([[0] * (longest - len(one.prompt_ids)) + [1] * len(one.prompt_ids) for one in batch])
        most = max(one.tokens for one in batch)
        found = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=most,
            min_new_tokens=most,
            pad_token_id=0,
        )
        out += [row[longest : longest + one.tokens].tolist() for row, one in zip(found, batch, strict=True)]
    return out


def by_generate_batch(model: Any, requests: Sequence[LoadRequest]) -> list[list[int]]:
    """Continuous batching of Transformers, each request with its own length."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=256)
    longest = ContinuousBatchingConfig(max_batch_tokens=1024)
    found: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(generation_config=config, continuous_batching_config=longest) as run:
        for index, one in enumerate(requests):
            run.add_request(one.prompt_ids, request_id=str(index), max_new_tokens=one.tokens, eos_token_id=-1)
        while len(found) < len(requests):
            result = run.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = result.generated_tokens
            elif result is None and not run.is_running():
                raise RuntimeError("Transformers' continuous batching has stopped")
    return [found[str(index)] for index in range(len(requests))]


def random_llama() -> TransformersModel:
    """Hidden size 512, 8 layers, 8 heads of which 4 share keys, a vocabulary of 32000."""
    config = transformers.LlamaConfig(
        hidden_size=512,
        num_hidden_layers=8,
        intermediate_size=1376,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=1024,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return TransformersModel.of(transformers.LlamaForCausalLM(config).eval())


def compare(name: str, ours: Model, theirs: TransformersModel, count: int, repeat: int) -> dict[str, Any]:
    """Run all contenders in turn, and print a table of medians."""
    tokenizer = Tokenizer(EMBEDDED, padded_size=ours.vocab_size)
    requests = workload(count, min(ours.vocab_size, 4000))
    total = sum(one.tokens for one in requests)
    runner = runner_of(ours, MEMORY)
    contenders: dict[str, Callable[[], list[list[int]]]] = {
        "nucleate": lambda: by_engine(runner, tokenizer, requests, GREEDY),
        f"nucleate, {ROWS} rows": lambda: by_engine(runner, tokenizer, requests, GREEDY, ROWS),
        "nucleate, sampled": lambda: by_engine(runner, tokenizer, requests, SAMPLED),
        f"generate, batches of {ROWS}": lambda: by_generate(theirs.model, requests, ROWS),
        f"generate, batches of {2 * ROWS}": lambda: by_generate(theirs.model, requests, 2 * ROWS),
        "generate_batch": lambda: by_generate_batch(theirs.model, requests),
    }
    by_engine(runner, tokenizer, requests[:4], SAMPLED)  # warm-up: compile the kernels
    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    tokens = {}
    for _ in range(repeat):
        for contender, run in contenders.items():
            start = time.perf_counter()
            tokens[contender] = run()
            seconds[contender].append(time.perf_counter() - start)
    speeds = {contender: total / statistics.median(times) for contender, times in seconds.items()}
    greedy = [contender for contender in contenders if "sampled" not in contender]
    same = {contender: _same(tokens["nucleate"], tokens[contender]) for contender in greedy}
    print(f"\n{name} ({type(runner).__name__}): {count} requests, {total} tokens")
    for contender, speed in speeds.items():
        agree = f"   {same[contender]:.0%} of the answers are the same" if contender in same else ""
        print(f"  {contender:28}{speed:8.0f} tokens/s{speeds['nucleate'] / speed:8.2f} x{agree}")
    return {
        "tokens per second": speeds,
        "same answers": same,
        "outside the forward": {
            name: profile(runner, tokenizer, ROWS, params)
            for name, params in (("greedy", GREEDY), ("sampled", SAMPLED))
        },
    }


def _same(ours: list[list[int]], theirs: list[list[int]]) -> float:
    return statistics.mean(a == b for a, b in zip(ours, theirs, strict=True))


def profile(runner: Runner, tokenizer: Tokenizer, rows: int, params: nc.SamplingParams) -> dict[str, float]:
    """The shares of a step (``StepProfile``), and its microseconds outside the forward pass per token."""
    engine = Engine(runner, tokenizer, max_num_seqs=rows, max_num_batched_tokens=32 * rows)
    for one in workload(rows, min(runner.vocab_size, 4000), seed=1):
        engine.add(Request(one.prompt_ids[:32], params.replace(max_tokens=PROFILED + 8)))
    for _ in range(4):
        engine.step()
    with StepProfile(engine) as found:
        for _ in range(PROFILED):
            engine.step()
    shares = found.shares()
    outside = (1.0 - shares["forward"]) * found.seconds["step"] / (PROFILED * rows)
    text = ", ".join(f"{part} {share:.1%}" for part, share in shares.items())
    print(
        f"  a step of {rows:2} sequences: {text}; outside the forward pass {1e6 * outside:.0f} us per token", flush=True
    )
    for request in range(rows):
        engine.abort(f"request-{request}")
    return {**shares, "share": 1.0 - shares["forward"], "microseconds per token": 1e6 * outside}


def compare_model(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second by rows, and the profile of a step. Prompts of 32 tokens of text, outputs of 96.

    A folder for Transformers is compared with ``generate`` in its best case: a static batch of equal lengths.
    """
    invariant = options.batch_invariant
    llm = nc.LLM(path, dtype=options.dtype if path.suffix != ".gguf" else "auto", batch_invariant=invariant)
    ids = llm.encode(TEXT.read_text("utf-8"))
    runner, found = runner_of(llm.model, MEMORY), {}
    other = runner_of(llm.model, MEMORY, batch_invariant=True) if invariant else None
    print(f"{path.name}: {llm.model.runtime}, {type(runner).__name__}")
    for count in options.rows:
        requests = [LoadRequest(ids[start : start + 32], 96) for start in range(100, 100 + 32 * count, 32)]
        contenders = {"nucleate": partial(by_engine, runner, llm.tokenizer, requests, GREEDY, count, 32 * count)}
        if other is not None:
            contenders["batch-invariant"] = partial(
                by_engine, other, llm.tokenizer, requests, GREEDY, count, 32 * count
            )
        if isinstance(llm.model, TransformersModel):
            contenders["generate"] = partial(by_generate, llm.model.model, requests, count)
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(options.repeat + 1):
            for name, run in contenders.items():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
        speeds = {name: 96 * count / statistics.median(own[1:]) for name, own in seconds.items()}  # the first warms up
        text = ", ".join(f"{name} {speed:7.1f}" for name, speed in speeds.items())
        print(f"  {count:3} sequences, tokens/s: {text}{_ratio(speeds)}", flush=True)
        found[count] = {"tokens per second": speeds, "step": profile(runner, llm.tokenizer, count, SAMPLED)}
    return {"model": path.name, "runtime": llm.model.runtime, "sequences": found}


def _ratio(speeds: dict[str, float]) -> str:
    return f": {speeds['nucleate'] / speeds['generate']:.2f} x" if "generate" in speeds else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--model", type=Path, metavar="FOLDER or FILE")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--batch-invariant", action="store_true", help="beside the same without it")
    arguments = parser.parse_args()
    start = time.perf_counter()
    transformers.utils.logging.set_verbosity_error()
    if arguments.model:
        found = compare_model(arguments.model, arguments)
        results = {"machine": machine(), **found}
        _write(arguments.json, results)
        return
    embedded: Any = load(EMBEDDED, runtime="torch")
    llama = random_llama()
    results = {
        "machine": machine(),
        "versions": {"nucleate": nc.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "embedded": compare("embedded", load(EMBEDDED), embedded, arguments.requests, arguments.repeat),
        "llama 512 x 8": compare("llama 512 x 8", llama, llama, arguments.requests, arguments.repeat),
    }
    results["seconds"] = round(time.perf_counter() - start)
    _write(arguments.json, results)


def _write(path: Path | None, results: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
