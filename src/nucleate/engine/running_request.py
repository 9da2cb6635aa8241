"""The state of a request while it runs: its sequences, with their tokens, and what turns tokens into output."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nucleate.chat.reasoning import ReasoningTracker
from nucleate.engine.companions import add_companion
from nucleate.engine.request import MAX_N, StepRecorder, ValidatedRequest
from nucleate.engine.scheduler import ScheduledSequence, SchedulerEntry
from nucleate.outputs import CompletionChunk, EngineOutput, Finish, PromptLogprobs, StepLogprobs, Usage
from nucleate.parameters.converters import one_line
from nucleate.sampling.inputs import LogitsInput
from nucleate.sampling.noise import fresh_seed
from nucleate.sampling.token_logprobs import row_logprobs
from nucleate.speculative.draft import DraftContext
from nucleate.stopping.stop_matcher import StopMatcher, StopRules
from nucleate.structured_output import Guide, can_jump_forward
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer import Tokenizer

_engine_output = partial(tuple.__new__, EngineOutput)
"""Takes half the time of ``EngineOutput(...)``."""


def text_error(error: Exception) -> Finish:
    """How an output ends whose tokens cannot be converted to text."""
    return Finish("error", f"the output cannot be converted to text: {one_line(error)}")


class OutputProcessor:
    """The output of one sequence."""

    def __init__(
        self,
        index: int,
        seed: int,
        new_detokenizer: Callable[[], Detokenizer],
        rules: StopRules,
        guide: Guide | None = None,
        reasoning: ReasoningTracker | None = None,
    ) -> None:
        self.index, self.seed, self.guide = index, seed, guide
        self.reasoning = reasoning  #: of an output whose reasoning section is limited
        self.constrained = guide is not None or reasoning is not None
        self.prompt_logprobs: PromptLogprobs | None = None  #: to be sent with the next chunk
        self._matcher = StopMatcher(rules)
        self._hidden: frozenset[int] = frozenset() if rules.include_stop_str_in_output else rules.end_ids
        self._new_detokenizer = new_detokenizer
        self._detokenizer: Detokenizer | None = None  # created with the first token: it decodes the prompt

    def push(self, token: int, logprobs: StepLogprobs | None, *, complete: bool = False) -> CompletionChunk:
        """Process one token and its logprobs, if they were requested. complete: the grammar allows no further token."""
        matcher, detokenizer = self._matcher, self._detokenizer
        collected = None if logprobs is None else (logprobs,)
        hidden = token in self._hidden and matcher.is_stop_token(token)
        text = ""
        try:
            if detokenizer is None:
                detokenizer = self._detokenizer = self._new_detokenizer()
            text = matcher.push(token, "" if hidden else detokenizer.push(token))
            if complete:
                matcher.complete()
            if matcher.finish is not None:
                text += matcher.close(detokenizer.close())
        except Exception as error:  # noqa: BLE001  # a tokenizer may raise anything; only this request fails
            return self._chunk(text, (token,), text_error(error), collected)
        return self._chunk(text, (token,), matcher.finish, collected)

    def end(self, finish: Finish) -> CompletionChunk:
        """End the output without a token (abort, error). Text that was held back is included."""
        tail = ""
        if self._detokenizer is not None:
            with suppress(Exception):  # a tokenizer may raise anything
                tail = self._detokenizer.close()
        return self._chunk(self._matcher.close(tail), (), finish, None)

    def _chunk(
        self, text: str, tokens: tuple[int, ...], finish: Finish | None, logprobs: tuple[StepLogprobs, ...] | None
    ) -> CompletionChunk:
        reason, detail = finish or (None, None)
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        validation = None if self.guide is None else self.guide.add_text(text, finish)
        return CompletionChunk(
            text, tokens, self.index, self.seed, reason, detail, logprobs, prompt_logprobs, validation
        )


class RunningRequest:
    """A request in the engine. Its first sequence computes the prompt; the others start after that.

    ``max_length``: tokens of the prompt and of the longest output. ``jump_forward``: whether tokens that the grammar
    forces need not be sampled. ``cached_tokens``: prompt tokens of the first sequence from the prefix cache, once it
    has finished.
    """

    def __init__(self, validated: ValidatedRequest, request_id: str, arrival: int) -> None:
        self.request, pipeline, self.rules, self.grammar, self.companion = validated
        self.id, self.arrival, self.paused = request_id, arrival, False
        seed = self.request.params.seed
        self.seed = fresh_seed() if seed is None else seed
        self.max_length = len(self.request.prompt_ids) + (self.rules.max_tokens or 0)  # admit sets max_tokens
        self.jump_forward = self.grammar is not None and can_jump_forward(pipeline.given)
        # the engine combines the logits with those of the companion, before it samples
        self.pipeline = pipeline if self.companion is None else pipeline._replace(combine=None)
        self.sequences: dict[int, RunningSequence] = {}  #: the unfinished ones, by index
        self.num_started = self.completion_tokens = self.cached_tokens = 0
        self._num_finished = 0
        self._prompt_detokenizer: Detokenizer | None = None  # after the prompt, from the first token on

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of the prompt, and of that of the companion."""
        return len(self.request.prompt_ids) + (0 if self.companion is None else len(self.companion.prompt_ids))

    def output(self, chunk: CompletionChunk) -> EngineOutput:
        """Wrap a chunk. The last chunk of the last sequence carries the usage."""
        self.completion_tokens += len(chunk.token_ids)
        if chunk.finish_reason is None:
            return _engine_output((self.id, chunk, None))
        self._num_finished += 1
        if self._num_finished < self.request.params.n:
            return EngineOutput(self.id, chunk)
        cached = self.sequences[0].num_cached if 0 in self.sequences else self.cached_tokens
        return EngineOutput(self.id, chunk, Usage(len(self.request.prompt_ids), self.completion_tokens, cached))

    def start_sequence(self, tokenizer: Tokenizer, max_chunk: int) -> RunningSequence:
        """Create the next sequence. max_chunk: prompt tokens per step, if the logprobs of the prompt were requested."""
        index, ids, params = self.num_started, self.request.prompt_ids, self.request.params
        self.num_started += 1
        given, section = self.request.output_ids, self.request.reasoning
        reasoning = None
        if section is not None and params.max_reasoning_tokens is not None:
            reasoning = ReasoningTracker(section, tokenizer, params.max_reasoning_tokens)
            for token in given:
                reasoning.push(token)
        guide = None if self.grammar is None else Guide(self.grammar, ignore_eos=params.ignore_eos)
        if guide is not None:
            for token in given:
                guide.accept_token(token)  # checked by check_output_ids
        seed = (self.seed + index) % 2**64
        key = self.arrival * MAX_N + index
        sequence = self.sequences[index] = RunningSequence(
            (self.request.priority, self.arrival, 2 * index),
            (*ids, *given) if given else ids,
            self.max_length,
            key=2 * key,
            paused=self.paused,
            running=self,
            processor=OutputProcessor(index, seed, partial(self._detokenizer, tokenizer), self.rules, guide, reasoning),
            recorder=self.request.recorder,
        )
        if index == 0 and params.prompt_logprobs is not None:
            sequence.all_logits, sequence.max_chunk = True, max_chunk
        if self.companion is not None:
            add_companion(sequence, self.companion, given, 2 * key + 1)
        return sequence

    def _detokenizer(self, tokenizer: Tokenizer) -> Detokenizer:
        """A detokenizer after the prompt, which is decoded once for all sequences."""
        if self._prompt_detokenizer is None:
            request = self.request
            self._prompt_detokenizer = Detokenizer(
                tokenizer, request.prompt_ids, request.params.skip_special_tokens, kept_ids=request.kept_token_ids
            )
        return self._prompt_detokenizer.fork()

    def pause(self, *, paused: bool) -> None:
        """See ``Engine.pause``."""
        self.paused = paused
        for sequence in self.sequences.values():
            for one in sequence.group:
                one.paused = paused


