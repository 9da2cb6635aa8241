"""The beam searches of an engine: each open beam is a job of its schedule. Knows no HTTP, and not how a search chooses.

A beam reads what is new of it, and waits until all beams of its search have their logits; meanwhile it is paused, so
that it is the first to make room for those that are still to be read. Then all go on at once. The first beam that
continues another one takes its place; the others share its full blocks, and get a copy of one that is not full.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.engine.admission import admit
from nucleate.engine.beam.params import BeamPiece, BeamRequest
from nucleate.engine.beam.search import BeamCandidate, BeamSearch, FinishedBeam, SearchError
from nucleate.engine.request import Request, RunningRequest, RunningSequence, ScheduledSequence, ValidatedRequest
from nucleate.engine.scheduler import ScheduledChunk, Scheduler, SchedulerEntry
from nucleate.models.protocol import ModelLimits
from nucleate.models.runner import Fork, ModelInput, Runner
from nucleate.outputs import CompletionChunk, EngineOutput, Finish, StepLogprobs, Usage
from nucleate.parameters.converters import one_line
from nucleate.sampling.backends.token_logprobs import logprobs
from nucleate.sampling.inputs import LogitsInput
from nucleate.sampling_params import SamplingParams
from nucleate.stopping.stop_matcher import StopRules
from nucleate.structured_output import CompiledGrammar, Guide, MatcherError, why
from nucleate.structured_output.grammar_manager import GrammarManager
from nucleate.structured_output.guide import CONSTRAINT_FAILED
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer import Tokenizer


class ValidatedBeamRequest(NamedTuple):
    """A search that an engine has found to be as it must be."""

    request: BeamRequest
    rules: StopRules
    form: CompiledGrammar | None


Asked = Request | BeamRequest | ValidatedRequest | ValidatedBeamRequest
"""What an engine takes."""


class Held:
    """A beam whose text has a form. See ``search.Form``."""

    def __init__(self, guide: Guide, *, ignore_eos: bool) -> None:
        self.guide, self._ignore_eos = guide, ignore_eos

    def after(self, token: int) -> tuple[Held, bool]:
        guide = Guide(self.guide.form, ignore_eos=self._ignore_eos)
        guide.matcher = self.guide.matcher.copy()
        return Held(guide, ignore_eos=self._ignore_eos), guide.push(token)


@dataclass(eq=False, slots=True)
class RunningBeam:
    """An open beam, as schedule and model see it."""

    live: RunningBeamSearch
    job: SchedulerEntry
    key: int  #: below 0, where no answer's is
    logits_V: NDArray[np.float32] | None = None  #: of the next token, once it has been read

    def reading(self, chunk: ScheduledChunk) -> ScheduledSequence:
        """What the model is to read."""
        job, start, stop = chunk
        part = ModelInput(self.key, job.token_ids, start, stop, job.blocks, int(chunk.last))
        return ScheduledSequence(self, chunk, part, chunk.last)


@dataclass(eq=False, slots=True)
class RunningBeamSearch:
    """A search that was admitted."""

    request: BeamRequest
    id: str
    rules: StopRules
    form: CompiledGrammar | None
    search: BeamSearch
    order: tuple[int, int]  #: priority, arrival
    paused: bool = False
    beams: list[RunningBeam] = field(default_factory=list)  #: in the order of ``search.open``

    def pause(self, *, paused: bool) -> None:
        """See ``Engine.pause``."""
        self.paused = paused
        for beam in self.beams:
            beam.job.paused = paused or beam.logits_V is not None

    @property
    def ready(self) -> bool:
        """Whether all beams have been read."""
        return all(beam.logits_V is not None for beam in self.beams)


class BeamScheduler:
    """Searches under way. ``drawn``: tokens that beams have got. ``seconds``: what choosing them took.

    live, jobs: of the engine, where searches and beams are beside its requests and their answers.
    """

    def __init__(
        self,
        schedule: Scheduler,
        runner: Runner,
        forms: GrammarManager,
        tokenizer: Tokenizer,
        live: dict[str, RunningRequest | RunningBeamSearch],
        jobs: dict[SchedulerEntry, RunningSequence | RunningBeam],
    ) -> None:
        self.drawn = self.reused = 0
        self.seconds = 0.0
        self._schedule, self._runner, self._forms, self._tokenizer = schedule, runner, forms, tokenizer
        self._live, self._jobs = live, jobs
        self._keys = itertools.count(-1, -1)

    def prepare(self, limits: ModelLimits, request: BeamRequest) -> ValidatedBeamRequest:
        """See ``Engine.prepare``."""
        params = request.params
        same = SamplingParams(
            max_tokens=params.max_tokens, stop_token_ids=params.stop_token_ids, ignore_eos=params.ignore_eos
        )
        rules = admit(limits, self._tokenizer, request.prompt_ids, same)
        params.check(rules.max_tokens or 0)
        return ValidatedBeamRequest(request, rules, self._forms.form(params.structured_outputs))

    def begin(self, prepared: ValidatedBeamRequest, number: str, arrival: int) -> None:
        """A search waits for its turn. number: its id. arrival: as of no other request."""
        request, rules, form = prepared
        params, most = request.params, rules.max_tokens or 0  # it was filled in
        ends = rules.stop_token_ids | (frozenset() if params.ignore_eos else rules.eos_token_ids)
        ignores = params.ignore_eos
        first = None if form is None else Held(Guide(form, ignore_eos=ignores), ignore_eos=ignores)
        search = BeamSearch(params, ends, most, first)
        live = RunningBeamSearch(request, number, rules, form, search, (request.priority, arrival))
        beam = RunningBeam(
            live, SchedulerEntry((*live.order, 0), request.prompt_ids, len(request.prompt_ids) + most), next(self._keys)
        )
        live.beams = [beam]
        self._live[number], self._jobs[beam.job] = live, beam
        self._schedule.add(beam.job)

    def take(self, rows: Sequence[tuple[RunningBeam, int]], logits_LV: Any) -> list[EngineOutput]:
        """Beams have been read, each with its row of logits, NumPy or torch. The events of searches that are over."""
        if not rows:
            return []
        begin = perf_counter()
        events = []
        own_BV = logits_LV[[row for _, row in rows]]  # a copy, which may have to wait for other beams
        for (beam, _), logits_V in zip(rows, LogitsInput(own_BV), strict=True):
            beam.logits_V, beam.job.paused = logits_V, True
        for live in {beam.live.id: beam.live for beam, _ in rows}.values():
            if live.ready:
                events += self._step(live)
        self.seconds += perf_counter() - begin
        return events

    def end(self, live: RunningBeamSearch, finish: Finish) -> list[EngineOutput]:
        """A search ends without answers."""
        self._clear(live.beams)
        del self._live[live.id]
        return [EngineOutput(live.id, CompletionChunk("", (), 0, 0, *finish), Usage(len(live.request.prompt_ids), 0))]

    def _step(self, live: RunningBeamSearch) -> list[EngineOutput]:
        rows = [beam.logits_V for beam in live.beams if beam.logits_V is not None]
        held = [beam.form.guide if isinstance(beam.form, Held) else None for beam in live.search.open]
        self.drawn += len(rows)
        top, ids_V = live.request.params.logprobs, np.arange(len(rows[0]))

        def told(place: int, token: int) -> StepLogprobs:  # of the logits as they are
            return logprobs(ids_V, rows[place], token, top or 0)

        try:
            children = live.search.step(np.stack(rows), self._forms.mask(held), None if top is None else told)
            self._go_on(live, children)
        except SearchError as error:
            return self.end(live, Finish("error", why(error.reason, held[error.place])))
        except _CopyError as error:
            return self.end(live, Finish("error", str(error)))
        except MatcherError as error:
            return self.end(live, Finish("error", f"{CONSTRAINT_FAILED[0]}: {error}"))
        return [] if live.beams else self._tell(live)

    def _go_on(self, live: RunningBeamSearch, children: Sequence[BeamCandidate]) -> None:
        """The jobs of the beams that are open now."""
        before, parents = live.beams, {child.parent for child in children}
        self._clear(beam for place, beam in enumerate(before) if place not in parents)
        used = {before[place].job.order[2] for place in parents}
        places = (place for place in itertools.count() if place not in used)
        live.beams = []
        forks: list[Fork] = []
        for parent, _ in children:
            beam = before[parent]
            if parent in parents:
                parents.remove(parent)
            else:
                beam = self._fork(beam, next(places), forks)
            live.beams.append(beam)
        try:
            if forks:
                self._runner.fork(forks)
        except Exception as error:
            raise _CopyError(f"the model failed: {one_line(error)}") from error
        for beam, (_, token) in zip(live.beams, children, strict=True):
            beam.job.push(token)
            beam.logits_V, beam.job.paused = None, live.paused

    def _fork(self, parent: RunningBeam, place: int, forks: list[Fork]) -> RunningBeam:
        job, block = self._schedule.fork(parent.job, (*parent.live.order, place))
        beam = self._jobs[job] = RunningBeam(parent.live, job, next(self._keys))
        if job.blocks:
            forks.append(Fork(parent.key, beam.key, block))
        job.reused = 0  # there is nothing that others had read
        return beam

    def _clear(self, beams: Iterable[RunningBeam]) -> None:
        for beam in beams:
            self.reused += beam.job.reused
            self._schedule.remove(beam.job)
            self._runner.forget(beam.key)
            del self._jobs[beam.job]

    def _tell(self, live: RunningBeamSearch) -> list[EngineOutput]:
        """The answers."""
        del self._live[live.id]
        found, prompt = live.search.best(), len(live.request.prompt_ids)
        usage = Usage(prompt, sum(one.length for one in found))
        pieces = [self._piece(live, index, one) for index, one in enumerate(found)]
        return [EngineOutput(live.id, piece, usage if piece is pieces[-1] else None) for piece in pieces]

    def _piece(self, live: RunningBeamSearch, index: int, found: FinishedBeam) -> BeamPiece:
        params, rules, steps = live.request.params, live.rules, found.steps
        tokens = tuple(link.token for link in steps)
        stopped = tokens[-1] in live.search.ends
        machine = Detokenizer(self._tokenizer, live.request.prompt_ids, params.skip_special_tokens)
        parts = [part for token in tokens[: len(tokens) - stopped] for part in machine.push(token)]
        text = "".join((*parts, *machine.close()))
        eos = tokens[-1] in rules.eos_token_ids and not params.ignore_eos
        finish = Finish("stop", tokens[-1] if stopped and not eos else None) if found.ended else Finish("length")
        told = tuple(link.told for link in steps if link.told is not None)
        validation = None if live.form is None else Guide(live.form).read(text, finish)
        return BeamPiece(
            text,
            tokens,
            index,
            0,
            *finish,
            logprobs=told or None,
            validation=validation,
            score=found.score,
            logprob=found.logprob,
        )


class _CopyError(Exception):
    """The model could not copy what it has read."""
