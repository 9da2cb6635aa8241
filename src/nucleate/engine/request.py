"""Requests of an engine: what a caller passes in, its validation, and the state while its sequences run."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from nucleate.engine.output_processor import OutputProcessor
from nucleate.engine.scheduler import ScheduledSequence, SchedulerEntry
from nucleate.models.protocol import ModelLimits
from nucleate.models.runner import ModelInput
from nucleate.outputs import CompletionChunk, EngineOutput, StepLogprobs, Usage
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.inputs import LogitsInput, check_ids
from nucleate.sampling.pipeline import PreparedPipeline
from nucleate.sampling.stage import Pipeline
from nucleate.sampling.token_logprobs import logprobs
from nucleate.sampling_params import SamplingParams
from nucleate.speculative.draft import NO_DRAFT, DraftContext
from nucleate.stopping.stop_matcher import StopRules
from nucleate.structured_output import CompiledGrammar, Guide
from nucleate.tokenization.tokenizer import Tokenizer

MAX_N = 128
"""The highest value of ``n``."""

NO_ROW = 1 << 62
"""The sampler row of a sequence that has none yet. It sorts after all others."""


@dataclass(frozen=True)
class Request:
    """A prompt and its sampling parameters. prompt_ids: token ids, at least one. priority: lower runs first.

    id: a string that no other running request has; without one, the engine assigns it.
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


def stages_of(params: SamplingParams, vocab_size: int, tokenizer: Tokenizer) -> Pipeline:
    """The sampling pipeline of some parameters, for a model and its tokenizer."""
    ends = tuple(token for token in tokenizer.eos_token_ids if token < vocab_size)  # others cannot be sampled
    stages = params.pipeline(ends, tokenizer)
    check_ids(stages, vocab_size)
    return stages


def admit(
    model: ModelLimits,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    regex_seconds: float = 0.5,
) -> StopRules:
    """Validate a request against the model, and build its stop rules. Raises ParameterError."""
    size, room = model.vocab_size, model.context_length - len(prompt_ids)
    if not len(prompt_ids):
        raise ParameterError("prompt", "the prompt is empty; it must have at least one token")
    if not all(0 <= token < size for token in prompt_ids):
        raise ParameterError("prompt", f"the prompt holds token ids outside the vocabulary (0..{size - 1})")
    if room < 1:
        raise ParameterError(
            "prompt",
            f"the prompt has {len(prompt_ids)} tokens, but the context holds {model.context_length}, output included",
        )
    if params.min_tokens > room:
        message = f"min_tokens is {params.min_tokens}, but the context has room for {room} tokens after the prompt"
        raise ParameterError("min_tokens", message)
    for token in params.stop_token_ids:
        if token >= size:
            raise ParameterError(
                "stop_token_ids", f"stop_token_ids names token {token}, but the vocabulary ends at {size - 1}"
            )
    return StopRules(
        stop=params.stop,
        stop_token_ids=frozenset(params.stop_token_ids),
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        stop_regex=params.stop_regex,
        stop_json=params.stop_json,
        include_stop_str_in_output=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        min_tokens=params.min_tokens,
        regex_seconds=regex_seconds,
    )


class ValidatedRequest(NamedTuple):
    """A request that was checked against the model, with its pipeline, stop rules and grammar."""

    request: Request
    pipeline: PreparedPipeline
    rules: StopRules
    grammar: CompiledGrammar | None