@dataclass(eq=False, slots=True, kw_only=True)
class RunningSequence(SchedulerEntry):
    """One sequence of a request in the engine: its tokens, blocks, output text and sampler row."""

    running: RunningRequest
    processor: OutputProcessor
    recorder: StepRecorder | None = None
    prompt_logprobs: list[StepLogprobs | None] = field(default_factory=lambda: [None])  #: while ``all_logits``
    draft_context: DraftContext | None = None
    grammar_complete: bool = False  #: whether the grammar allows no token after those that were sampled

    @property
    def num_output(self) -> int:
        """The number of output tokens so far."""
        return len(self.token_ids) - len(self.running.request.prompt_ids)

    @property
    def forced_token(self) -> int | None:
        """The next token, if it is part of the end marker of a reasoning section at its limit."""
        return None if self.processor.reasoning is None else self.processor.reasoning.forced_token

    @property
    def done(self) -> bool:
        """Whether it has finished, or will with the tokens that it has."""
        return self.grammar_complete or self.finished

    def add_prompt_logprobs(self, scheduled: ScheduledSequence, logits_LV: Any) -> None:
        """Compute the logprobs of the prompt tokens after those of a chunk; the processor gets them when complete.

        A prompt that is recomputed after a preemption continues where it was.
        """
        request, start, stop = self.running.request, scheduled.start, scheduled.stop
        params, prompt_ids = request.params, request.prompt_ids
        rows = LogitsInput(logits_LV[scheduled.logits_row + 1 - (stop - start) : scheduled.logits_row + 1])
        places = range(max(start + 1, len(self.prompt_logprobs)), min(stop + 1, len(prompt_ids)))
        logits = (rows[place - start - 1] for place in places)
        chosen = prompt_ids[places.start : places.stop]
        self.prompt_logprobs += row_logprobs(logits, chosen, params.prompt_logprobs or 0, params.logprob_token_ids)
        if len(self.prompt_logprobs) == len(prompt_ids):
            self.processor.prompt_logprobs = tuple(self.prompt_logprobs)
            self.all_logits, self.max_chunk = False, self.max_length
