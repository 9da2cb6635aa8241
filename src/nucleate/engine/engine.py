"""Engine: continuous batching of many requests over one model, one step at a time.

``add`` admits a request; its sequence waits in the scheduler; steps compute its prompt; after the last prompt token,
each step samples a token, until a stop criterion matches. ``step`` is the schedule of one token. What only some
requests need joins it at one place each: drafts at the beginning and instead of sampling, companions in ``_forward``,
prompt logprobs and beams in ``_sample``, grammars, limits of reasoning and recorders in ``TokenSampler.sample``. Text
is made after sampling; on a model that runs asynchronously (a GPU), during the next forward pass, whose results for
finished sequences are dropped. The engine has no threads and does no I/O: callers of ``step`` do.
``generation/loop.py`` is the reference: it gives the same tokens for the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple, get_args, overload

import numpy as np

from nucleate.engine.beam_params import BeamRequest
from nucleate.engine.beam_scheduler import AnyRequest, BeamScheduler, RunningBeam, ValidatedBeamRequest
from nucleate.engine.companions import Companions
from nucleate.engine.kv_cache import KVCacheManager
from nucleate.engine.request import PipelineCache, Request, ValidatedRequest, admit, check_output_ids
from nucleate.engine.running_request import RunningRequest, RunningSequence
from nucleate.engine.scheduler import NO_ROW, ScheduledSequence, Scheduler
from nucleate.engine.speculator import Speculator
from nucleate.engine.state_cache import StateCache
from nucleate.engine.token_sampler import TokenSampler
from nucleate.models.protocol import RunnerLostError
from nucleate.models.runner import ModelInput, Runner
from nucleate.outputs import EngineOutput, EngineStats, Finish, SpeculativeStats
from nucleate.parameters.converters import one_line, shown
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.inputs import check_count
from nucleate.sampling.route import TENSOR_BACKENDS
from nucleate.sampling.sampler import Sampler
from nucleate.sampling.stage import Stage
from nucleate.speculative.config import Speculation
from nucleate.speculative.draft import NO_DRAFT
from nucleate.structured_output import GrammarLimits
from nucleate.structured_output.compiler import GrammarManager
from nucleate.structured_output.spec import Whitespace
from nucleate.tokenization.tokenizer import Tokenizer

MAX_NUM_SEQS = 64
"""Default."""

BATCHED_TOKENS, BATCHED_TOKENS_ON_GPU = 96, 1024
"""The default of ``max_num_batched_tokens`` is so many for prompts or drafts, and one for each sequence.

