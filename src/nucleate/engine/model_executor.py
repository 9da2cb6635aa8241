"""Runs the forward passes of an engine. If one fails, each sequence is retried alone, so that only faulty ones end."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from nucleate.engine.beam_scheduler import RunningBeam
from nucleate.engine.companions import CompanionSequence
from nucleate.engine.running_request import RunningSequence, SequenceLifecycle
from nucleate.engine.scheduler import ScheduledSequence, Scheduler
from nucleate.engine.speculator import Speculator
from nucleate.models.protocol import RunnerLostError
from nucleate.models.runner import Runner
from nucleate.outputs import EngineOutput
from nucleate.parameters.converters import one_line
from nucleate.speculative.draft import NO_DRAFT
from nucleate.structured_output.compiler import GrammarManager


class ForwardOutput(NamedTuple):
    """The result of a forward pass."""

    scheduled: list[ScheduledSequence]
    logits: Any  #: [L, V]
    hidden_states: Any = None  #: of all computed tokens, if a proposer reads them
    companions: Sequence[ScheduledSequence] = ()  #: those that the companion model computed
    companion_logits: Any = None


class ModelExecutor:
    """Runs forward passes.

    runners: of the model, and of the companion model if there is one. lifecycle: ends the sequences for which the model
    fails.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        scheduler: Scheduler,
        grammars: GrammarManager,
        lifecycle: SequenceLifecycle,
    ) -> None:
        self._runner, self._companion_runner = runners[0], runners[1] if len(runners) > 1 else None
        self._scheduler, self._grammars = scheduler, grammars
        self._lifecycle = lifecycle
        self.num_steps = 0
        self.computed_tokens = 0  # those of drafts too
        self.seconds = 0.0

    def run(
        self, scheduled: list[ScheduledSequence], outputs: list[EngineOutput], speculator: Speculator | None
    ) -> list[ForwardOutput]:
        """Compute the scheduled tokens, with their drafts. speculator: None in a step without drafts.

        Failed sequences add their last outputs to ``outputs``.
        """
        self.num_steps += 1
        if self._grammars.is_slow and (speculator is None or speculator.coupled):
            # the other acceptance rules need masks along the draft
            ends = [one.sequence for one in scheduled if one.last and isinstance(one.sequence, RunningSequence)]
            self._grammars.prefetch([sequence.processor.guide for sequence in ends])
        begin = perf_counter()
        try:
            results = [self._forward(scheduled, speculator)]
        except RunnerLostError:
            raise
        except Exception as error:  # noqa: BLE001  # a model may raise anything
            results = self._forward_alone(scheduled, outputs, speculator, error)
        self.seconds += perf_counter() - begin
        for result in results:
            computed = [*result.scheduled, *result.companions]
            self._scheduler.mark_computed(computed)
            self.computed_tokens += sum([one.stop - one.start for one in computed])
            if speculator is not None:
                self.computed_tokens += sum([len(one.draft) for one in computed])
        return results

    def _forward(self, scheduled: list[ScheduledSequence], speculator: Speculator | None) -> ForwardOutput:
        others: list[ScheduledSequence] = []
        other_logits_LV = None
        if self._companion_runner is not None and self._scheduler.num_companions:
            others = [one for one in scheduled if on_companion_model(one)]
            if others:
                scheduled = [one for one in scheduled if not on_companion_model(one)]
                other_logits_LV = self._companion_runner.forward([one.sequence.model_input(one) for one in others])
        logits_LV = self._runner.forward([one.sequence.model_input(one) for one in scheduled])
        if speculator is None:
            return ForwardOutput(scheduled, logits_LV, None, others, other_logits_LV)
        speculator.remove_draft_tokens([*scheduled, *others])
        states_TF = speculator.hidden_states()
        return ForwardOutput(scheduled, logits_LV, states_TF, others, other_logits_LV)

    def _forward_alone(
        self,
        scheduled: list[ScheduledSequence],
        outputs: list[EngineOutput],
        speculator: Speculator | None,
        error: Exception,
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
                alone = [one] if one.companion is None else [one, one.companion]
                results.append(_copied(self._forward(alone, speculator)))
            except Exception as own:  # noqa: BLE001  # a model may raise anything; the request gets the message
                failed = one.sequence.owner or one.sequence
                outputs += self._lifecycle.fail(failed, f"the model failed: {one_line(own)}")
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
                if sequence.owner is None:
                    (beams if sequence.__class__ is RunningBeam else ready).append(one)
        end = 0
        for one in result.companions:
            end += one.last + len(one.draft)
            one.logits_row = end - 1 - len(one.draft)
        return ready, beams


def _copied(result: ForwardOutput) -> ForwardOutput:
    """The result with arrays of its own: the next forward pass may overwrite those of the runner."""
    logits, states, others = [
        value.copy() if isinstance(value, np.ndarray) else value
        for value in (result.logits, result.hidden_states, result.companion_logits)
    ]
    return result._replace(logits=logits, hidden_states=states, companion_logits=others)


def on_companion_model(one: ScheduledSequence) -> bool:
    """Whether the companion model computes a sequence."""
    return isinstance(one.sequence, CompanionSequence) and one.sequence.on_companion_model
