"""What each kernel of the NumPy Llama gains: the embedded model with all kernels, and with one replaced by NumPy.

The variants run in turn in one process, on one thread: a few decode steps of each, many times. Prints tokens per second
of CPU time (medians), the gain of the kernel (the median of the ratios within a turn), and microseconds per call of the
kernel and of NumPy. CPU time, because other processes affect it little; "control" is all kernels again.

    python benchmarks/model_kernels.py [--batch 1 8 32] [--turns 60]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

os.environ["NUCLEATE_THREADS"] = "1"

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.models.batched_llama import NUMPY, LlamaKernels, compiled
from nucleate.models.cpu_operations import one_thread
from nucleate.models.paged_cache import AttentionRule, BatchLayout, allocate_kv_cache
from nucleate.models.runner import ModelInput

STEPS = 8
"""Decode steps of a variant per turn."""
TOKENS = 900
"""Tokens per sequence, after which new sequences start."""
CONTEXT = 256
"""Tokens per sequence when the attention kernel is measured alone."""
PARAMS = nc.SamplingParams(temperature=0.8, top_p=0.95, seed=1, ignore_eos=True, max_tokens=1000)


def seconds(work: Callable[[], object], count: int) -> float:
    """CPU seconds of this process."""
    start = time.process_time()
    for _ in range(count):
        work()
    return time.process_time() - start


def new_engine(llm: nc.LLM, batch: int) -> Engine:
    """An engine that decodes ``batch`` sequences."""
    engine = llm.new_engine(max_num_seqs=batch)
    for row in range(batch):
        engine.add(nc.Request([5 + row, 6, 7], PARAMS))
    while engine.step() == []:
        pass
    return engine


def throughput(llm: nc.LLM, variants: dict[str, LlamaKernels], batch: int, turns: int) -> dict[str, list[float]]:
    """Tokens per second of CPU time, by variant and turn. Each turn starts with the next variant.

    The variants continue the same sequences, with the same KV cache.
    """
    rates: dict[str, list[float]] = {name: [] for name in variants}
    names, steps = list(variants), TOKENS
    for turn in range(turns):
        if steps + STEPS * len(names) > TOKENS:
            engine, steps = new_engine(llm, batch), 0
            runner: Any = engine.runner
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            runner.kernels = variants[name]
            rates[name].append(STEPS * batch / seconds(engine.step, STEPS))
        steps += STEPS * len(names)
    return rates


def calls(model: Any, batch: int) -> dict[str, tuple[Any, ...]]:
    """Arguments for each operation, with the sizes of the model."""
    random = np.random.default_rng(0)

    def some(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32)

    hidden, inner, heads, kv_heads, size = (
        model.hidden_size, model.inner_size, model.heads, model.kv_heads, model.head_size
    )  # fmt: skip
    blocks = CONTEXT // 16
    tables = [range(row * blocks, (row + 1) * blocks) for row in range(batch)]
    inputs = [ModelInput(row, [0] * CONTEXT, CONTEXT - 1, CONTEXT, tables[row], 1) for row in range(batch)]
    cache = allocate_kv_cache(batch * blocks, 16, kv_heads, size, size)
    for array in cache:
        array[:] = some(*array.shape)
    new = some(batch, heads, size), some(batch, kv_heads, size), some(batch, kv_heads, size)
    x, delta, normal = (some(batch, hidden) for _ in range(3))
    return {
        "add_and_normalise": (x, delta, some(hidden), np.float32(1e-5), normal),
        "rotate": (some(batch, heads + kv_heads, size), some(batch, size // 2), some(batch, size // 2)),
        "gate": (some(batch, 2 * inner), some(batch, inner)),
        "matmul": (some(batch, hidden), some(hidden, 2 * inner), some(batch, 2 * inner)),
        "attend": (*new, cache, BatchLayout(inputs, 16), AttentionRule(size**-0.5)),
    }


def microseconds(functions: Sequence[Callable[[], object]], turns: int) -> list[float]:
    """The median duration of a call of each function. The functions take turns."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(turns):
        for function, found in zip(functions, times, strict=True):
            found.append(seconds(function, 20) / 20 * 1e6)
    return [median(found) for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="batch sizes [default 1 8 32]")
    parser.add_argument("--turns", type=int, default=60, help="turns per batch size [default 60]")
    options = parser.parse_args()
    nc.warm()
    llm, kernels = nc.LLM(), compiled()
    variants = {"all kernels": kernels}
    variants |= {name: kernels._replace(**{name: getattr(NUMPY, name)}) for name in LlamaKernels._fields}
    variants["control"] = kernels
    variants["NumPy only"] = NUMPY._replace(attend=partial(NUMPY.attend))  # not NUMPY itself, which would be replaced
    for batch in options.batch:
        rates = throughput(llm, variants, batch, options.turns)
        every = rates.pop("all kernels")
        print(f"batch {batch}: {median(every):.0f} tokens/s with all kernels")
        print(f"  {'without':20}{'tokens/s':>10}{'gain':>8}{'kernel, us':>12}{'NumPy, us':>11}")
        for name, found in rates.items():
            gain = median(one / other for one, other in zip(every, found, strict=True)) - 1
            line = f"  {name:20}{median(found):10.0f}{gain:8.1%}"
            if name in LlamaKernels._fields:
                arguments = calls(llm.model, batch)[name]
                pair = [partial(getattr(each, name), *arguments) for each in (kernels, NUMPY)]
                with one_thread(), np.errstate(all="ignore"):
                    line += "{:12.1f}{:11.1f}".format(*microseconds(pair, options.turns))
            print(line, flush=True)


if __name__ == "__main__":
    main()
