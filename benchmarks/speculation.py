"""Engines that draft beside one that does not: the same requests, in turn in one process, with the embedded model.

Each kind of work is done by one answer at a time and by eight at once, greedily and at temperature 0.8. A ratio is the
median, over rounds, of the seconds without drafts by those with. Answers are compared, too: they are the same but where
two tokens are as likely but for the rounding of float32, which a forward of more tokens does in another order.

- repeats: prompts after which the embedded model repeats itself, as far as it does (it does not copy what it is shown:
  JSON records and texts to edit, where other models profit, it turns into stories)
- again: requests that were answered once before the clock starts, and come again
- stories: ordinary prompts, where there is little to guess

    python benchmarks/speculation.py [--rounds 5] [--out benchmarks/results/speculation.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.engine.speculate import Speculation
from nucleate.warming import warm

TOKENS = 120
RECORDS = "".join(
    f'{{"name": "{name}", "age": {age}, "city": "Rome"}}\n' for name, age in (("Ana", 3), ("Bob", 4), ("Cid", 5))
)
STORIES = (
    "Once upon a time", "Tom went to the park", "The little bird was sad", "Lily wanted a cake",
    "One day, a boy named Tim", "The sun was", "Mom said", "In the big forest",
)  # fmt: skip
REPEATS = (
    RECORDS, "Row, row, row the boat, down the river. " * 5, "- wash the car\n- feed the dog\n- call mom\n" * 4,
    "Tom: I like the red ball.\nMia: I like the blue ball.\n" * 4,
)  # fmt: skip
PROMPTS = {"repeats": REPEATS * 2, "again": STORIES, "stories": STORIES}
WAYS = {
    "ngram": Speculation("ngram", 7),
    "suffix": Speculation("suffix", 7),
    "ngram, always 4": Speculation("ngram", 4, adaptive=False),
}


class Run(NamedTuple):
    """What some requests took, and what was said."""

    seconds: float
    tokens: list[list[int]]


def run(engine: Engine, requests: Sequence[Request], at_once: int) -> Run:
    said: list[list[int]] = []
    begin = perf_counter()
    for start in range(0, len(requests), at_once):
        places = {engine.add(request): place for place, request in enumerate(requests[start : start + at_once], start)}
        said += [[] for _ in places]
        while len(engine):
            for event in engine.step():
                said[places[event.request_id]] += event.piece.token_ids
    return Run(perf_counter() - begin, said)


def requests_of(llm: nc.LLM, kind: str, temperature: float, turn: int) -> list[Request]:
    """Those of a turn: with noise of their own, unless they are to be the same again."""
    turn = 0 if kind == "again" else turn
    params = nc.SamplingParams(temperature=temperature, max_tokens=TOKENS, ignore_eos=True)
    return [
        Request(llm.encode(prompt), params.replace(seed=1000 * turn + place))
        for place, prompt in enumerate(PROMPTS[kind])
    ]


def new_engine(llm: nc.LLM, name: str) -> Engine:
    """An engine that knows no request of before. One answer alone would be read without kernels: these load them."""
    engine = llm.new_engine(speculation=WAYS.get(name))
    run(engine, [Request([1, 2, place], nc.SamplingParams(max_tokens=2, ignore_eos=True)) for place in (3, 4)], 2)
    return engine


def measure(llm: nc.LLM, kind: str, temperature: float, at_once: int, rounds: int) -> dict[str, Any]:
    """Each round has engines of its own; but what is asked for again was answered before the clock starts."""
    names = ("plain", *WAYS)
    engines = {name: new_engine(llm, name) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    equal: dict[str, list[bool]] = {name: [] for name in names}
    for turn in range(rounds + 1):  # the first one warms up
        asked = requests_of(llm, kind, temperature, turn)
        wanted: list[list[int]] = []
        for name in names if turn % 2 else reversed(names):
            if turn and kind != "again":
                engines[name] = new_engine(llm, name)
            found = run(engines[name], asked, at_once)
            wanted = wanted or found.tokens
            if turn:
                seconds[name].append(found.seconds)
                equal[name] += [own == other for own, other in zip(found.tokens, wanted, strict=True)]
    result: dict[str, Any] = {}
    for name, times in seconds.items():
        ratios = [plain / own for plain, own in zip(seconds["plain"], times, strict=True)]
        rate = len(PROMPTS[kind]) * TOKENS / statistics.median(times)
        result[name] = {"tokens/s": round(rate), "ratio": round(statistics.median(ratios), 2)}
        if name != "plain":
            tau = engines[name].stats.drafts.tau
            result[name] |= {"tau": round(tau, 2), "equal": f"{sum(equal[name])} of {len(equal[name])}"}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    warm(nc.SamplingParams())
    llm = nc.LLM()
    result: dict[str, Any] = {
        "what": f"8 prompts, {TOKENS} tokens each, the embedded model; ratio: times as fast as without drafts",
        "where": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    for kind in PROMPTS:
        for temperature in (0.0, 0.8):
            for at_once in (1, 8):
                case = f"{kind}, temperature {temperature:g}, {at_once} at once"
                result[case] = measure(llm, kind, temperature, at_once, asked.rounds)
                print(case, json.dumps(result[case]), flush=True)
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
