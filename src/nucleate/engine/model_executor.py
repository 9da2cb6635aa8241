"""Runs the forward passes of an engine. If one fails, each sequence is retried alone, so that only faulty ones end."""

from __future__ import annotations

from time import perf_counter
from typing import Any, NamedTuple

from nucleate.engine.beam.scheduling import RunningBeam
from nucleate.engine.running_request import RunningSequence, SequenceLifecycle
from nucleate.engine.scheduler import ScheduledSequence, Scheduler
from nucleate.engine.speculator import Speculator
from nucleate.models.runner import Runner
from nucleate.outputs import EngineOutput
from nucleate.parameters.converters import one_line
from nucleate.speculative.draft import NO_DRAFT
from nucleate.structured_output.grammar_manager import GrammarManager


class ForwardOutput(NamedTuple):
    """The result of a forward pass."""

    scheduled: list[ScheduledSequence]
    logits: Any  #: [L, V]
    hidden_states: Any = None  #: of all computed tokens, if a proposer reads them


class ModelExecutor:
    """Runs forward passes. lifecycle: ends the sequences for which the model fails."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        grammars: GrammarManager,
        speculator: Speculator | None,
        lifecycle: SequenceLifecycle,
    ) -> None:
        self._runner, self._scheduler, self._grammars, self._speculator = runner, scheduler, grammars, speculator
        self._lifecycle = lifecycle
        self.num_steps = 0
        self.computed_tokens = 0  # those of drafts too
        self.seconds = 0.0

    def run(self, scheduled: list[ScheduledSequence], outputs: list[EngineOutput]) -> list[ForwardOutput]:
        """Compute the scheduled tokens. Failed sequences add their last outputs to ``outputs``."""
        self.num_steps += 1
        if self._speculator is None or self._speculator.coupled:  # the other rules need masks along the draft
            ends = [one.sequence for one in scheduled if one.last and isinstance(one.sequence, RunningSequence)]
            guides = [sequence.processor.guide for sequence in ends]
            if any(guides):
                self._grammars.prefetch(guides)
        begin = perf_counter()
        try:
            results = [self._forward(scheduled)]
        except Exception as error:  # noqa: BLE001  # a model may raise anything
            results = self._forward_alone(scheduled, outputs, error)
        self.seconds += perf_counter() - begin
        for result in results:
            self._scheduler.mark_computed(result.scheduled)
            self.computed_tokens += sum([one.stop - one.start for one in result.scheduled])
            if self._speculator is not None:
                self.computed_tokens += sum([len(one.draft) for one in result.scheduled])
        return results

    def _forward(self, scheduled: list[ScheduledSequence]) -> ForwardOutput:
        logits_LV = self._runner.forward([one.sequence.model_input(one) for one in scheduled])
        if self._speculator is None:
            return ForwardOutput(scheduled, logits_LV)
        self._speculator.remove_draft_tokens(scheduled)
        return ForwardOutput(scheduled, logits_LV, self._speculator.hidden_states(scheduled))

    def _forward_alone(
        self, scheduled: list[ScheduledSequence], outputs: list[EngineOutput], error: Exception
    ) -> list[ForwardOutput]:
        """After an error of the whole batch: each sequence alone, without its draft."""
        results: list[ForwardOutput] = []
        retry = len(scheduled) > 1 or any(one.draft for one in scheduled)
        if self._speculator is not None:
            self._speculator.withdraw(scheduled)
        for one in scheduled:
            if one.sequence.finished:  # another beam of its search has failed
                continue
            try:
                if not retry:
                    raise error
                results.append(self._forward([one]))
            except Exception as own:  # noqa: BLE001  # a model may raise anything; the request gets the message
                outputs += self._lifecycle.fail(one.sequence, f"the model failed: {one_line(own)}")
        return results

    @staticmethod
    def ready(result: ForwardOutput) -> tuple[list[ScheduledSequence], list[ScheduledSequence]]:
        """The sequences and the beams whose last token was computed, with their ``logits_row``.

        Prompt logprobs are collected on the way.
        """
        ready: list[ScheduledSequence] = []
        beams: list[ScheduledSequence] = []
        end = 0
        for one in result.scheduled:
            sequence, draft = one.sequence, 0 if one.draft is NO_DRAFT else len(one.draft)
            if sequence.prompt_logprobs is not None:
                start, end = end, end + one.stop - one.start
                if not sequence.finished:  # with its text, in the meantime
                    sequence.add_prompt_logprobs(one, result.logits[start:end])
            else:
                end += one.last + draft
            if one.last and not sequence.finished:
                one.logits_row = end - 1 - draft
                (beams if sequence.__class__ is RunningBeam else ready).append(one)
        return ready, beams
