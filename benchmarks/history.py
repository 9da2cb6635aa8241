"""The cost of token history per token and length: appending a token, and reading the table of each stage.

The reference computes the table from the whole history; it is measured in the same run. The text is random words in
Zipf's proportions, so that short repeats are as common as in prose; "one token" is a prompt of one repeated token, the
worst case.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from nucleate.sampling.history import History
from nucleate.sampling.incremental_history import IncrementalHistory
from nucleate.sampling.stage import Shift
from nucleate.sampling.stages import BadWords, Dry, NoRepeatNgram, Presence, Repetition

STAGES: tuple[Shift, ...] = (
    Repetition(1.1),
    Presence(0.5, last_n=64),
    Dry(0.8, breakers=((1,), (2, 3))),
    Dry(0.8, breakers=((1,), (2, 3)), last_n=1024),
    NoRepeatNgram(3),
    BadWords(((5, 6), (7,))),
)


def text(kind: str, length: int) -> list[int]:
    if kind == "one token":
        return [4] * length
    chance = 1.0 / np.arange(2, 20_002)
    return np.random.default_rng(0).choice(20_000, length, p=chance / chance.sum()).tolist()


def microseconds(work: Callable[[int], object], tokens: list[int]) -> float:
    start = time.perf_counter()
    for token in tokens:
        work(token)
    return (time.perf_counter() - start) / len(tokens) * 1e6


def main() -> None:
    print(f"{'stage':42}{'history':>16}{'admit, ms':>11}{'per token, us':>15}{'reference, us':>15}")
    for stage in STAGES:
        for kind, length in (("prose", 1_000), ("prose", 100_000), ("one token", 100_000)):
            prompt, more = text(kind, length), text("prose", 300)
            start = time.perf_counter()
            memory = IncrementalHistory((stage,), prompt)
            admitted = (time.perf_counter() - start) * 1e3

            def step(token: int, memory: IncrementalHistory = memory, stage: Shift = stage) -> None:
                memory.push(token)
                memory.listing(stage)
                memory.counts(stage.window)

            fast = microseconds(step, more)
            history = History(prompt, more)
            slow = microseconds(lambda _, h=history, s=stage: (h.listing(s), h.counts(s.window)), more[:2])
            print(f"{stage!r:42.41}{f'{kind} {length}':>16}{admitted:11.1f}{fast:15.1f}{slow:15.1f}")


if __name__ == "__main__":
    main()
