"""Speculative decoding compared with normal decoding: the same requests, in turn in one process.

Each workload runs with one sequence at a time, and with eight at once and a queue, at temperatures 0 and 0.8. The
engines alternate every few steps, so that other load on the machine affects all alike. A ratio is the time of a round
without speculation divided by the time with it; the median over the rounds is reported. "cpu" is the same ratio of CPU
times, which other processes disturb less. "control" is a second engine without speculation: its ratio shows the noise.
--busy starts processes that keep cores busy. --model takes another model than the embedded one, for the methods that
need no draft model, and for "eagle" with --head. Outputs are compared: they are equal except for near ties, as a
forward pass of several tokens rounds differently.

- repeats: prompts after which the embedded model repeats itself (it does not copy from its prompt, unlike models that
  can edit text or continue JSON records)
- again: requests that have been answered before, outside the measurement
- stories: ordinary prompts with little repetition

    python benchmarks/speculation.py [--rounds 5] [--busy 0] [--methods eagle ...] [--kinds stories ...]
        [--at-once 1 8] [--model FOLDER_OR_GGUF] [--head FOLDER] [--batch-invariant]
        [--out benchmarks/results/speculation.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from sampler import machine

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.jit.kernel_libraries import warm
from nucleate.models.runner import ModelInput
from nucleate.speculative.config import Speculation

TOKENS = 120
STEPS = 8
"""Steps per turn."""

NAMES = ("Tom", "Lily", "Ben", "Mia")


def stories(name: str) -> tuple[str, ...]:
    return (
        f"Once upon a time, {name}", f"{name} went to the park", f"{name} and the little bird", f"{name} wanted a cake",
        f"One day, a child named {name}", f"The sun was up. {name}", f"Mom said to {name}", f"In the forest {name} saw",
    )  # fmt: skip


def repeats(name: str) -> tuple[str, ...]:
    records = (f'{{"name": "{each}", "age": {age}, "city": "Rome"}}\n' for age, each in enumerate((name, "Bob", "Cid")))
    return (
        "".join(records), f"Row, row, row the boat, {name}, down the river. " * 5,
        f"- wash the car\n- call {name}\n- feed the dog\n" * 4,
        f"{name}: I like the red ball.\nSam: I like the blue ball.\n" * 4,
    )  # fmt: skip


PROMPTS = {
    "repeats": [prompt for name in (*NAMES, "Anna", "Max", "Sue", "Tim") for prompt in repeats(name)],
    "again": [prompt for name in NAMES for prompt in stories(name)],
    "stories": [prompt for name in NAMES for prompt in stories(name)],
}
WAYS: dict[str, Speculation | None] = {
    "control": None,
    "ngram": Speculation("ngram", 7),
    "suffix": Speculation("suffix", 7),
    "medusa": Speculation("medusa"),
    "eagle": Speculation("eagle"),
    "dflash": Speculation("dflash"),
    "draft": Speculation("draft"),
    "ngram, always 4": Speculation("ngram", adaptive=False),
}


class Work:
    """Some requests to an engine, all submitted at once; the engine queues them."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self.engine, self.seconds, self.cpu_seconds = engine, 0.0, 0.0
        self._places = {engine.add(request): index for index, request in enumerate(requests)}
        self.outputs: list[list[int]] = [[] for _ in requests]

    def turn(self) -> bool:
        """Run some steps. Returns whether requests remain."""
        begin, cpu_begin, events = perf_counter(), process_time(), []
        for _ in range(STEPS):
            events += self.engine.step()
        self.seconds += perf_counter() - begin
        self.cpu_seconds += process_time() - cpu_begin
        for event in events:
            self.outputs[self._places[event.request_id]] += event.chunk.token_ids
        return len(self.engine) > 0


