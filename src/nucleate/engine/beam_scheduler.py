"""Runs beam searches inside the engine: every unfinished beam is a sequence of the scheduler.

A beam computes its new token, and is then paused until all beams of its search have their logits; paused sequences are
preempted first. Then the search takes a step. The first beam that continues another one reuses its sequence;
the others are forks, which share its full blocks and copy a partial last one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.engine.beam_params import BeamChunk, BeamRequest
from nucleate.engine.beam_search import BeamCandidate, BeamConstraint, BeamSearch, FinishedBeam, SearchError
from nucleate.engine.request import Request, ValidatedRequest, admit
from nucleate.engine.running_request import text_error
from nucleate.engine.scheduler import ScheduledSequence, Scheduler, SchedulerEntry
from nucleate.models.protocol import ModelLimits
from nucleate.models.runner import Fork, Runner
from nucleate.outputs import EngineOutput, Finish, StepLogprobs, Usage
from nucleate.parameters.converters import one_line
from nucleate.sampling.inputs import LogitsInput
from nucleate.sampling.token_logprobs import logprobs
from nucleate.sampling_params import SamplingParams
from nucleate.stopping.stop_matcher import StopRules
from nucleate.structured_output import CompiledGrammar, Guide, MatcherError, error_message
from nucleate.structured_output.compiler import GrammarManager
from nucleate.structured_output.guide import CONSTRAINT_FAILED
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer import Tokenizer


class ValidatedBeamRequest(NamedTuple):
    """A beam search request, validated for a model."""

    request: BeamRequest
    rules: StopRules
    grammar: CompiledGrammar | None


AnyRequest = Request | BeamRequest | ValidatedRequest | ValidatedBeamRequest
"""What ``Engine.add`` accepts."""


@dataclass(eq=False, slots=True, kw_only=True)
class RunningBeam(SchedulerEntry):
    """An unfinished beam, as a sequence of the scheduler. Its key is negative, unlike those of other sequences."""

    running: RunningBeamSearch
    reusable: bool = False
    logits_V: NDArray[np.float32] | None = None  #: of the next token, once they are computed


class RunningBeamSearch:
    """A beam search in the engine. ``cached_tokens``: prompt tokens from the prefix cache, of the beams that ended."""

    def __init__(self, validated: ValidatedBeamRequest, request_id: str, arrival: int) -> None:
        self.request, self.rules, self.grammar = validated
        params, rules = self.request.params, self.rules
        self.id, self.order, self.paused, self.cached_tokens = request_id, (self.request.priority, arrival), False, 0
        self.max_tokens = rules.max_tokens or 0  # admit sets it
        ends = rules.stop_token_ids | (frozenset() if params.ignore_eos else rules.eos_token_ids)
        first = None if self.grammar is None else BeamConstraint(self.grammar, params.ignore_eos)
        self.search = BeamSearch(params, ends, self.max_tokens, first)
        self.beams: list[RunningBeam] = []  #: in the order of ``search.open``

    def pause(self, *, paused: bool) -> None:
        """See ``Engine.pause``."""
        self.paused = paused
        for beam in self.beams:
            beam.paused = paused or beam.logits_V is not None


class BeamScheduler:
    """Runs the beam searches of an engine."""

    def __init__(self, scheduler: Scheduler, runner: Runner, grammars: GrammarManager, tokenizer: Tokenizer) -> None:
        self.searches: dict[str, RunningBeamSearch] = {}  #: those that run, by id of the request
        self.sampled_tokens = self.prefix_cache_queries = self.prefix_cache_hits = 0
        self.seconds = 0.0
        self._scheduler, self._runner, self._grammars, self._tokenizer = scheduler, runner, grammars, tokenizer
        self._keys = itertools.count(-1, -1)

    def prepare(self, limits: ModelLimits, request: BeamRequest) -> ValidatedBeamRequest:
        """See ``Engine.prepare``."""
        params = request.params
        same = SamplingParams(
            max_tokens=params.max_tokens, stop_token_ids=params.stop_token_ids, ignore_eos=params.ignore_eos
        )
        rules = admit(limits, self._tokenizer, request.prompt_ids, same)
        params.check(rules.max_tokens or 0)
        return ValidatedBeamRequest(request, rules, self._grammars.compile(params.structured_outputs))

    def start(self, validated: ValidatedBeamRequest, request_id: str, arrival: int) -> None:
        """Add a search to the scheduler."""
        running = RunningBeamSearch(validated, request_id, arrival)
        ids, key = validated.request.prompt_ids, next(self._keys)
        beam = RunningBeam((*running.order, 0), ids, len(ids) + running.max_tokens, running=running, key=key)
        running.beams = [beam]
        self.searches[request_id] = running
        self.prefix_cache_queries += len(ids)
        self._scheduler.add(beam)

    def step(
        self, ready: list[ScheduledSequence], logits_LV: Any
    ) -> tuple[list[ScheduledSequence], list[EngineOutput]]:
        """Store the logits (NumPy or torch) of beams, and advance the searches that have those of all their beams.

        Returns the sequences that are no beams, and the outputs of searches that have finished.
        """
        begin, outputs = perf_counter(), []
        beams = [one for one in ready if isinstance(one.sequence, RunningBeam)]
        own_BV = logits_LV[[one.logits_row for one in beams]]  # a copy: it is kept until the other beams have theirs
        for one, logits_V in zip(beams, LogitsInput(own_BV) if beams else (), strict=True):
            one.sequence.logits_V, one.sequence.paused = logits_V, True
        for running in {one.sequence.running.id: one.sequence.running for one in beams}.values():
            if all(beam.logits_V is not None for beam in running.beams):
                outputs += self._advance(running)
        self.seconds += perf_counter() - begin
        return [one for one in ready if not isinstance(one.sequence, RunningBeam)], outputs

    def end(self, running: RunningBeamSearch, finish: Finish) -> list[EngineOutput]:
        """End a search without result, unless it has ended."""
        if running.id not in self.searches:
            return []
        self._release(running.beams)
        del self.searches[running.id]
        usage = Usage(len(running.request.prompt_ids), 0, running.cached_tokens)
        return [EngineOutput(running.id, BeamChunk("", (), 0, 0, *finish), usage)]

    def _advance(self, running: RunningBeamSearch) -> list[EngineOutput]:
        rows = [beam.logits_V for beam in running.beams if beam.logits_V is not None]
        constraints = [beam.constraint for beam in running.search.open]
        guides = [None if one is None else one.guide for one in constraints]
        self.sampled_tokens += len(rows)
        top, ids_V = running.request.params.logprobs, np.arange(len(rows[0]))

        def raw_logprobs(row: int, token: int) -> StepLogprobs:
            return logprobs(ids_V, rows[row], token, top or 0)

        try:
            masks = self._grammars.mask(guides)
            children = running.search.step(np.stack(rows), masks, None if top is None else raw_logprobs)
            failure = self._continue(running, children)
        except SearchError as error:
            failure = error_message(error.reason, guides[error.beam])
        except MatcherError as error:
            failure = f"{CONSTRAINT_FAILED[0]}: {error}"
        if failure is not None:
            return self.end(running, Finish("error", failure))
        return [] if running.beams else self._finish(running)

    def _continue(self, running: RunningBeamSearch, children: Sequence[BeamCandidate]) -> str | None:
        """Replace the beams by their continuations. Returns why the search cannot continue."""
        before, parents = running.beams, {child.parent for child in children}
        self._release(beam for index, beam in enumerate(before) if index not in parents)
        used = {before[index].order[2] for index in parents}
        ranks = (rank for rank in itertools.count() if rank not in used)
        running.beams = []
        forks: list[Fork] = []
        for parent, _ in children:
            beam = before[parent]
            if parent in parents:
                parents.remove(parent)
            else:
                beam = self._fork(beam, next(ranks), forks)
            running.beams.append(beam)
        try:
            if forks:
                self._runner.fork(forks)
        except Exception as error:  # noqa: BLE001  # a model may raise anything
            return f"the model failed: {one_line(error)}"
        for beam, (_, token) in zip(running.beams, children, strict=True):
            beam.append(token)
            beam.logits_V, beam.paused = None, running.paused
        return None

    def _fork(self, parent: RunningBeam, rank: int, forks: list[Fork]) -> RunningBeam:
        running = parent.running
        child = RunningBeam((*running.order, rank), (), parent.max_length, running=running, key=next(self._keys))
        block = self._scheduler.fork(parent, child)
        if child.block_ids:
            forks.append(Fork(parent.key, child.key, block))
        child.num_cached = 0  # its prompt tokens are already counted
        return child

    def _release(self, beams: Iterable[RunningBeam]) -> None:
        for beam in beams:
            self.prefix_cache_hits += beam.num_cached
            beam.running.cached_tokens += beam.num_cached
            self._scheduler.remove(beam)
            self._runner.forget(beam.key)

    def _finish(self, running: RunningBeamSearch) -> list[EngineOutput]:
        """The outputs of a finished search."""
        best, prompt = running.search.best(), len(running.request.prompt_ids)
        usage = Usage(prompt, sum(one.length for one in best), running.cached_tokens)
        try:
            pieces = [self._piece(running, index, one) for index, one in enumerate(best)]
        except Exception as error:  # noqa: BLE001  # a tokenizer may raise anything; only this request fails
            return self.end(running, text_error(error))
        del self.searches[running.id]
        return [EngineOutput(running.id, piece, usage if piece is pieces[-1] else None) for piece in pieces]

    def _piece(self, running: RunningBeamSearch, index: int, beam: FinishedBeam) -> BeamChunk:
        params, rules, steps = running.request.params, running.rules, beam.steps
        tokens = tuple(step.token for step in steps)
        stopped = tokens[-1] in running.search.ends
        detokenizer = Detokenizer(self._tokenizer, running.request.prompt_ids, params.skip_special_tokens)
        text = "".join(map(detokenizer.push, tokens[: len(tokens) - stopped])) + detokenizer.close()
        eos = tokens[-1] in rules.eos_token_ids and not params.ignore_eos
        finish = Finish("stop", tokens[-1] if stopped and not eos else None) if beam.ended else Finish("length")
        collected = tuple(step.logprobs for step in steps if step.logprobs is not None)
        validation = None if running.grammar is None else Guide(running.grammar).add_text(text, finish)
        return BeamChunk(
            text,
            tokens,
            index,
            0,
            *finish,
            logprobs=collected or None,
            validation=validation,
            score=beam.score,
            logprob=beam.logprob,
        )