@dataclass(eq=False, slots=True)
class RunningRequest:
    """A request in the engine. Its first sequence computes the prompt; the others start after that."""

    request: Request
    id: str
    seed: int
    pipeline: PreparedPipeline
    rules: StopRules
    grammar: CompiledGrammar | None
    max_length: int  #: tokens of the prompt and of the longest output
    arrival: int
    jump_forward: bool = False  #: whether tokens that the grammar forces need not be sampled
    paused: bool = False
    sequences: dict[int, RunningSequence] = field(default_factory=dict)  #: the unfinished ones, by index
    num_started: int = 0
    num_finished: int = 0
    completion_tokens: int = 0

    def output(self, chunk: CompletionChunk) -> EngineOutput:
        """Wrap a chunk. The last chunk of the last sequence carries the usage."""
        self.completion_tokens += len(chunk.token_ids)
        if chunk.finish_reason is None:
            return EngineOutput(self.id, chunk)
        self.num_finished += 1
        if self.num_finished < self.request.params.n:
            return EngineOutput(self.id, chunk)
        return EngineOutput(self.id, chunk, Usage(len(self.request.prompt_ids), self.completion_tokens))

    def start_sequence(self, tokenizer: Tokenizer, max_chunk: int) -> RunningSequence:
        """Create the next sequence. max_chunk: prompt tokens per step, if the logprobs of the prompt were requested."""
        index, ids, params = self.num_started, self.request.prompt_ids, self.request.params
        self.num_started += 1
        guide = None if self.grammar is None else Guide(self.grammar, ignore_eos=params.ignore_eos)
        seed = (self.seed + index) % 2**64
        sequence = self.sequences[index] = RunningSequence(
            (self.request.priority, self.arrival, index),
            ids,
            self.max_length,
            paused=self.paused,
            running=self,
            key=self.arrival * MAX_N + index,
            processor=OutputProcessor(index, seed, tokenizer, ids, params, self.rules, guide),
        )
        if index == 0 and params.prompt_logprobs is not None:
            sequence.prompt_logprobs, sequence.use_prefix_cache, sequence.max_chunk = [None], False, max_chunk
        return sequence

    def pause(self, *, paused: bool) -> None:
        """See ``Engine.pause``."""
        self.paused = paused
        for sequence in self.sequences.values():
            sequence.paused = paused


@dataclass(eq=False, slots=True, kw_only=True)
class RunningSequence(SchedulerEntry):
    """One sequence of a request in the engine: its tokens, blocks, output text and sampler row."""

    running: RunningRequest
    processor: OutputProcessor
    key: int  #: unique: no other sequence ever has it
    prompt_logprobs: list[StepLogprobs | None] | None = None  #: those computed so far, if they were requested
    row: int = NO_ROW  #: of the sampler, from the first token on
    draft_context: DraftContext | None = None
    grammar_complete: bool = False  #: whether the grammar allows no token after those that were sampled

    @property
    def done(self) -> bool:
        """Whether it has finished, or will with the tokens that it has."""
        return self.grammar_complete or self.finished

    def model_input(self, scheduled: ScheduledSequence) -> ModelInput:
        """The input of the model runner for a scheduled chunk with its draft."""
        start, stop, draft = scheduled.start, scheduled.stop, scheduled.draft
        if draft is NO_DRAFT:
            count = int(scheduled.last) if self.prompt_logprobs is None else stop - start
            return ModelInput(self.key, self.token_ids, start, stop, self.block_ids, count)
        parents, count = None if draft.is_chain else draft.parents, len(draft)
        return ModelInput(self.key, self.token_ids, start, stop + count, self.block_ids, 1 + count, parents)

    def add_prompt_logprobs(self, scheduled: ScheduledSequence, logits_TV: Any) -> None:
        """Compute the logprobs of the prompt tokens after those of a chunk; the processor gets them when complete.

        A prompt that is recomputed after a preemption continues where it was.
        """
        if self.prompt_logprobs is None:
            return
        request, rows = self.running.request, LogitsInput(logits_TV)
        params, prompt_ids = request.params, request.prompt_ids
        ids_V = np.arange(rows.shape[1])
        top, more = params.prompt_logprobs or 0, params.logprob_token_ids
        first, start, stop = len(self.prompt_logprobs), scheduled.start, scheduled.stop
        for place in range(max(start + 1, first), min(stop + 1, len(prompt_ids))):
            x_V = rows[place - start - 1]
            valid = np.isfinite(x_V.max())
            self.prompt_logprobs.append(logprobs(ids_V, x_V, prompt_ids[place], top, more) if valid else None)
        if len(self.prompt_logprobs) == len(prompt_ids):
            self.processor.prompt_logprobs, self.prompt_logprobs = tuple(self.prompt_logprobs), None
            self.use_prefix_cache, self.max_chunk = True, self.max_length


class SequenceLifecycle(Protocol):
    """What an engine does when sequences start, finish or fail."""

    def start_siblings(self, running: RunningRequest) -> None:
        """The prompt was computed: start the other sequences of the request, which find it in the prefix cache."""

    def finish(self, sequence: RunningSequence) -> None:
        """A sequence has finished: free everything that it holds."""

    def fail(self, sequence: Any, message: str) -> list[EngineOutput]:
        """A sequence, or the search of a beam, cannot continue: its last outputs."""
