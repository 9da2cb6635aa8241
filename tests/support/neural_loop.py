"""A minimal speculative decoding loop for the embedded model: one forward pass of all sequences per step, no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nucleate.models.batched_llama import BatchedLlama
from nucleate.models.numpy_llama import Llama
from nucleate.models.runner import ModelInput
from nucleate.sampling.functional import sample
from nucleate.sampling_params import SamplingParams
from nucleate.speculative.acceptance import coupled
from nucleate.speculative.draft import Draft, DraftContext, Proposer, TargetOutput


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