def requests_of(llm: nc.LLM, kind: str, temperature: float, at_once: int, turn: int) -> list[Request]:
    """The requests of a round: four times the concurrency, with new seeds except in "again"."""
    turn = 0 if kind == "again" else turn
    params = nc.SamplingParams(temperature=temperature, max_tokens=TOKENS, ignore_eos=True)
    return [
        Request(llm.encode(prompt), params.replace(seed=1000 * turn + index))
        for index, prompt in enumerate(PROMPTS[kind][: max(8, 4 * at_once)])
    ]


def new_engine(llm: nc.LLM, name: str, at_once: int) -> Engine:
    """A new engine, with kernels loaded: without speculation, a single sequence would not load them."""
    engine = llm.new_engine(speculative_config=WAYS.get(name), max_num_seqs=at_once)
    engine.runner.forward([ModelInput(-1, [1, 2], 0, 2, [0], 2)])
    return engine


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep this many cores busy."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(
    llm: nc.LLM, methods: Sequence[str], kind: str, temperature: float, at_once: int, rounds: int
) -> dict[str, Any]:
    """Each round has new engines; for "again", the requests are first answered outside the measurement."""
    names = ("plain", *methods)
    engines = {name: new_engine(llm, name, at_once) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in names}
    equal = dict.fromkeys(names, 0)
    taus: dict[str, float] = {}
    for turn in range(rounds + 1):  # the first one warms up
        if turn and kind != "again":
            engines = {name: new_engine(llm, name, at_once) for name in names}
        requests = requests_of(llm, kind, temperature, at_once, turn)
        works = {name: Work(engines[name], requests) for name in names}
        going = deque(names)
        while going:
            going.rotate(1)  # vary the order
            going = deque([name for name in going if works[name].turn()])
        for name, work in works.items() if turn else ():
            seconds[name].append(work.seconds)
            cpu_seconds[name].append(work.cpu_seconds)
            equal[name] += sum(own == other for own, other in zip(work.outputs, works["plain"].outputs, strict=True))
            taus[name] = engines[name].stats.speculative.mean_acceptance_length
    result: dict[str, Any] = {}
    for name in names:
        rate = rounds * len(requests) * TOKENS / sum(seconds[name])
        result[name] = {"tokens/s": round(rate), "ratio": _ratio(seconds, name), "cpu": _ratio(cpu_seconds, name)}
        if WAYS.get(name) is not None:
            result[name] |= {"tau": round(taus[name], 2), "equal": f"{equal[name]} of {rounds * len(requests)}"}
    return result


def _ratio(seconds: dict[str, list[float]], name: str) -> float:
    """The median of the times without speculation, divided by those of a method."""
    return round(statistics.median(map(operator.truediv, seconds["plain"], seconds[name])), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that keep a core busy")
    parser.add_argument("--methods", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--kinds", nargs="+", choices=PROMPTS, default=[*PROMPTS])
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--model", help="a folder or a GGUF file [default: the embedded model]")
    parser.add_argument("--head", help='a folder with the EAGLE head for "eagle"')
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warm()
    if options.head is not None:
        WAYS["eagle"] = Speculation("eagle", model=options.head)
    start = perf_counter()
    llm = nc.LLM(options.model, dtype=options.dtype, batch_invariant=options.batch_invariant)
    result: dict[str, Any] = {
        "what": f"8 prompts, or 32 of which 8 are at work at a time, {TOKENS} tokens each, "
        f"{Path(options.model).name if options.model else 'the embedded model'}; "
        "ratio: times as fast as without drafts",
        "machine": machine() + (f", {options.busy} busy processes" if options.busy else ""),
    }
    cases = itertools.product(options.kinds, options.temperatures, options.at_once)
    with busy(options.busy):
        for kind, temperature, at_once in cases:
            case = f"{kind}, temperature {temperature:g}, {at_once} at once"
            result[case] = measure(llm, options.methods, kind, temperature, at_once, options.rounds)
            print(case, json.dumps(result[case]), flush=True)
    result["seconds"] = round(perf_counter() - start)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
