"""Chaos for batch invariance: random requests alone, and together in random batches, compared bit for bit.

    python benchmarks/batch_invariance.py [--model MODEL] [--requests 1000] [--max-num-seqs 4 8 40] [--json FILE]

Every request runs alone first, in an engine without prefix cache. Then all of them arrive at random, in engines of
several sizes: prompts that share prefixes or are long, n > 1, aborts, a small KV cache with preemption, chunked
prompts, drafts. The tokens and the bits of their logprobs must be the same. --no-batch-invariant shows what differs.

--table prints a row of a table instead: how many of 16 seeded texts of 64 tokens, and of 8 greedy ones, are the same
alone and among eight, without batch invariance and with it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import nucleate as nc
from nucleate.engine.request import Request

TEXT = Path(__file__).parents[1] / "docs" / "semantics.md"


class Tokens(NamedTuple):
    """The output of a request, by index: ids, and logprobs as hexadecimal floats, which show every bit."""

    ids: dict[int, list[int]]
    logprobs: dict[int, list[str]]


def random_requests(llm: nc.LLM, count: int, longest: int, seed: int) -> list[Request]:
    """Requests of many lengths; every second one shares a prefix with others, one in fifty is long."""
    rng = random.Random(seed)
    ids = llm.encode(TEXT.read_text("utf-8")[:200_000])
    prefixes = [ids[start : start + 200] for start in rng.sample(range(len(ids) - 200), 6)]
    found = []
    for number in range(count):
        length = rng.randint(3, 60) if rng.random() > 0.02 else rng.randint(300, max(longest, 301))
        start = rng.randrange(max(len(ids) - length, 1))
        prompt = ids[start : start + length]
        if rng.random() < 0.5:
            prompt = rng.choice(prefixes)[: rng.randint(1, 150)] + prompt[:20]
        params = nc.SamplingParams(
            temperature=rng.choice([0.0, 0.9]),
            top_p=rng.choice([1.0, 0.9]),
            seed=number,
            n=rng.choice([1] * 9 + [3]),
            max_tokens=rng.randint(1, 16),
            logprobs=0,
            ignore_eos=True,
        )
        found.append(Request(prompt[: llm.model.context_length - 20], params))
    return found


def collect(found: dict[str, Tokens], outputs: Sequence[Any]) -> None:
    """Add outputs by request."""
    for output in outputs:
        chunk = output.chunk
        if chunk.finish_reason == "error":
            raise RuntimeError(chunk.stop_reason)
        own = found.setdefault(output.request_id, Tokens({}, {}))
        own.ids.setdefault(chunk.index, []).extend(chunk.token_ids)
        own.logprobs.setdefault(chunk.index, []).extend(one.chosen.logprob.hex() for one in chunk.logprobs or ())


def alone(llm: nc.LLM, requests: Sequence[Request], **options: Any) -> list[Tokens]:
    """The outputs of each request on its own."""
    engine = llm.new_engine(enable_prefix_caching=False, speculative_config=None, **options)
    results = []
    for request in requests:
        found: dict[str, Tokens] = {}
        name = engine.add(request)
        while len(engine):
            collect(found, engine.step())
        results.append(found[name])
    return results


def together(llm: nc.LLM, requests: Sequence[Request], seed: int, **options: Any) -> tuple[list[Tokens | None], float]:
    """The outputs of requests that arrive at random; None for aborted ones. Also the seconds."""
    rng, engine = random.Random(seed), llm.new_engine(**options)
    found: dict[str, Tokens] = {}
    names: list[str] = []
    aborted: set[str] = set()
    begin = time.perf_counter()
    while len(engine) or len(names) < len(requests):
        while len(names) < len(requests) and (not len(engine) or rng.random() < 0.4):
            names.append(engine.add(requests[len(names)]))
        collect(found, engine.step())
        if rng.random() < 0.01:
            victim = rng.choice(names)
            if engine.abort(victim):
                aborted.add(victim)
    return [None if name in aborted else found[name] for name in names], time.perf_counter() - begin


PROMPTS = ("Once upon a time", "The capital of France is", "def fib(n):", "1, 2, 3,", "Dear Sir,", "A", "It was", "My")


def table_row(model: str | None, how: dict[str, Any]) -> str:
    """The same texts alone and among eight, of 24 each, without batch invariance and with it."""
    cells = []
    for invariant in (False, True):
        llm = nc.LLM(model, generation_config="none", batch_invariant=invariant, **how)
        seeded = [nc.SamplingParams(temperature=0.9, seed=seed, max_tokens=64, ignore_eos=True) for seed in range(16)]
        greedy = [nc.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)] * 8
        counts = []
        for params in (seeded, greedy):
            prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
            single = [llm.generate([prompt], one)[0].text for prompt, one in zip(prompts, params, strict=True)]
            among = []
            for i in range(0, len(prompts), 8):
                among += [one.text for one in llm.generate(prompts[i : i + 8], params[i : i + 8])]
            equal = sum(one == other for one, other in zip(single, among, strict=True))
            counts.append(f"{equal} of {len(params)}")
        cells.append(", ".join(counts))
    return f"| {llm.model.runtime} | {cells[0]} | {cells[1]} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file or a folder [default: the embedded model]")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--max-num-seqs", type=int, nargs="+", default=[4, 8, 40])
    parser.add_argument("--longest", type=int, default=3000, help="tokens of the longest prompts [default 3000]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cache-type", default="f16")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch-invariant", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gguf = options.model is not None and options.model.endswith(".gguf")
    cache = {"cache_type_k": options.cache_type, "cache_type_v": options.cache_type, "n_threads": options.threads}
    how: dict[str, Any] = {"gguf_options": cache} if gguf else {"dtype": options.dtype}
    if options.table:
        print(table_row(options.model, how), flush=True)
        return
    llm = nc.LLM(options.model, generation_config="none", batch_invariant=options.batch_invariant, **how)
    requests = random_requests(llm, options.requests, min(options.longest, llm.model.context_length - 20), options.seed)
    begin = time.perf_counter()
    expected = alone(llm, requests, max_num_seqs=4)
    print(f"{llm.model.runtime}: {len(requests)} requests alone: {time.perf_counter() - begin:.0f} s", flush=True)
    rows = []
    for count in options.max_num_seqs:
        for name, extra in (("", {}), ("drafts", {"speculative_config": "ngram"})):
            small = {"kv_cache_memory": 6000 * llm.model.token_bytes} if count == 8 else {}
            results, seconds = together(llm, requests, options.seed, max_num_seqs=max(count, 4), **small, **extra)
            pairs = [(one, other) for one, other in zip(expected, results, strict=True) if other is not None]
            texts = sum(one.ids != other.ids for one, other in pairs)
            bits = sum(one != other for one, other in pairs)
            rows.append({"max_num_seqs": count, "mode": name, "requests": len(pairs), "texts": texts, "bits": bits})
            found = f"{len(pairs)} compared, {texts} other texts, {bits} other bits, {seconds:.0f} s"
            print(f"max_num_seqs {count:3} {name:7}: {found}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"model": llm.model.runtime, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
