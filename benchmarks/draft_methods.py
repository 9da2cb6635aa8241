"""The cost of the draft methods that look tokens up: n-grams and suffixes.

The text is random words in Zipf's proportions, of which a third repeat an earlier passage. Measured are indexing a
prompt (per token), a draft after one more token at 1 and 64 sequences (per sequence, in one call), and learning the
output of a finished sequence of 120 tokens. Medians over the rounds, in microseconds.

    python benchmarks/draft_methods.py [--rounds 20] [--history 500] [--tokens 4]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter

import numpy as np

from nucleate.speculative.draft import DraftContext, Proposer
from nucleate.speculative.ngram import NgramProposer
from nucleate.speculative.suffix import SuffixProposer

LEARNED, FINISHED = 120, 200
"""Tokens of a finished sequence, and the number of those that are cached before the measurement."""

METHODS: dict[str, Callable[[], Proposer]] = {
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
    "suffix, trees": lambda: SuffixProposer(tree_width=3),
}


def text(length: int, seed: int) -> list[int]:
    rng, chance = np.random.default_rng(seed), 1.0 / np.arange(2, 20_002)
    tokens: list[int] = []
    while len(tokens) < length:
        if tokens and rng.random() < 0.3:
            start = int(rng.integers(len(tokens)))
            tokens += tokens[start : start + 10]
        tokens += rng.choice(20_000, 20, p=chance / chance.sum()).tolist()
    return tokens[:length]


def seconds(work: Callable[[], object]) -> float:
    begin = perf_counter()
    work()
    return perf_counter() - begin


class Measurement:
    """The times of one proposer, in microseconds, by what was measured."""

    def __init__(self, proposer: Proposer, history: int, tokens: int) -> None:
        self.proposer, self.history, self.tokens = proposer, history, tokens
        self.times: dict[str, list[float]] = {}
        for number in range(FINISHED):
            proposer.forget(number, text(LEARNED, number))

    def round(self, turn: int) -> None:
        """Measure everything once."""
        for sequences in (1, 64):
            lists = [text(self.history + 8, 1000 * turn + number) for number in range(sequences)]
            contexts = [DraftContext(number, tokens[: self.history]) for number, tokens in enumerate(lists)]
            index = seconds(lambda: self.proposer.propose(contexts, [0] * len(contexts)))  # noqa: B023
            self._add("index a prompt, per token", index / sequences / self.history)
            for step in range(8):
                for context, tokens in zip(contexts, lists, strict=True):
                    context.token_ids.append(tokens[self.history + step])
                begin = perf_counter()
                self.proposer.propose(contexts, [self.tokens] * sequences)
                self._add(f"draft, {sequences} at once, per sequence", (perf_counter() - begin) / sequences)
            for number in range(sequences):
                self.proposer.forget(number)
        output = text(LEARNED, 77 + turn)
        self._add(f"learn {LEARNED} tokens", seconds(lambda: self.proposer.forget(0, output)))

    def _add(self, what: str, took: float) -> None:
        self.times.setdefault(what, []).append(took * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--history", type=int, default=500, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=4, help="draft tokens")
    options = parser.parse_args()
    print(f"{'':16}{'':36}{'us':>14}")
    for name, new in METHODS.items():
        measurement = Measurement(new(), options.history, options.tokens)
        for turn in range(options.rounds):
            measurement.round(turn)
        for what, times in measurement.times.items():
            print(f"{name:16}{what:36}{statistics.median(times):14.2f}")


if __name__ == "__main__":
    main()
