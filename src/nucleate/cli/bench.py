"""Measure the time to sample a token on this machine, compared with NumPy's max over the same logits.

Prints medians. The two are called alternately, so that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.cli.argument_parser import Flag

USAGE = "[OPTIONS]"

_TRUNCATED: Mapping[str, Any] = dict(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
_LLAMA_CPP: Mapping[str, Any] = dict(_TRUNCATED, order="llama.cpp")

CHAINS: Mapping[str, Mapping[str, Any]] = {
    "greedy": dict(temperature=0),
    "T .8": dict(temperature=0.8),
    "T .8, top_k 40, min_p .05, top_p .95": _TRUNCATED,
    "repetition + frequency over 1024, the same": dict(
        _TRUNCATED, repetition_penalty=1.1, frequency_penalty=0.1, penalty_last_n=1024
    ),
    "top_k 40, top_p .95, min_p .05, T .8": _LLAMA_CPP,
    "repetition over 64, the same": dict(_LLAMA_CPP, repetition_penalty=1.1, penalty_last_n=64),
    "repetition over 1024, the same": dict(_LLAMA_CPP, repetition_penalty=1.1, penalty_last_n=1024),
    "T .7, top_p .9": dict(temperature=0.7, top_p=0.9),
    "top_p .9, T .7": dict(temperature=0.7, top_p=0.9, order="llama.cpp"),
    "T .8, min_p .05": dict(temperature=0.8, min_p=0.05),
    "min_p .05, T .8": dict(temperature=0.8, min_p=0.05, order="llama.cpp"),
    "T .8, top_n_sigma 1": dict(temperature=0.8, top_n_sigma=1.0),
    "top_n_sigma 1, T .8": dict(temperature=0.8, top_n_sigma=1.0, order="llama.cpp"),
    "top_k 1000": dict(top_k=1000),
    "typical .95, T .8": dict(temperature=0.8, typical_p=0.95, order="llama.cpp"),
    "mirostat v2": dict(mirostat_tau=5.0),
}
KINDS = ("peaked", "flat", "shifted", "ties")
FLAGS = (
    Flag("--vocabulary V", "Vocabulary size", 128_256),
    Flag("--rows R", "Rows per call", 1),
    Flag("--logits KIND", f"Distribution of the logits: {', '.join(KINDS)}", "peaked", choices=KINDS),
    Flag("--seconds S", "Seconds per pipeline", 0.5),
    Flag("--json", "Print a JSON list instead of a table."),
)

Call = Callable[[], object]


def run(arguments: argparse.Namespace) -> int:
    from nucleate.parameters.parameter import ParameterError

    for name, least in (("vocabulary", 1), ("rows", 1), ("seconds", 0.0)):
        if not getattr(arguments, name) >= least:
            raise ParameterError(name, f"--{name} must be at least {least:g}, got {getattr(arguments, name)}")
    x_BV = logits(arguments.logits, arguments.rows, arguments.vocabulary)
    found = []
    if not arguments.json:
        print(f"{arguments.rows} x {arguments.vocabulary} logits, {arguments.logits}: microseconds per call")
        print(f"{'':44}{'nucleate':>10}{'NumPy max':>11}{'ratio':>8}")
    for chain, params in CHAINS.items():
        calls = {"nucleate": sampler_call(x_BV, params), "numpy max": lambda: x_BV.max(axis=1)}
        times = medians(calls, arguments.seconds)
        found.append({"chain": chain, "microseconds": times})
        if not arguments.json:
            own, floor = times["nucleate"], times["numpy max"]
            print(f"{chain:44}{own:10.1f}{floor:11.1f}{own / floor:8.1f}", flush=True)
    if arguments.json:
        print(json.dumps(found, indent=1))
    return 0


def logits(kind: str, rows: int, size: int) -> NDArray[np.float32]:
    """Return float32 [rows, size]: noise with a peak, noise only, a peak far from 0, or many equal logits."""
    numbers = np.random.default_rng(0)
    x_BV = numbers.normal(0, 2.5, (rows, size))
    if kind in ("peaked", "shifted"):
        for x_V in x_BV:
            head = numbers.integers(0, size, 40)  # 90 % of the probability, as in a confident model
            x_V[head] += np.linspace(2, 20, 40)
    if kind == "shifted":
        x_BV += 50.0
    if kind == "ties":
        x_BV = np.round(x_BV)
    return x_BV.astype(np.float32)


def history(params: Mapping[str, Any], size: int) -> list[int]:
    """Return random tokens, as many as ``penalty_last_n``."""
    tokens: list[int] = np.random.default_rng(1).integers(0, size, params.get("penalty_last_n", 0)).tolist()
    return tokens


def sampler_call(x_BV: NDArray[np.float32], params: Mapping[str, Any]) -> Call:
    """Return a function that samples one token per row."""
    from nucleate.sampling.sampler import Sampler
    from nucleate.sampling_params import SamplingParams

    rows, size = x_BV.shape
    before = history(params, size)

    def make() -> Call:
        sampler = Sampler(size, backend="cpu")  # "auto" starts with the reference until the kernels are loaded
        for row in range(rows):
            sampler.add(SamplingParams(seed=row, **params), output_ids=before)
        return lambda: sampler(x_BV).token_ids

    return recreate_every(make) if before else make()


def recreate_every(make: Callable[[], Call], calls: int = 16) -> Call:
    """Return a function that recreates the sampler every so many calls.

    With the same logits at every step the sampled tokens repeat, so that the history would soon have only a few
    different ones. The calls that recreate it are too few to change the median.
    """
    call, done = make(), 0

    def counting() -> object:
        nonlocal call, done
        if done == calls:
            call, done = make(), 0
        done += 1
        return call()

    return counting


def medians(calls: Mapping[str, Call], seconds: float) -> dict[str, float]:
    """Return the median microseconds of each call, measured alternately for so many seconds, at least three times."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 3:
        for name, call in calls.items():
            times[name] += time_calls(call)
    return {name: statistics.median(found) * 1e6 for name, found in times.items()}


def time_calls(call: Call) -> list[float]:
    """Return the seconds of five calls, after one that warms the caches."""
    call()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times
