"""Drives a Runner without an engine: greedy decoding, with chunked prefill, shared prefixes and preemption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nucleate.models.runner import ModelInput, Runner


@dataclass
class Text:
    """A sequence."""

    key: int
    ids: list[int]
    prompt: int  #: prompt length
    read: int = 0
    blocks: list[int] = field(default_factory=list)
    shared: int = 0  #: number of shared blocks
    logits: list[np.ndarray] = field(default_factory=list)  #: for each output token


class Driver:
    """A runner with its free blocks, in random order."""

    def __init__(self, runner: Runner, seed: int = 0) -> None:
        self.runner, self.random = runner, np.random.default_rng(seed)
        self.free = self.random.permutation(runner.blocks).tolist()
        self.sequences: list[Text] = []

    def add(self, ids: Sequence[int], sharing: Text | None = None) -> Text:
        """Add a sequence. sharing: a sequence whose computed prefix it shares."""
        made = Text(len(self.sequences), list(ids), len(ids))
        if sharing is not None:
            size = self.runner.block_size
            same = next((i for i, (a, b) in enumerate(zip(ids, sharing.ids, strict=False)) if a != b), len(ids))
            made.shared = min(same, len(ids) - 1, sharing.read) // size
            made.blocks, made.read = sharing.blocks[: made.shared], made.shared * size
        self.sequences.append(made)
        return made

    def step(self, tokens: dict[int, int]) -> None:
        """One forward pass. tokens: the maximum number of new tokens by key."""
        parts = []
        for key, count in tokens.items():
            one = self.sequences[key]
            stop = min(one.read + count, len(one.ids)) if self.runner.paged or one.read else len(one.ids)
            while len(one.blocks) * self.runner.block_size < stop:
                one.blocks.append(self.free.pop())
            parts.append(ModelInput(key, one.ids, one.read, stop, one.blocks, int(stop == len(one.ids))))
        logits_LV = np.asarray(self.runner.forward(parts))
        assert logits_LV.dtype == np.float32
        assert logits_LV.shape == (sum(part.num_logits for part in parts), self.runner.vocab_size)
        rows = iter(logits_LV)
        for part in parts:
            one = self.sequences[part.key]
            one.read = part.stop
            if part.num_logits:
                one.logits = [*one.logits[: len(one.ids) - one.prompt], next(rows)]
                one.ids.append(int(one.logits[-1].argmax()))

    def preempt(self, one: Text) -> None:
        """Free the blocks of a sequence; it will be recomputed."""
        self.runner.forget(one.key)
        self.free += one.blocks[one.shared :]
        self.random.shuffle(self.free)
        one.blocks, one.read, one.shared = [], 0, 0

    def run(self, outputs: int) -> None:
        """Run random subsets of the sequences until each has this number of output tokens."""
        while open_ := [one for one in self.sequences if len(one.ids) < one.prompt + outputs]:
            chosen = [one for one in open_ if self.random.random() < 0.8] or open_[:1]
            self.random.shuffle(chosen)
            if self.random.random() < 0.1:
                self.preempt(chosen[0])
            self.step({one.key: int(self.random.integers(1, 14)) for one in chosen})
