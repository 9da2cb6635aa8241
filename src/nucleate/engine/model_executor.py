"""Runs the forward passes of an engine. If one fails, each sequence is retried alone, so that only faulty ones end."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from nucleate.engine.companions import Companions
from nucleate.engine.scheduler import ScheduledSequence, Scheduler
from nucleate.engine.speculator import Speculator
from nucleate.models.protocol import RunnerLostError
from nucleate.models.runner import ModelInput, Runner
from nucleate.parameters.converters import one_line
from nucleate.speculative.draft import NO_DRAFT

Failure = tuple[Any, str]
"""A sequence or beam that cannot continue, and why."""

_model_input = partial(tuple.__new__, ModelInput)
"""Takes half the time of ``ModelInput(...)``."""


class ForwardOutput(NamedTuple):
    """The result of a forward pass. Each sequence has its ``logits_row``."""

    scheduled: list[ScheduledSequence]
    logits: Any  #: [L, V], combined with those of companions
    hidden_states: Any  #: of all computed tokens, if a proposer reads them


class ModelExecutor:
    """Runs forward passes. ``computed_tokens``: the tokens so far, those of drafts and companions included."""

    def __init__(self, runner: Runner, companions: Companions, scheduler: Scheduler) -> None:
        self._runner, self._companions, self._scheduler = runner, companions, scheduler
        self.num_steps = self.computed_tokens = 0
        self.seconds = 0.0

    def run(
        self, scheduled: list[ScheduledSequence], speculator: Speculator | None
    ) -> tuple[list[ForwardOutput], list[Failure]]:
        """Compute the scheduled tokens. speculator: None in a step without drafts."""
        self.num_steps += 1
        failures: list[Failure] = []
        begin = perf_counter()
        try:
            results = [self._forward(scheduled, speculator, failures)]
        except RunnerLostError:
            raise
        except Exception as error:  # noqa: BLE001  # a model may raise anything
            results = self._forward_alone(scheduled, speculator, failures, error)
        self.seconds += perf_counter() - begin
        for result in results:
            self._scheduler.mark_computed(result.scheduled)
        return results, failures

    def _forward(
        self, scheduled: list[ScheduledSequence], speculator: Speculator | None, failures: list[Failure]
    ) -> ForwardOutput:
        if self._scheduler.num_companions:
            logits_LV = self._companions.forward(scheduled, self._compute, failures)
        else:
            logits_LV = self._compute(self._runner, scheduled)
        return ForwardOutput(scheduled, logits_LV, None if speculator is None else speculator.end_forward(scheduled))

    def _compute(self, runner: Runner, scheduled: list[ScheduledSequence]) -> Any:
        """The logits of one model, in which each sequence gets its row."""
        inputs = [model_input(one) for one in scheduled]
        logits_LV = runner.forward(inputs)
        row, computed = -1, 0
        for one, (_, _, start, stop, _, num_logits, _) in zip(scheduled, inputs, strict=True):
            row += num_logits
            one.logits_row = row if one.draft is NO_DRAFT else row - len(one.draft)
            computed += stop - start
        self.computed_tokens += computed
        return logits_LV

    def _forward_alone(
        self,
        scheduled: list[ScheduledSequence],
        speculator: Speculator | None,
        failures: list[Failure],
        error: Exception,
    ) -> list[ForwardOutput]:
        """After an error of the whole batch: each sequence alone, with its companion and without its draft."""
        results: list[ForwardOutput] = []
        retry = len(scheduled) > 1 or any(one.draft for one in scheduled)
        if speculator is not None:
            speculator.withdraw(scheduled)
        together = {one.companion.sequence for one in scheduled if one.companion is not None}
        for one in scheduled:
            if one.sequence in together:
                continue
            try:
                if not retry:
                    raise error
                results.append(_copied(self._forward([*one.group], speculator, failures)))
            except Exception as own:  # noqa: BLE001  # a model may raise anything; the request gets the message
                failures.append((one.sequence.owner or one.sequence, f"the model failed: {one_line(own)}"))
        return results


def model_input(one: ScheduledSequence) -> ModelInput:
    """The input of the model for the scheduled tokens of a sequence, with their draft."""
    sequence, draft = one.sequence, one.draft
    if draft is NO_DRAFT:
        num_logits = one.stop - one.start if sequence.all_logits else int(one.last)
        return _model_input(
            (sequence.key, sequence.token_ids, one.start, one.stop, sequence.block_ids, num_logits, None)
        )
    stop, parents = one.stop + len(draft), None if draft.is_chain else draft.parents
    return ModelInput(sequence.key, sequence.token_ids, one.start, stop, sequence.block_ids, 1 + len(draft), parents)


def _copied(result: ForwardOutput) -> ForwardOutput:
    """The result with arrays of its own: the next forward pass may overwrite those of the runner."""
    logits, states = [
        value.copy() if isinstance(value, np.ndarray) else value for value in (result.logits, result.hidden_states)
    ]
    return result._replace(logits=logits, hidden_states=states)
