"""The drafts of an engine: they are asked for, read with the tokens they follow, verified, and given back.

Knows the schedule and the proposer; refuses to know how a token is drawn. Whatever a proposer does, answers go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from nucleate.engine.request import NONE, RunningSequence, ScheduledSequence
from nucleate.engine.scheduler import ScheduledChunk, Scheduler, SchedulerEntry
from nucleate.engine.stats import SpeculativeStats
from nucleate.engine.verification import DraftRow, InvalidDistributionError, Path, VerificationCallbacks, follow, judge
from nucleate.jit.kernel_libraries import DRAFTS
from nucleate.jit.native_library import get
from nucleate.models.runner import Move, Runner
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.distributions import foreseeable
from nucleate.sampling.sampler import Sampler
from nucleate.sampling.stages.selection.greedy import Greedy
from nucleate.speculative.adaptive.controller import AdaptiveProposer
from nucleate.speculative.config import COUPLED, FIELD, Speculation
from nucleate.speculative.draft import Draft, DraftContext, TargetOutput
from nucleate.speculative.grammar_filter import allowed
from nucleate.speculative.tree import narrow

logger = logging.getLogger("nucleate")

MOST_LOGITS = 1 << 26
"""Of a forward with drafts."""


class Speculator:
    """The drafts of one engine. jobs: of the engine, what is at work. Raises ParameterError, ModelError."""

    def __init__(
        self,
        config: Speculation,
        runner: Runner,
        schedule: Scheduler,
        sampler: Sampler,
        jobs: Mapping[SchedulerEntry, Any],
    ) -> None:
        if not runner.paged:
            why = f": {runner.why}" if runner.why else ""
            raise ParameterError(FIELD, f"drafts are for models that read many sequences at a time{why}")
        self.config, self.proposer = config, config.make()
        self._adaptive = self.proposer if isinstance(self.proposer, AdaptiveProposer) else None
        self.watches = tuple(self.proposer.layers)
        if self.watches:
            runner.watch(self.watches)
        if (warm := getattr(runner, "warm", None)) is not None:
            warm()  # only kernels read drafts in the bits of tokens, and no step is to wait for them
            get([DRAFTS])
        self._runner, self._schedule, self._sampler, self._jobs = runner, schedule, sampler, jobs
        self._tree_width = config.effective_tree_width if getattr(runner, "tree_attention", False) else 1
        self._paths: dict[int, Path] = {}  # of trees that were verified in this step, by key
        self._rounds = self._drafted = self._accepted = 0
        self._tried, self._kept = [0] * config.num_speculative_tokens, [0] * config.num_speculative_tokens
        self._seconds = 0.0
        self._drafting = False  # whether anything is drafted in this step
        self._failed = False

    @property
    def figures(self) -> SpeculativeStats:
        """What came of it so far."""
        tried, kept = tuple(self._tried), tuple(self._kept)
        return SpeculativeStats(self._rounds, self._drafted, self._accepted, tried, kept, self._seconds)

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn first, and then compared with drafts."""
        return self.config.acceptance_rule == COUPLED

    def extend(self, readings: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """The same readings, and drafted tokens with those that come to the end of an answer.

        There are as many as there is room for in the forward and in the blocks, beside all else: nobody waits or makes
        room for them. Until ``cut`` or ``withdraw``, they are at the end of the tokens of their jobs.
        """
        self._drafting = False
        if self._adaptive is not None and not self._adaptive.asks():
            return readings
        begin = perf_counter()
        places = [place for place, reading in enumerate(readings) if _goes_on(reading)]
        if places:
            counts = self._counts(readings, places)
            states = [self._state(readings[place].branch) for place in places]
            drafts = self._ask(states, counts) if any(counts) else [NONE] * len(states)
            readings = readings.copy()
            for place, count, draft in zip(places, counts, drafts, strict=True):
                if draft:
                    readings[place] = self._with(readings[place], draft, count)
        self._seconds += perf_counter() - begin
        return readings

    def _counts(self, readings: list[ScheduledSequence], places: list[int]) -> list[int]:
        """How many tokens may be drafted for each."""
        left = self._schedule.max_tokens - sum([part.stop - part.start for _, _, part, _, _ in readings])
        left = min(left, MOST_LOGITS // self._runner.vocab_size - len(readings))
        counts = []
        for place in places:
            room = _room(readings[place].chunk.job)
            most = self.config.num_speculative_tokens if self._may(readings[place].branch) else 0
            count = max(0, min(most, left, most if room > 0 and self._tree_width > 1 else room))
            counts.append(count)
            left -= count
        return counts

    def _may(self, branch: RunningSequence) -> bool:
        """Whether drafts of an answer can be verified."""
        return self.draws or foreseeable(self._sampler.stages(branch.row))

    def _state(self, branch: RunningSequence) -> DraftContext:
        """The list of tokens stays the same, and grows: made once, it is the state of every step."""
        if branch.state is None:
            params, greedy = branch.live.request.params, isinstance(self._sampler.stages(branch.row)[-1], Greedy)
            prompt, temperature = len(branch.live.request.prompt_ids), 0.0 if greedy else params.temperature
            branch.state = DraftContext(
                branch.key, branch.job.token_ids, prompt, branch.answer.seed, temperature, self.draws
            )
        return branch.state

    def _ask(self, states: list[DraftContext], counts: list[int]) -> list[Draft]:
        drafts = self._safely(self.proposer.propose, states, counts)
        if drafts is None or len(drafts) != len(states) or not all(isinstance(draft, Draft) for draft in drafts):
            if drafts is not None:
                self._complain("it does not give one draft per sequence")
            return [NONE] * len(states)
        return list(drafts)

    def _with(self, reading: ScheduledSequence, draft: Draft, count: int) -> ScheduledSequence:
        """A reading with as much of a draft as can be read, and as may follow."""
        branch, job, part = reading.branch, reading.chunk.job, reading.part
        draft = narrow(draft, self._tree_width, _room(job), count)
        draft = allowed(draft, self._runner.vocab_size, branch.answer.guide)
        draft = draft.cut(self._schedule.reserve(job, len(draft)))
        if not draft:
            self._safely(self.proposer.accepted, part.key, 0)
            return reading
        self._drafting = True
        job.token_ids += draft.tokens  # type: ignore[operator]
        stop, logits = part.stop + len(draft), part.logits + len(draft)
        part = part._replace(stop=stop, logits=logits, parents=None if draft.chain else draft.parents)
        return reading._replace(part=part, draft=draft)

    def cut(self, readings: Sequence[ScheduledSequence]) -> None:
        """Drafts have been read: take them off the tokens of their jobs."""
        for reading in readings if self._drafting else ():
            if reading.draft:
                del reading.chunk.job.token_ids[reading.chunk.stop :]  # type: ignore[attr-defined]

    def withdraw(self, readings: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
        """Drafts could not be read: the same readings without them."""
        self.cut(readings)
        plain = []
        for reading in readings:
            kept = reading
            if reading.draft:
                count, part = len(reading.draft), reading.part
                kept = reading._replace(
                    part=part._replace(stop=part.stop - count, logits=part.logits - count, parents=None), draft=NONE
                )
                self._schedule.trim(reading.chunk.job)
                self._safely(self.proposer.accepted, part.key, 0)
            plain.append(kept)
        return plain

    def verified(self, rows: Sequence[DraftRow]) -> bool:
        """Whether there is nothing to verify: none of these answers has a draft."""
        for row in rows:
            if row.reading.draft:
                return False
        self._rounds += len(rows)
        return True

    def verify(self, rows: Sequence[DraftRow], hands: VerificationCallbacks) -> None:
        """Draw the next token of some answers, and go on as long as what comes has been drafted."""
        if self.draws:
            paths = follow(rows, hands)
        else:
            drafted = [row for row in rows if row.reading.draft]
            plain = [row for row in rows if not row.reading.draft]
            if plain:
                hands.draw([row.branch for row in plain], [row.place for row in plain])
            paths = [()] * len(plain) + [self._judged(row, hands) for row in drafted]
            rows = [*plain, *drafted]
        if self._tree_width > 1:
            self._straighten(rows, paths)
        for row, path in zip(rows, paths, strict=True):
            self._told(row, len(path))

    def _straighten(self, rows: Sequence[DraftRow], paths: Sequence[Path]) -> None:
        """What was kept of a tree is a chain now: have its keys and values lie like that."""
        moves = []
        for row, path in zip(rows, paths, strict=True):
            if row.branch.job not in self._jobs or row.reading.part.parents is None:
                continue
            if self.watches:
                self._paths[row.branch.key] = path
            right = next((depth for depth, place in enumerate(path) if place != depth), len(path))
            if right < len(path):
                start = row.reading.chunk.stop
                sources = [start + place for place in path[right:]]
                moves.append(Move(row.branch.key, row.branch.job.blocks, sources, start + right))
        if moves:
            self._runner.move(moves)

    def _judged(self, row: DraftRow, hands: VerificationCallbacks) -> Path:
        try:
            return judge(row, hands, self._sampler, self.config.acceptance_rule)
        except InvalidDistributionError as error:
            self._complain(str(error))
            hands.draw([row.branch], [row.place])
            return ()

    def _told(self, row: DraftRow, kept: int) -> None:
        """So many drafted tokens of an answer are its own now."""
        job, start, draft = row.branch.job, row.reading.chunk.stop, row.reading.draft
        self._rounds += 1
        if not draft:
            return
        self._drafted += len(draft)
        self._accepted += kept
        for place in range(min(draft.depth, kept + 1)):
            self._tried[place] += 1
            self._kept[place] += place < kept
        if job in self._jobs:
            self._schedule.done([ScheduledChunk(job, start, start + kept)])
            self._schedule.trim(job)
            self._safely(self.proposer.accepted, row.branch.key, kept)

    def features(self, readings: Sequence[ScheduledSequence]) -> Any:
        """What the layers gave that the proposer reads, of the forward of these; None if it reads none now."""
        if not self.watches:
            return None
        if self._adaptive is not None and self._adaptive.rests(joining=not all(map(_only_goes_on, readings))):
            return None
        return self._runner.features

    def read(self, readings: Sequence[ScheduledSequence], features_TF: Any) -> None:
        """Tell a proposer what was read, of the tokens that stay."""
        begin, end = perf_counter(), 0
        told = []
        for branch, chunk, part, _, _ in readings:
            start, end = end, end + part.stop - part.start
            if isinstance(branch, RunningSequence) and chunk.job in self._jobs:
                ids = chunk.job.token_ids[part.start : chunk.job.read]
                places: Any = slice(start, start + len(ids))
                if part.parents is not None:
                    first = start + chunk.stop - part.start
                    places = [*range(start, first), *[first + place for place in self._paths.get(part.key, ())]]
                told.append(TargetOutput(part.key, part.start, ids, features_TF[places]))
        self._paths.clear()
        if told:
            self._safely(self.proposer.read, told)
        self._seconds += perf_counter() - begin

    def stepped(self, readings: Sequence[ScheduledSequence], read: int, seconds: float) -> None:
        """A step took so many seconds, and read so many tokens, those of drafts too."""
        if self._adaptive is None:
            return
        if all(map(_only_goes_on, readings)):
            self._adaptive.stepped(len(readings), read, seconds)
        else:
            self._adaptive.joined()

    def forget(self, branch: RunningSequence) -> None:
        """An answer has ended."""
        begin = perf_counter()
        output = branch.job.token_ids[len(branch.live.request.prompt_ids) :]
        self._safely(self.proposer.forget, branch.key, output)
        self._seconds += perf_counter() - begin

    def _safely(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a proposer gives; None if it fails."""
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001  # a proposer of one's own may raise anything
            self._complain(f"{type(error).__name__}: {error}")
            return None

    def _complain(self, what: str) -> None:
        if not self._failed:
            logger.warning("drafts fail, and answers go on without them (said once): %.300s", what)
        self._failed = True


def _room(job: SchedulerEntry) -> int:
    """How many tokens may be drafted one after the other, so that the last one there is is not among them."""
    return job.limit - len(job.token_ids) - 1


def _goes_on(reading: ScheduledSequence) -> bool:
    """Whether it ends with the last token that an answer has written, and a draft may be asked for."""
    branch = reading.branch
    return reading.last and isinstance(branch, RunningSequence) and branch.row >= 0 and branch.told is None


def _only_goes_on(reading: ScheduledSequence) -> bool:
    """Whether it reads the last token that an answer has, and nothing else but a draft."""
    return (
        reading.last and isinstance(reading.branch, RunningSequence) and reading.chunk.stop - reading.chunk.start == 1
    )
