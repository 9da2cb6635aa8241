"""Generates training text for drafts with the embedded model, from the beginnings of documents.

Run: python training/samples.py CORPUS OUT.npz --minutes 6

Drafts are verified against the output of the target, which differs from its training text. Each of the --temperatures
gets the same number of samples; 0 means greedy.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import corpus
import numpy as np
from tokenizers import Tokenizer

from nucleate.models.batched_llama import BatchedLlama
from nucleate.models.loader import EMBEDDED
from nucleate.models.numpy_llama import Floats, Llama
from nucleate.models.runner import BLOCK, ModelInput

ROWS, LENGTH = 96, 448
ENDS = (0, 4)  # the separator, and the end of a turn


def beginnings(folder: Path, tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    """The first 4 to 192 tokens of documents; of a chat, at least up to the start of the response."""
    text, rng = corpus.load(folder), random.Random(seed)
    while True:
        for document in corpus.documents(text.stories, text.easy, rng):
            ids = [0, *tokenizer.encode(document[:3000]).ids]
            count = rng.choice((4, 8, 16, 32, 64, 128, 192))
            answer = ids.index(3) + 1 if 3 in ids else 0
            yield ids[: min(max(count, answer), LENGTH // 2)]


class Writer:
    """Generates a constant number of sequences; a new one replaces each that ends."""

    def __init__(self, prompts: Iterator[list[int]], temperatures: Sequence[float], seed: int) -> None:
        self.runner = BatchedLlama(Llama(EMBEDDED), 1 << 28)
        self.prompts, self.random = prompts, np.random.default_rng(seed)
        self.ids = [next(prompts) for _ in range(ROWS)]
        self.read = [0] * ROWS
        self.heat = [temperatures[row % len(temperatures)] for row in range(ROWS)]
        each = -(-LENGTH // BLOCK)
        self.blocks = [list(range(row * each, (row + 1) * each)) for row in range(ROWS)]

    def step(self) -> list[list[int]]:
        """Decode one token of every sequence. Returns those that have ended."""
        parts = [
            ModelInput(row, self.ids[row], self.read[row], len(self.ids[row]), self.blocks[row], 1)
            for row in range(ROWS)
        ]
        done = []
        for row, token in enumerate(self._draw(self.runner.forward(parts))):
            self.read[row] = len(self.ids[row])
            self.ids[row].append(token)
            if token in ENDS or len(self.ids[row]) >= LENGTH:
                done.append(self.ids[row])
                self.ids[row], self.read[row] = next(self.prompts), 0
        return done

    def _draw(self, logits_RV: Floats) -> list[int]:
        noise_RV = self.random.gumbel(size=logits_RV.shape).astype(np.float32)
        heat_R = np.array(self.heat, np.float32)[:, None]
        return [int(token) for token in (logits_RV + heat_R * noise_RV).argmax(axis=1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    writer = Writer(beginnings(options.corpus, tokenizer, options.seed), options.temperatures, options.seed)
    done: list[list[int]] = []
    start = time.monotonic()
    while time.monotonic() - start < 60 * options.minutes:
        done += writer.step()
    np.savez(options.out, ids=np.concatenate(done).astype(np.uint16), lengths=np.array([len(ids) for ids in done]))
    print(f"{len(done)} samples, {sum(map(len, done))} tokens: {options.out}")


if __name__ == "__main__":
    main()
