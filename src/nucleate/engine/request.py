"""What an engine is asked for, and what it keeps of it until all answers have ended. Knows no scheduler."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from nucleate.engine.output_processor import OutputProcessor
from nucleate.engine.scheduler import ScheduledChunk, SchedulerEntry
from nucleate.models.runner import ModelInput
from nucleate.outputs import CompletionChunk, EngineOutput, StepLogprobs, Usage
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.backends.token_logprobs import logprobs
from nucleate.sampling.inputs import LogitsInput
from nucleate.sampling.stage import Pipeline
from nucleate.sampling_params import SamplingParams
from nucleate.speculative.draft import Draft, DraftContext
from nucleate.stopping.stop_matcher import StopRules
from nucleate.structured_output import CompiledGrammar, Guide
from nucleate.tokenization.tokenizer import Tokenizer

NONE = Draft()

MOST_ANSWERS = 128
"""Of a request: the most that n may be."""


@dataclass(frozen=True)
class Request:
    """A prompt and what is to be made of it. prompt_ids: token ids, at least one. priority: lower is sooner.

    id: any text that no other running request has; without one, the engine gives it a number.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    id: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.prompt_ids, str | bytes):
            raise ParameterError("prompt", f"prompt_ids are token ids, not text, got {self.prompt_ids!r:.60}")
        try:
            if any(isinstance(token, bool) for token in self.prompt_ids):
                raise TypeError
            ids = tuple(map(operator.index, self.prompt_ids))
        except TypeError:
            raise ParameterError("prompt", f"prompt_ids must be token ids, got {self.prompt_ids!r:.60}") from None
        object.__setattr__(self, "prompt_ids", ids)
        if not isinstance(self.params, SamplingParams):
            raise ParameterError("params", f"params must be a SamplingParams, got {self.params!r:.60}")
        if self.id is not None and not isinstance(self.id, str):
            raise ParameterError("id", f"id must be a string or None, got {self.id!r:.60}")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise ParameterError("priority", f"priority must be an integer, got {self.priority!r:.60}")


class ValidatedRequest(NamedTuple):
    """A request that an engine has found to be as it must be, and what it means."""

    request: Request
    stages: Pipeline
    rules: StopRules
    form: CompiledGrammar | None


@dataclass(eq=False, slots=True)
class RunningRequest:
    """A request that was admitted. Its first answer reads the prompt; the others begin after that."""

    request: Request
    id: str
    seed: int
    stages: Pipeline
    rules: StopRules
    form: CompiledGrammar | None
    limit: int  #: tokens of the prompt and the longest answer
    arrival: int
    skips: bool = False  #: whether tokens that must follow need not be drawn
    paused: bool = False
    branches: dict[int, RunningSequence] = field(default_factory=dict)  #: the answers at work, by index
    begun: int = 0  #: answers
    ended: int = 0
    completion_tokens: int = 0

    def event(self, piece: CompletionChunk) -> EngineOutput:
        """The event of a piece. The last of the last answer has the usage."""
        self.completion_tokens += len(piece.token_ids)
        if piece.finish_reason is None:
            return EngineOutput(self.id, piece)
        self.ended += 1
        if self.ended < self.request.params.n:
            return EngineOutput(self.id, piece)
        return EngineOutput(self.id, piece, Usage(len(self.request.prompt_ids), self.completion_tokens))

    def branch(self, tokenizer: Tokenizer, most: int) -> RunningSequence:
        """The next answer. most: tokens of a prompt that are read at a time if its logprobs are asked for."""
        index, ids, params = self.begun, self.request.prompt_ids, self.request.params
        self.begun += 1
        told: list[StepLogprobs | None] | None = [None] if index == 0 and params.prompt_logprobs is not None else None
        job = SchedulerEntry((self.request.priority, self.arrival, index), ids, self.limit, paused=self.paused)
        if told is not None:
            job.shares, job.most = False, most
        guide = None if self.form is None else Guide(self.form, ignore_eos=params.ignore_eos)
        answer = OutputProcessor(index, (self.seed + index) % 2**64, tokenizer, ids, params, self.rules, guide)
        branch = self.branches[index] = RunningSequence(self, answer, job, told)
        return branch

    def pause(self, *, paused: bool) -> None:
        """See ``Engine.pause``."""
        self.paused = paused
        for branch in self.branches.values():
            branch.job.paused = paused


@dataclass(eq=False, slots=True)
class RunningSequence:
    """One answer of a request at work: its text, its place in the schedule, its row in the sampler."""

    live: RunningRequest
    answer: OutputProcessor
    job: SchedulerEntry
    told: list[StepLogprobs | None] | None  #: the logprobs of the prompt so far, if they are to be made
    row: int = -1  #: from the first token on
    state: DraftContext | None = None  #: for who drafts, see there
    over: bool = False  #: nothing can follow what was drawn, as far as its form goes

    @property
    def key(self) -> int:
        """A number that no other answer ever has."""
        return self.live.arrival * MOST_ANSWERS + self.answer.index

    def reading(self, chunk: ScheduledChunk) -> ScheduledSequence:
        """What the model is to read."""
        job, start, stop = chunk
        last = chunk.last
        wanted = int(last) if self.told is None else stop - start
        return ScheduledSequence(
            self, chunk, ModelInput(self.key, job.token_ids, start, stop, job.blocks, wanted), last
        )

    def tell_prompt(self, part: ModelInput, logits_TV: Any) -> None:
        """Logprobs of the tokens that follow those of a part of the prompt; the answer tells them when all are there.

        A prompt that is read again, because its answer was preempted, goes on where it was.
        """
        if self.told is None:
            return
        prompt_ids, params, rows = self.live.request.prompt_ids, self.live.request.params, LogitsInput(logits_TV)
        ids_V = np.arange(rows.shape[1])
        top, asked = params.prompt_logprobs or 0, params.logprob_token_ids
        for place in range(max(part.start + 1, len(self.told)), min(part.stop + 1, len(prompt_ids))):
            x_V = rows[place - part.start - 1]
            self.told.append(logprobs(ids_V, x_V, prompt_ids[place], top, asked) if np.isfinite(x_V.max()) else None)
        if len(self.told) == len(prompt_ids):
            self.answer.prompt_logprobs, self.told = tuple(self.told), None
            self.job.shares, self.job.most = True, self.live.limit


class ScheduledSequence(NamedTuple):
    """What an answer, or a beam of a search, reads in a step."""

    branch: Any  #: a Branch; of a search, a Beam
    chunk: ScheduledChunk
    part: ModelInput
    last: bool  #: it ends with the last token there is: the next one is drawn
    draft: Draft = NONE  #: what is read after that, to be verified; ``part`` has it, ``chunk`` does not
