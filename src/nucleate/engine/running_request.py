"""The state of a request while it runs: its sequences, with their tokens, and what turns tokens into output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from nucleate.engine.request import MAX_N, Request
from nucleate.engine.scheduler import ScheduledSequence, SchedulerEntry
from nucleate.models.runner import ModelInput
from nucleate.outputs import CompletionChunk, EngineOutput, Finish, PromptLogprobs, StepLogprobs, Usage
from nucleate.sampling.inputs import LogitsInput
from nucleate.sampling.pipeline import PreparedPipeline
from nucleate.sampling.token_logprobs import logprobs
from nucleate.sampling_params import SamplingParams
from nucleate.speculative.draft import NO_DRAFT, DraftContext
from nucleate.stopping.stop_matcher import StopMatcher, StopRules
from nucleate.structured_output import CompiledGrammar, Guide
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer import Tokenizer

NO_ROW = 1 << 62
"""The sampler row of a sequence that has none yet. It sorts after all others."""


class OutputProcessor:
    """The output of one sequence."""

    def __init__(
        self,
        index: int,
        seed: int,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        rules: StopRules,
        guide: Guide | None = None,
    ) -> None:
        self.index, self.seed, self.guide = index, seed, guide
        self.prompt_logprobs: PromptLogprobs | None = None  #: to be sent with the next chunk
        self._matcher = StopMatcher(rules)
        ends = rules.stop_token_ids if rules.ignore_eos else rules.stop_token_ids | rules.eos_token_ids
        self._hidden = frozenset() if rules.include_stop_str_in_output else ends  # these show no text where they stop
        self._new_detokenizer = partial(Detokenizer, tokenizer, prompt_ids, params.skip_special_tokens)
        self._detokenizer: Detokenizer | None = None  # created with the first token: it decodes the prompt

    def push(self, token: int, logprobs: StepLogprobs | None, *, complete: bool = False) -> CompletionChunk:
        """Process one token and its logprobs, if they were requested. complete: the grammar allows no further token."""
        matcher, detokenizer = self._matcher, self._detokenizer
        if detokenizer is None:
            detokenizer = self._detokenizer = self._new_detokenizer()
        hidden = token in self._hidden and matcher.is_stop_token(token)
        texts = matcher.push(token, "" if hidden else "".join(detokenizer.push(token)))
        if complete:
            matcher.complete()
        if matcher.finish is not None:
            texts = (*texts, *matcher.close("".join(detokenizer.close())))
        return self._chunk("".join(texts), (token,), matcher.finish, None if logprobs is None else (logprobs,))

    def end(self, finish: Finish) -> CompletionChunk:
        """End the output without a token (abort, error). Text that was held back is included."""
        tail = "".join(self._detokenizer.close()) if self._detokenizer is not None else ""
        return self._chunk("".join(self._matcher.close(tail)), (), finish, None)

    def _chunk(
        self, text: str, tokens: tuple[int, ...], finish: Finish | None, logprobs: tuple[StepLogprobs, ...] | None
    ) -> CompletionChunk:
        reason, detail = finish or (None, None)
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        validation = None if self.guide is None else self.guide.add_text(text, finish)
        return CompletionChunk(
            text, tokens, self.index, self.seed, reason, detail, logprobs, prompt_logprobs, validation
        )


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
