"""Drives a Runner without an engine.

``Driver`` decodes greedily, with chunked prefill, shared prefixes and preemption. ``Loop`` is a minimal
speculative decoding loop for the embedded model: one forward pass of all sequences per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nucleate.models.batched_llama import BatchedLlama
from nucleate.models.numpy_llama import Llama
from nucleate.models.runner import ModelInput, Runner
from nucleate.sampling.functional import sample
from nucleate.sampling_params import SamplingParams
from nucleate.speculative.acceptance import coupled
from nucleate.speculative.draft import Draft, DraftContext, Proposer, TargetOutput


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


@dataclass
class TextState:
    """A sequence. ``drafts``: all drafts so far."""

    key: int
    ids: list[int]
    prompt: int
    blocks: list[int]
    params: SamplingParams
    read: int = 0
    drafts: list[Draft] = field(default_factory=list)

    @property
    def state(self) -> DraftContext:
        return DraftContext(self.key, self.ids, self.prompt, self.params.seed or 0, self.params.temperature)


class Loop:
    """Decodes with a model and, optionally, a proposer."""

    def __init__(self, model: Llama, proposer: Proposer | None = None, tokens: int = 4) -> None:
        self.runner, self.proposer, self.tokens = BatchedLlama(model, 64 << 20), proposer, tokens
        self.runner.capture_hidden_states(proposer.layers if proposer is not None else ())
        self.texts: list[TextState] = []

    def add(self, ids: Sequence[int], **params: float) -> TextState:
        key, each = len(self.texts), 20
        made = TextState(key, [*ids], len(ids), [*range(key * each, key * each + each)], SamplingParams(**params))
        self.texts.append(made)
        return made

    def run(self, outputs: int) -> None:
        while going := [text for text in self.texts if len(text.ids) < text.prompt + outputs]:
            drafts = [Draft()] * len(going)
            if self.proposer is not None:
                drafts = self.proposer.propose([text.state for text in going], [self.tokens] * len(going))
            self.step(going, drafts)

    def step(self, texts: list[TextState], drafts: list[Draft]) -> None:
        parts = [
            ModelInput(
                text.key, [*text.ids, *draft.tokens], text.read, len(text.ids) + len(draft), text.blocks, 1 + len(draft)
            )
            for text, draft in zip(texts, drafts, strict=True)
        ]
        logits_LV = self.runner.forward(parts)
        firsts = np.cumsum([0, *(part.num_logits for part in parts)])

        def sample_rows(sequences: list[int], nodes: list[int]) -> list[int]:
            rows = [int(firsts[sequence]) + node + 1 for sequence, node in zip(sequences, nodes, strict=True)]
            steps = [texts[at].state.position + node + 1 for at, node in zip(sequences, nodes, strict=True)]
            params = [texts[sequence].params for sequence in sequences]
            return sample(logits_LV[rows], params, step=steps).tolist()

        readings, start = [], 0
        for text, draft, verdict, part in zip(texts, drafts, coupled(drafts, sample_rows), parts, strict=True):
            new, before, text.read = verdict.tokens(draft), text.read, len(text.ids) + len(verdict.path)
            text.ids = [*text.ids, *new]
            text.drafts.append(draft)
            hidden_states_TF = self.runner.hidden_states[start : start + text.read - before]
            readings.append(TargetOutput(text.key, before, text.ids[before : text.read], hidden_states_TF))
            start += part.stop - part.start
        if self.proposer is not None and self.proposer.layers:
            self.proposer.observe(readings)

    @property
    def mean_acceptance_length(self) -> float:
        """Output tokens per forward pass after the prefill."""
        forwards = sum(len(text.drafts) - 1 for text in self.texts)
        return sum(len(text.ids) - text.prompt - 1 for text in self.texts) / forwards
