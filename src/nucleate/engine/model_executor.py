"""The forwards of an engine: what the model reads in a step, and the logits that it gives. Knows neither draw nor text.

If the model fails, each sequence is tried alone, so that none ends but those for which it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any, NamedTuple

from nucleate.engine.beam.scheduling import RunningBeam
from nucleate.engine.request import RunningSequence, ScheduledSequence
from nucleate.engine.scheduler import Scheduler, SchedulerEntry
from nucleate.engine.speculator import Speculator
from nucleate.models.runner import Runner
from nucleate.outputs import EngineOutput
from nucleate.parameters.converters import one_line
from nucleate.structured_output.grammar_manager import GrammarManager


class ForwardOutput(NamedTuple):
    """What a forward has read, and what it gave."""

    readings: list[ScheduledSequence]
    logits: Any
    features: Any = None  #: of all tokens, if a proposer wants them


class ModelExecutor:
    """The forwards of one engine.

    at_work: answers and beams that have not ended. fail: ends one for which the model has failed.
    """

    def __init__(
        self,
        runner: Runner,
        schedule: Scheduler,
        forms: GrammarManager,
        speculator: Speculator | None,
        at_work: Mapping[SchedulerEntry, RunningSequence | RunningBeam],
        fail: Callable[[RunningSequence | RunningBeam, str], list[EngineOutput]],
    ) -> None:
        self._runner, self._schedule, self._forms, self._speculator = runner, schedule, forms, speculator
        self._at_work, self._fail = at_work, fail
        self.count = 0
        self.read = 0  # tokens, those of drafts too
        self.seconds = 0.0

    def run(self, readings: list[ScheduledSequence], events: list[EngineOutput]) -> list[ForwardOutput]:
        """What could be read, with its logits; the events of what could not."""
        self.count += 1
        if self._speculator is None or self._speculator.draws:  # or else other masks are asked for
            drawing = [each.branch for each in readings if each.last and isinstance(each.branch, RunningSequence)]
            self._forms.begin([branch.answer.guide for branch in drawing])
        begin = perf_counter()
        try:
            batches = [self._together(readings)]
        except Exception as error:  # noqa: BLE001  # of the model, whatever it is
            batches = self._alone(readings, events, error)
        self.seconds += perf_counter() - begin
        for batch in batches:
            self._schedule.done([reading.chunk for reading in batch.readings if reading.chunk.job in self._at_work])
            self.read += sum([reading.part.stop - reading.part.start for reading in batch.readings])
        return batches

    def _together(self, readings: list[ScheduledSequence]) -> ForwardOutput:
        logits_LV = self._runner.forward([reading.part for reading in readings])
        speculator = self._speculator
        if speculator is None:
            return ForwardOutput(readings, logits_LV)
        speculator.cut(readings)
        return ForwardOutput(readings, logits_LV, speculator.features(readings))

    def _alone(
        self, readings: list[ScheduledSequence], events: list[EngineOutput], error: Exception
    ) -> list[ForwardOutput]:
        """Each by itself, and without its draft, after an error of all together."""
        batches: list[ForwardOutput] = []
        again = len(readings) > 1 or any(reading.draft for reading in readings)
        if self._speculator is not None:
            readings = self._speculator.withdraw(readings)
        for reading in readings:
            if reading.chunk.job not in self._at_work:  # another beam of its search has failed
                continue
            try:
                if not again:
                    raise error
                batches.append(self._together([reading]))
            except Exception as own:  # noqa: BLE001  # a model may raise anything: told to who asked
                events += self._fail(reading.branch, f"the model failed: {one_line(own)}")
        return batches

    def ready(self, batch: ForwardOutput) -> Iterator[tuple[ScheduledSequence, int]]:
        """Those whose last token has been read, with the place of its logits. Logits of prompts are told of."""
        end = 0
        for reading in batch.readings:
            branch, chunk, part, last, draft = reading
            start, end = end, end + part.logits
            if chunk.job not in self._at_work:  # its text has ended it meanwhile
                continue
            if isinstance(branch, RunningSequence) and branch.told is not None:
                branch.tell_prompt(part, batch.logits[start:end])
            if last:
                yield reading, end - 1 - len(draft)