All sequences wait for a step: on a CPU, more tokens take longer. With fewer for prompts, new requests wait longer where
many sequences generate.
"""

MAX_PROMPT_LOGITS, MIN_PROMPT_CHUNK = 1 << 19, 64
"""If prompt logprobs are requested: logits that a chunk computes at most, as rows times vocabulary; tokens at least."""


@with_suggestions
class Engine:
    """Requests are added with ``add`` and cancelled with ``abort``; ``step`` advances all of them.

    runner: the model. max_num_seqs: sequences that run at a time. max_num_batched_tokens: tokens per forward pass, at
    least max_num_seqs; None: max_num_seqs + 96 on a CPU, + 1024 on a GPU, or more if all drafts take more.
    max_model_len: tokens of a prompt with its output; None (and the most): what the model's context and the KV cache
    hold. enable_prefix_caching: reuse the KV cache of common prompt prefixes. regex_seconds: time budget of the stop
    regexes of a sequence, see ``stop_matcher``. structured_limits: limits of structured output. json_whitespace: in
    JSON, for constraints that do not select it, "flexible" or "none". companion_runner: the companion model of
    contrastive decoding. speculative_config: a method, a ``Speculation``, or a mapping of its fields; off by default.
    watermark: a stage of ``nucleate.watermark`` for every request except beam search. backend:
    as in ``Sampler``; with "triton" or "torch", sampling runs on the model's device. Raises ParameterError.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        max_num_seqs: int = MAX_NUM_SEQS,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        regex_seconds: float = 0.5,
        structured_limits: GrammarLimits | None = None,
        json_whitespace: Whitespace = "flexible",
        speculative_config: Speculation | str | None = None,
        watermark: Stage | None = None,
        companion_runner: Runner | None = None,
        backend: str = "auto",
    ) -> None:
        check_count(max_num_seqs, "max_num_seqs")
        most = getattr(runner, "max_sequences", max_num_seqs)
        if max_num_seqs > most:
            raise ParameterError("max_num_seqs", f"max_num_seqs is at most {most} for this model, got {max_num_seqs}")
        if json_whitespace not in get_args(Whitespace):
            allowed = ", ".join(get_args(Whitespace))
            why = f"json_whitespace must be one of {allowed}, got {shown(json_whitespace)}"
            raise ParameterError("json_whitespace", why)
        speculation = Speculation.of(speculative_config)
        if max_num_batched_tokens is None:
            drafts = max_num_seqs * speculation.num_speculative_tokens if speculation else 0
            default = BATCHED_TOKENS_ON_GPU if runner.asynchronous else BATCHED_TOKENS
            max_num_batched_tokens = max_num_seqs + max(default, drafts)
        check_count(max_num_batched_tokens, "max_num_batched_tokens", max_num_seqs, "max_num_seqs")
        self._companions = Companions(runner, companion_runner, max_num_seqs)
        blocks = self._companions.num_blocks
        self.context_length = min(runner.context_length, blocks * runner.block_size)
        if max_model_len is not None:
            check_count(max_model_len, "max_model_len", 2)
            if max_model_len > (most := runner.context_length):
                why = f"max_model_len is at most {most}, the context length of this model, got {max_model_len}"
                raise ParameterError("max_model_len", why)
            self.context_length = min(self.context_length, max_model_len)
        self.runner, self.tokenizer, self.vocab_size = runner, tokenizer, runner.vocab_size
        self.max_num_seqs, self._regex_seconds = max_num_seqs, regex_seconds
        saves = not runner.paged and self._companions.chunks_prompts
        self._kv_cache = (
            StateCache(blocks, runner.block_size, runner, prefix_caching=enable_prefix_caching)
            if saves
            else KVCacheManager(
                blocks,
                runner.block_size,
                prefix_caching=enable_prefix_caching and runner.paged,
                copies=self._companions.copies_blocks,
            )
        )
        limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        self._scheduler = Scheduler(self._kv_cache, **limits, whole_prompts=not (runner.paged or saves))
        self._sampler = _sampler_of(runner, backend)
        self._grammars = GrammarManager(tokenizer, runner.vocab_size, structured_limits, json_whitespace)
        self._requests: dict[str, RunningRequest] = {}
        self._token_sampler = TokenSampler(self._sampler, self._grammars, self._release, deferred=runner.asynchronous)
        self.num_steps = self._computed_tokens = self._num_arrivals = 0
        self._prefix_cache_queries = self._prefix_cache_hits = 0
        self._forward_seconds = 0.0
        self._beams = BeamScheduler(self._scheduler, runner, self._grammars, tokenizer)
        self._pipelines = PipelineCache(self.vocab_size, tokenizer, watermark)
        self._speculator: Speculator | None = None
        if speculation is not None:
            parts = self._companions, self._scheduler, self._sampler, self._token_sampler
            self._speculator = Speculator(speculation, runner, *parts)

    def __len__(self) -> int:
        """The number of unfinished requests."""
        return len(self._requests) + len(self._beams.searches)

    @property
    def batch_invariant(self) -> bool:
        """Whether the logits of a sequence never depend on the others, so that its seed gives the same text."""
        return all(getattr(one, "batch_invariant", False) for one in self._companions.runners)

    @property
    def stats(self) -> EngineStats:
        """State and counters, see ``EngineStats``."""
        scheduler, cache, beams, sampler = self._scheduler, self._kv_cache, self._beams, self._token_sampler
        return EngineStats(
            len(scheduler.running),
            len(scheduler.waiting),
            cache.num_blocks,
            cache.num_used_blocks,
            self.num_steps,
            self._computed_tokens,
            self._prefix_cache_queries + beams.prefix_cache_queries,
            self._prefix_cache_hits + beams.prefix_cache_hits,
            sampler.sampled_tokens + beams.sampled_tokens,
            scheduler.num_preemptions,
            self._forward_seconds,
            sampler.seconds + beams.seconds,
            self._grammars.seconds,
            sampler.jump_forward_tokens,
            SpeculativeStats() if self._speculator is None else self._speculator.stats,
            self.batch_invariant,
        )

    @overload
    def prepare(self, request: Request) -> ValidatedRequest: ...

    @overload
    def prepare(self, request: AnyRequest) -> ValidatedRequest | ValidatedBeamRequest: ...

    def prepare(self, request: AnyRequest) -> ValidatedRequest | ValidatedBeamRequest:
        """Validate a request. Raises ParameterError, as ``add`` would.

        This is most of the work of ``add``, and may run on any thread, also during a step.
        """
        if isinstance(request, ValidatedRequest | ValidatedBeamRequest):
            return request
        if isinstance(request, BeamRequest):
            return self._beams.prepare(self, request)
        params = request.params
        rules = admit(
            self,
            self.tokenizer,
            request.prompt_ids,
            params,
            self._regex_seconds,
            prompt_only=request.prompt_only,
            turn_ends=request.turn_ends,
        )
        spec = params.structured_outputs
        grammar = None if spec is None else self._grammars.compile(spec)
        pipeline = self._pipelines.get(params)
        if hasattr(self._sampler, "check_pipeline"):
            self._sampler.check_pipeline(pipeline)
        companion = None
        if pipeline.combine is not None:
            companion, rules = self._companions.admit(pipeline.combine, request.prompt_ids, rules, self)
        check_output_ids(request, rules, self.vocab_size, grammar)
        return ValidatedRequest(request, pipeline, rules, grammar, companion)

    def add(self, request: AnyRequest) -> str:
        """Admit a request and return its id. Raises ParameterError, without any effect."""
        validated = self.prepare(request)
        request_id = self._new_id(validated.request.id)
        if isinstance(validated, ValidatedBeamRequest):
            self._beams.start(validated, request_id, self._num_arrivals)
        else:
            running = self._requests[request_id] = RunningRequest(validated, request_id, self._num_arrivals)
            self._start_sequence(running)
        self._num_arrivals += 1
        return request_id

    def abort(self, request_id: str) -> list[EngineOutput]:
        """Cancel a request: the last output of each unfinished sequence, with finish_reason "abort".

        Nothing happens if the request has finished.
        """
        if request_id in self._beams.searches:
            return self._beams.end(self._beams.searches[request_id], Finish("abort"))
        if request_id not in self._requests:
            return []
        running = self._requests[request_id]
        self._start_siblings(running)
        return [self._token_sampler.end(sequence, Finish("abort")) for sequence in [*running.sequences.values()]]

    def pause(self, request_id: str, *, paused: bool = True) -> None:
        """Stop scheduling a request for now (back-pressure): it is the first to be preempted.

        request_id: as ``add`` returns it; nothing happens if the request has finished. paused: False resumes it.
        """
        running = self._requests.get(request_id) or self._beams.searches.get(request_id)
        if running is not None:
            running.pause(paused=paused)

    def step(self) -> list[EngineOutput]:
        """Run one forward pass and sample.

        Returns the outputs of all requests that advanced; [] if there is no work.
        """
        begin, sampler, speculator = perf_counter(), self._token_sampler, self._speculator
        scheduled = self._scheduler.schedule()
        if not scheduled:
            sampler.flush()
            return sampler.take_outputs()
        scheduled.sort(key=_sampler_row)  # new sequences, which have no row yet, come last
        if speculator is not None and not speculator.begin_step(scheduled):
            speculator = None
        if speculator is None or speculator.coupled:  # the other acceptance rules need masks along the draft
            sampler.prefetch_masks(scheduled)
        results = self._run(scheduled, speculator)
        sampler.flush()  # the text of the step before, where the model still computes this one
        for result in results:
            self._sample(result, speculator)
        if speculator is not None:
            speculator.end_step(scheduled, perf_counter() - begin)
        return sampler.take_outputs()

    def _run(self, scheduled: list[ScheduledSequence], speculator: Speculator | None) -> list[ForwardOutput]:
        """Run one forward pass. If it fails, each sequence is retried alone, so that only faulty ones end."""
        self.num_steps += 1
        begin = perf_counter()
        self._companions.prepare(*self._scheduler.take_changes())
        try:
            results = [self._forward(scheduled, speculator)]
        except RunnerLostError:
            raise
        except Exception as error:  # noqa: BLE001  # a model may raise anything
            results = self._forward_alone(scheduled, speculator, error)
        self._forward_seconds += perf_counter() - begin
        for result in results:
            self._scheduler.mark_computed(result.scheduled)
        return results

    def _forward(self, scheduled: list[ScheduledSequence], speculator: Speculator | None) -> ForwardOutput:
        failures: Sequence[tuple[RunningSequence, str]] = ()
        if self._scheduler.num_companions:
            logits_LV, failures = self._companions.forward(scheduled, self._compute)
        else:
            logits_LV = self._compute(self.runner, scheduled)
        states_TF = None if speculator is None else speculator.end_forward(scheduled)
        for sequence, message in failures:
            self._fail(sequence, message)
        return ForwardOutput(scheduled, logits_LV, states_TF)

    def _compute(self, runner: Runner, scheduled: list[ScheduledSequence]) -> Any:
        """The logits of one model, in which each sequence gets its row."""
        inputs = [model_input(one) for one in scheduled]
        logits_LV = runner.forward(inputs)
        row, computed = -1, 0
        for one, (_, _, start, stop, _, num_logits, _) in zip(scheduled, inputs, strict=True):
            row, computed = row + num_logits, computed + stop - start
            one.logits_row = row if one.draft is NO_DRAFT else row - len(one.draft)
        self._computed_tokens += computed
        return logits_LV

    def _forward_alone(
        self, scheduled: list[ScheduledSequence], speculator: Speculator | None, error: Exception
    ) -> list[ForwardOutput]:
        """After an error of the whole batch: each sequence alone, with its companion and without its draft."""
        results: list[ForwardOutput] = []
        retry = len(scheduled) > 1 or any(one.draft for one in scheduled)
        if speculator is not None:
            speculator.withdraw(scheduled)
        together = {one.companion.sequence for one in scheduled if one.companion is not None}
        for one in scheduled:
            if one.sequence.finished or one.sequence in together:  # another beam, or its companion, has failed
                continue
            try:
                if not retry:
                    raise error
                results.append(self._forward([*one.group], speculator).copy())
            except Exception as own:  # noqa: BLE001  # a model may raise anything; the request gets the message
                self._fail(one.sequence.owner or one.sequence, f"the model failed: {one_line(own)}")
        return results

    def _sample(self, result: ForwardOutput, speculator: Speculator | None) -> None:
        """Sample the next token of every sequence whose last token was computed."""
        ready: list[ScheduledSequence] = []
        for one in result.scheduled:
            sequence = one.sequence
            if sequence.finished:
                continue
            if sequence.all_logits:
                sequence.add_prompt_logprobs(one, result.logits)
            if one.last and sequence.owner is None:
                ready.append(one)
        if self._beams.searches:
            ready, outputs = self._beams.step(ready, result.logits)
            self._token_sampler.outputs += outputs
        for one in ready:
            if one.sequence.row == NO_ROW:
                self._token_sampler.start(one.sequence)
                self._start_siblings(one.sequence.running)
        if speculator is None:
            rows = [one.logits_row for one in ready]
            self._token_sampler.sample([one.sequence for one in ready], rows, result.logits)
        else:
            speculator.sample(ready, result.logits)
            speculator.observe(result.scheduled, result.hidden_states)

    def _start_sequence(self, running: RunningRequest) -> None:
        """Add the next sequence of a request to the scheduler."""
        max_chunk = max(MIN_PROMPT_CHUNK, MAX_PROMPT_LOGITS // self.vocab_size)
        self._scheduler.add(running.start_sequence(self.tokenizer, max_chunk))
        if self._speculator is not None:
            self._speculator.wake()

    def _start_siblings(self, running: RunningRequest) -> None:
        """The prompt was computed: start the other sequences of the request, which find it in the prefix cache."""
        while running.num_started < running.request.params.n:
            self._start_sequence(running)

    def _fail(self, sequence: RunningSequence | RunningBeam, message: str) -> None:
        """End a sequence, or the search of a beam, that cannot continue. message: the stop reason."""
        if isinstance(sequence, RunningBeam):
            self._token_sampler.outputs += self._beams.end(sequence.running, Finish("error", message))
        else:
            self._token_sampler.fail(sequence, message)

    def _release(self, sequence: RunningSequence) -> None:
        """Free everything that a finished sequence holds."""
        running, index = sequence.running, sequence.processor.index
        self._start_siblings(running)
        self._prefix_cache_queries += running.num_prompt_tokens
        self._prefix_cache_hits += sum([each.num_cached for each in sequence.group])
        self._scheduler.remove(sequence)
        self.runner.forget(sequence.key)
        if (companion := sequence.companion) is not None:
            self._companions.runner_of(companion).forget(companion.key)
        if self._speculator is not None:
            self._speculator.forget(sequence)
        if sequence.row != NO_ROW:
            self._sampler.remove(sequence.row)
        if index == 0:
            running.cached_tokens = sequence.num_cached
        del running.sequences[index]
        if not running.sequences:
            del self._requests[running.id]

    def _new_id(self, chosen: str | None) -> str:
        taken = self._requests.keys() | self._beams.searches.keys()
        while chosen is None and f"request-{self._num_arrivals}" in taken:  # a caller chose that id
            self._num_arrivals += 1
        request_id = f"request-{self._num_arrivals}" if chosen is None else chosen
        if request_id in taken:
            raise ParameterError("id", f"there is a request {request_id!r:.80} already")
        return request_id


class ForwardOutput(NamedTuple):
    """The result of a forward pass. Each sequence has its ``logits_row``."""

    scheduled: list[ScheduledSequence]
    logits: Any  #: [L, V], combined with those of companions
    hidden_states: Any  #: of all computed tokens, if a proposer reads them

    def copy(self) -> ForwardOutput:
        """The result with arrays of its own: the next forward pass may overwrite those of the runner."""
        arrays = [one.copy() if isinstance(one, np.ndarray) else one for one in (self.logits, self.hidden_states)]
        return ForwardOutput(self.scheduled, *arrays)


def model_input(one: ScheduledSequence) -> ModelInput:
    """The input of the model for the scheduled tokens of a sequence, with their draft."""
    sequence, draft, stop = one.sequence, one.draft, one.stop
    if draft is NO_DRAFT:
        num_logits = stop - one.start if sequence.all_logits else int(one.last)
    else:
        stop, num_logits = stop + len(draft), 1 + len(draft)
    ids, blocks = sequence.token_ids, sequence.block_ids
    return _model_input((sequence.key, ids, one.start, stop, blocks, num_logits, draft.parents))


_model_input = partial(tuple.__new__, ModelInput)
"""Takes half the time of ``ModelInput(...)``."""


def _sampler_of(runner: Runner, backend: str) -> Sampler:
    """The sampler for the logits of a runner: its own (``new_sampler``) where its logits are sharded."""
    if hasattr(runner, "new_sampler"):
        return runner.new_sampler(backend)  # type: ignore[no-any-return]
    on_device = backend in TENSOR_BACKENDS and runner.asynchronous  # opt-in: not yet validated on a GPU
    return Sampler(runner.vocab_size, backend, str(getattr(runner, "device", "cpu")) if on_device else "cpu")


_sampler_row = attrgetter("sequence.row")
