"""Engines that draft beside one that does not: the same requests, in turn in one process, with the embedded model.

Each kind of work is done by one answer at a time and by eight at once, others waiting, at temperature 0 and 0.8. A
ratio is the median, over rounds, of the seconds without drafts by those with. Answers are compared, too: they are the
same but where two tokens are as likely but for the rounding of float32, which a forward of more tokens does in another
order.

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
from nucleate.models.runner import Part
from nucleate.warming import warm

TOKENS = 120
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
WAYS = {
    "ngram": Speculation("ngram", 7),
    "suffix": Speculation("suffix", 7),
    "medusa": Speculation("medusa"),
    "eagle": Speculation("eagle"),
    "ngram, always 4": Speculation("ngram", adaptive=False),
}


class Run(NamedTuple):
    """What some requests took, and what was said."""

    seconds: float
    tokens: list[list[int]]


def run(engine: Engine, requests: Sequence[Request]) -> Run:
    """All of them are asked for at once, and wait until the engine has room."""
    begin = perf_counter()
    places = {engine.add(request): place for place, request in enumerate(requests)}
    said: list[list[int]] = [[] for _ in places]
    while len(engine):
        for event in engine.step():
            said[places[event.request_id]] += event.piece.token_ids
    return Run(perf_counter() - begin, said)


def requests_of(llm: nc.LLM, kind: str, temperature: float, at_once: int, turn: int) -> list[Request]:
    """Those of a turn: with noise of their own, unless they are to be the same again; four times as many as at once."""
    turn = 0 if kind == "again" else turn
    params = nc.SamplingParams(temperature=temperature, max_tokens=TOKENS, ignore_eos=True)
    return [
        Request(llm.encode(prompt), params.replace(seed=1000 * turn + place))
        for place, prompt in enumerate(PROMPTS[kind][: max(8, 4 * at_once)])
    ]


def new_engine(llm: nc.LLM, name: str, at_once: int) -> Engine:
    """An engine that knows no request of before. One answer alone would be read without kernels: a draft loads them."""
    engine = llm.new_engine(speculation=WAYS.get(name), max_sequences=at_once)
    engine.runner.forward([Part(-1, [1, 2], 0, 2, [0], 2)])
    return engine


def measure(llm: nc.LLM, kind: str, temperature: float, at_once: int, rounds: int) -> dict[str, Any]:
    """Each round has engines of its own; but what is asked for again was answered before the clock starts."""
    names = ("plain", *WAYS)
    engines = {name: new_engine(llm, name, at_once) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    equal: dict[str, list[bool]] = {name: [] for name in names}
    for turn in range(rounds + 1):  # the first one warms up
        asked = requests_of(llm, kind, temperature, at_once, turn)
        wanted: list[list[int]] = []
        for name in names if turn % 2 else reversed(names):
            if turn and kind != "again":
                engines[name] = new_engine(llm, name, at_once)
            found = run(engines[name], asked)
            wanted = wanted or found.tokens
            if turn:
                seconds[name].append(found.seconds)
                equal[name] += [own == other for own, other in zip(found.tokens, wanted, strict=True)]
    result: dict[str, Any] = {}
    for name, times in seconds.items():
        ratios = [plain / own for plain, own in zip(seconds["plain"], times, strict=True)]
        rate = len(wanted) * TOKENS / statistics.median(times)
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
        "what": f"8 prompts, or 32 of which 8 are at work at a time, {TOKENS} tokens each, the embedded model; "
        "ratio: times as fast as without drafts",
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
