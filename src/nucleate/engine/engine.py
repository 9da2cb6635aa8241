"""Engine: many requests over one model, a step at a time. Without I/O and threads: who calls ``step`` has them.

The life of a request: ``add`` admits it; its job waits in the schedule; steps read its prompt; after its last token the
sampler draws, and each step adds a token, until the stop rules say that it has ended. Text and stop rules come after
the draw; where a forward runs by itself, as on a GPU, they are worked out while the next one runs, and what that one
reads of answers that have ended is not used. ``generate`` is the slow twin: the same tokens from the same logits.
"""

from __future__ import annotations

import functools
from time import perf_counter

from nucleate.engine.admission import admit, stages_of
from nucleate.engine.beam.params import BeamRequest
from nucleate.engine.beam.scheduling import Asked, BeamScheduler, RunningBeam, RunningBeamSearch, ValidatedBeamRequest
from nucleate.engine.kv_cache import KVCacheManager
from nucleate.engine.model_executor import ForwardOutput, ModelExecutor
from nucleate.engine.request import Request, RunningRequest, RunningSequence, ScheduledSequence, ValidatedRequest
from nucleate.engine.scheduler import Scheduler, SchedulerEntry
from nucleate.engine.speculator import Speculator
from nucleate.engine.stats import EngineStats, SpeculativeStats
from nucleate.engine.token_sampler import TokenSampler
from nucleate.engine.verification import DraftRow
from nucleate.models.runner import Runner
from nucleate.outputs import EngineOutput, Finish
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.dispatch.route import TENSOR_BACKENDS
from nucleate.sampling.inputs import check_count
from nucleate.sampling.noise import fresh_seed
from nucleate.sampling.sampler import Sampler
from nucleate.speculative.config import Speculation
from nucleate.structured_output import GrammarLimits, skippable
from nucleate.structured_output.grammar_manager import GrammarManager
from nucleate.tokenization.tokenizer import Tokenizer

MAX_NUM_SEQS, MAX_BATCH_TOKENS = 64, 1024
"""What ``Engine`` does without being told."""

LOGITS_AT_A_TIME = 1 << 26
"""Of a prompt whose logprobs are asked for."""


class Engine:
    """Requests come with ``add`` and go by themselves, or with ``abort``; ``step`` moves all of them on.

    runner: the model. max_num_seqs: answers at work at a time. max_num_batched_tokens: tokens that one forward reads,
    at least max_num_seqs. max_model_len: tokens of a prompt with its answer; none: what the model's context and its
    blocks hold, which is the most in any case. enable_prefix_caching: whether requests that begin alike share what was
    read. regex_seconds: that the stop patterns of an answer may take, see ``stop_matcher``. structured_limits: of the
    forms that text is asked to have. speculation: whether tokens are drafted, and how. backend: as in ``Sampler``; with
    "triton" or "torch", tokens are drawn where the logits are. Raises ParameterError."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        max_num_seqs: int = MAX_NUM_SEQS,
        max_num_batched_tokens: int = MAX_BATCH_TOKENS,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        regex_seconds: float = 0.5,
        structured_limits: GrammarLimits | None = None,
        speculation: Speculation | str | None = None,
        backend: str = "auto",
    ) -> None:
        check_count(max_num_seqs, "max_num_seqs")
        check_count(max_num_batched_tokens, "max_num_batched_tokens", max_num_seqs, "max_num_seqs")
        self.context_length = min(runner.context_length, runner.blocks * runner.block_size)
        if max_model_len is not None:
            check_count(max_model_len, "max_model_len", 2)
            self.context_length = min(self.context_length, max_model_len)
        self.runner, self.tokenizer, self.vocab_size = runner, tokenizer, runner.vocab_size
        self.max_num_seqs, self._regex_seconds = max_num_seqs, regex_seconds
        self._pool = KVCacheManager(runner.blocks, runner.block_size, sharing=enable_prefix_caching and runner.paged)
        self._schedule = Scheduler(
            self._pool, max_num_seqs=max_num_seqs, max_tokens=max_num_batched_tokens, whole=not runner.paged
        )
        on_device = backend in TENSOR_BACKENDS and runner.asynchronous  # asked for by name, as no GPU has run it yet
        device = str(getattr(runner, "device", "cpu")) if on_device else "cpu"
        self._sampler = Sampler(runner.vocab_size, backend, device)
        self._forms = GrammarManager(tokenizer, runner.vocab_size, structured_limits)
        self._live: dict[str, RunningRequest | RunningBeamSearch] = {}
        self._branches: dict[SchedulerEntry, RunningSequence | RunningBeam] = {}
        self._drawing = TokenSampler(
            self._sampler, self._forms, self._branches, later=runner.asynchronous,
            begun=self._begin_others, ended=self._forget, fail=self._fail,
        )  # fmt: skip
        self._arrivals = self._reused = 0
        self._searches = BeamScheduler(self._schedule, runner, self._forms, tokenizer, self._live, self._branches)
        self._stages = functools.lru_cache(maxsize=256)(lambda params: stages_of(params, self.vocab_size, tokenizer))
        self._speculator: Speculator | None = None
        if (asked := Speculation.of(speculation)) is not None:
            self._speculator = Speculator(asked, runner, self._schedule, self._sampler, self._branches)
        self._forwards = ModelExecutor(
            runner, self._schedule, self._forms, self._speculator, self._branches, self._fail
        )

    def __len__(self) -> int:
        """How many requests have not ended."""
        return len(self._live)

    @property
    def steps(self) -> int:
        """How many forwards there were."""
        return self._forwards.count

    @property
    def stats(self) -> EngineStats:
        schedule, pool, searches = self._schedule, self._pool, self._searches
        forwards, drawing = self._forwards, self._drawing
        return EngineStats(
            len(schedule.running),
            len(schedule.waiting),
            pool.count,
            pool.used,
            forwards.count,
            forwards.read,
            self._reused + searches.reused,
            drawing.tokens + searches.drawn,
            schedule.preemptions,
            forwards.seconds,
            drawing.seconds + searches.seconds,
            self._forms.seconds,
            drawing.forced,
            SpeculativeStats() if self._speculator is None else self._speculator.figures,
        )

    def prepare(self, request: Request | BeamRequest) -> ValidatedRequest | ValidatedBeamRequest:
        """What ``add`` needs to know of a request. Raises ParameterError, as ``add`` would.

        This is most of the work of ``add``, and may be done on any thread, also while another one makes a step.
        """
        if isinstance(request, BeamRequest):
            return self._searches.prepare(self, request)
        params = request.params
        rules = admit(self, self.tokenizer, request.prompt_ids, params, self._regex_seconds)
        stages = self._stages(params)
        return ValidatedRequest(request, stages, rules, self._forms.form(params.structured_outputs))

    def add(self, request: Asked) -> str:
        """Admit a request and return its id. Raises ParameterError, and then nothing has changed."""
        if isinstance(request, Request | BeamRequest):
            request = self.prepare(request)
        number = self._number(request.request.id)
        if isinstance(request, ValidatedBeamRequest):
            self._searches.begin(request, number, self._arrivals)
        else:
            live = self._live[number] = self._admit(request, number)
            self._begin(live)
        self._arrivals += 1
        return number

    def abort(self, request_id: str) -> list[EngineOutput]:
        """End a request now: the last event of each of its answers, with finish_reason "abort"; none if it is over."""
        live = self._live.get(request_id)
        if live is None:
            return []
        if isinstance(live, RunningBeamSearch):
            return self._searches.end(live, Finish("abort"))
        while live.begun < live.request.params.n:
            self._begin(live)
        return [self._end(branch, Finish("abort")) for branch in list(live.branches.values())]

    def pause(self, request_id: str, *, paused: bool = True) -> None:
        """Do not go on with a request for now: nobody takes what it writes. It is the first to make room for others.

        Nothing happens if it is over.
        """
        live = self._live.get(request_id)
        if live is not None:
            live.pause(paused=paused)

    def step(self) -> list[EngineOutput]:
        """One forward, one draw: the events of all requests that it moved on; none if there is nothing to do."""
        begin, read = perf_counter(), self._forwards.read
        readings = [self._branches[chunk.job].reading(chunk) for chunk in self._schedule.plan()]
        readings.sort(key=_row)  # the order of the sampler's rows, new ones at the end
        if self._speculator is not None:
            readings = self._speculator.extend(readings)
        behind = self.runner.asynchronous
        events: list[EngineOutput] = []
        batches = self._forwards.run(readings, events) if readings else []
        if behind or not readings:
            events += self._drawing.tell()
        for batch in batches:
            self._draw(batch, events)
        if not behind:
            events += self._drawing.tell()
        if self._speculator is not None and readings:
            self._speculator.stepped(readings, self._forwards.read - read, perf_counter() - begin)
        return events

    def _number(self, chosen: str | None) -> str:
        """The id of a new request."""
        while chosen is None and f"request-{self._arrivals}" in self._live:  # somebody chose that name
            self._arrivals += 1
        number = f"request-{self._arrivals}" if chosen is None else chosen
        if number in self._live:
            raise ParameterError("id", f"there is a request {number!r:.80} already")
        return number

    def _admit(self, prepared: ValidatedRequest, number: str) -> RunningRequest:
        request, stages, rules, form = prepared
        seed = fresh_seed() if request.params.seed is None else request.params.seed
        limit = len(request.prompt_ids) + (rules.max_tokens or 0)  # admit fills it in
        skips = form is not None and skippable(stages)
        return RunningRequest(request, number, seed, stages, rules, form, limit, self._arrivals, skips)

    def _begin(self, live: RunningRequest) -> None:
        """The next answer of a request waits for its turn."""
        branch = live.branch(self.tokenizer, max(1, LOGITS_AT_A_TIME // self.vocab_size))
        self._branches[branch.job] = branch
        self._schedule.add(branch.job)

    def _begin_others(self, live: RunningRequest) -> None:
        """The prompt has been read: the other answers find it there."""
        while live.begun < live.request.params.n:
            self._begin(live)

    def _fail(self, branch: RunningSequence | RunningBeam, message: str) -> list[EngineOutput]:
        """An answer, or the search of a beam, cannot go on; what was drawn before is told."""
        events = self._drawing.tell(branch)
        if branch.job not in self._branches:
            return events
        finish = Finish("error", message)
        if isinstance(branch, RunningBeam):
            return [*events, *self._searches.end(branch.live, finish)]
        return [*events, self._end(branch, finish)]

    def _draw(self, batch: ForwardOutput, events: list[EngineOutput]) -> None:
        """Draw the next token of every answer whose last token has been read; beams get theirs in their own way."""
        rows: list[DraftRow] = []
        beams: list[tuple[RunningBeam, int]] = []
        for reading, place in self._forwards.ready(batch):
            branch = reading.branch
            if isinstance(branch, RunningBeam):
                beams.append((branch, place))
            else:
                rows.append(DraftRow(reading, branch, place))
        logits_LV, speculator = batch.logits, self._speculator
        events += self._searches.take(beams, logits_LV)
        if speculator is None or speculator.verified(rows):
            self._drawing.sample([row.branch for row in rows], [row.place for row in rows], logits_LV, events)
        else:
            speculator.verify(rows, self._drawing.hands(logits_LV, events))
        if speculator is not None and batch.features is not None:
            speculator.read(batch.readings, batch.features)

    def _end(self, branch: RunningSequence, finish: Finish) -> EngineOutput:
        """An answer ends without a token."""
        self._forget(branch)
        return branch.live.event(branch.answer.end(finish))

    def _forget(self, branch: RunningSequence) -> None:
        """An answer has ended: give back all that it holds."""
        live, job = branch.live, branch.job
        self._begin_others(live)
        self._reused += job.reused
        self._schedule.remove(job)
        self.runner.forget(branch.key)
        if self._speculator is not None:
            self._speculator.forget(branch)
        if branch.row >= 0:
            self._sampler.remove(branch.row)
        del self._branches[job], live.branches[branch.answer.index]
        if not live.branches:
            del self._live[live.id]


def _row(reading: ScheduledSequence) -> int:
    branch = reading.branch
    return branch.row if isinstance(branch, RunningSequence) and branch.row >= 0 else 1 << 62
