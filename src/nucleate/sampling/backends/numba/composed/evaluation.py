"""Any pipeline on the CPU. Equal to ``reference.run``, token for token.

Stages' rules are evaluated as they are, by NumPy, on the few tokens that matter; nothing is compiled for a stage. A row
starts as ``full_row.FullRow``, which is never written down: passes over it, compiled once for all stages, give the
statistics that a rule reads. A stage that cuts gets the top of the ranking as a list, as far down as its decision needs
it, and leaves a ``candidate_list.CandidateList``. What rests on sums that are not the reference's to the bit, and is
too close to call, and every row that cannot be drawn, is left to the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.outputs import StepLogprobs
from nucleate.sampling import noise
from nucleate.sampling.backends import reference
from nucleate.sampling.backends.numba.composed.candidate_list import CandidateList, Floats, UndecidedRow, uniform
from nucleate.sampling.backends.numba.composed.edited_row import EditedRow, room
from nucleate.sampling.backends.numba.composed.full_row import FullRow
from nucleate.sampling.backends.numba.composed.pipeline_steps import PipelineStep, PipelineSteps, moved, program_of
from nucleate.sampling.history import History, HistoryView
from nucleate.sampling.stage import Pipeline, SampledToken, Stage, Tap

Tokens = FullRow | CandidateList


def run(
    logits_V: NDArray[Any], stages: Pipeline, seed: int, step: int, past: HistoryView = History()
) -> reference.RowResult:
    """Draw a token, report what a Tap asks for, and let the stages learn from it. As ``reference.run``."""
    try:
        with np.errstate(all="ignore"):
            return _run(logits_V, program_of(stages), seed, step, past)
    except UndecidedRow:
        return reference.run(logits_V, stages, seed, step, past)


def survivors(
    logits_V: NDArray[Any], stages: Pipeline, past: HistoryView = History(), u: float = 1.0
) -> reference.Survivors:
    """The tokens left by every stage but the draw, ranked, with their final scores. As ``reference.survivors``."""
    try:
        with np.errstate(all="ignore"):
            kept, _ = _walk(logits_V, program_of(stages).steps, past, u, whole=True)
            return kept.survivors()
    except UndecidedRow:
        return reference.survivors(logits_V, stages, past, u)


def probabilities(logits_V: NDArray[Any], stages: Pipeline, past: HistoryView = History()) -> Floats:
    """The distribution the draw draws from, float64 [V], over all coins. As ``reference.probabilities``."""
    return reference.probabilities(logits_V, stages, past, survivors)


def report(logits_V: NDArray[Any], token: int, wanted: tuple[int, tuple[int, ...]]) -> StepLogprobs:
    """What a Tap at the beginning asks for, of a row from which a token was drawn."""
    with np.errstate(all="ignore"):
        return _whole(logits_V).report(token, wanted)


def _whole(logits_V: NDArray[Any]) -> FullRow:
    work = room(len(logits_V))
    work.start()
    return FullRow(EditedRow(work, work.plain(logits_V)))


def _run(
    logits_V: NDArray[Any], program: PipelineSteps, seed: int, step: int, past: HistoryView
) -> reference.RowResult:
    stages, steps = program.stages, program.steps
    if steps[-1].kind.shape != "Draw":
        raise UndecidedRow
    u = uniform(seed, step, noise.XTC) if program.flips else 1.0
    kept, spans = _walk(logits_V, steps, past, u, program.whole)
    token = kept.draw(steps[-1], seed, step)
    reported, after = None, list(stages)
    for i, (before, left) in spans.items():
        stage = stages[i]
        if isinstance(stage, Tap):
            reported = before.report(token, stage.request)
        if type(stage).update is not Stage.update:
            after[i] = stage.update(SampledToken(token, before.log_chance(token), left.log_chance(token)))
    return reference.RowResult(token, reported, moved(program, tuple(after)) if spans else stages)


def _walk(
    logits_V: NDArray[Any], steps: tuple[PipelineStep, ...], past: HistoryView, u: float, whole: bool
) -> tuple[Tokens, dict[int, tuple[Tokens, Tokens]]]:
    """The tokens left by all stages; and, by place, those before and after the stages that watch the draw.

    whole: somebody asks for the mass before the first cut.
    """
    kept: Tokens = _whole(logits_V)
    spans = {}
    for i, step in enumerate(steps):
        if step.idle:
            continue
        before = kept
        if step.greedy:
            kept = kept.first(kept.uncut if whole else kept.whole)
        else:
            kept = _applied(kept, step, past, u, whole, len(logits_V))
        if step.watches:
            spans[i] = before, kept
    return kept, spans


def _applied(kept: Tokens, step: PipelineStep, past: HistoryView, u: float, whole: bool, size: int) -> Tokens:
    """The tokens left by one stage."""
    shape = step.kind.shape
    if shape in ("Draw", "Tap"):
        return kept
    if shape == "Shift":
        return kept.shift(step, past, size)
    if shape == "Scale":
        return kept.scale(step)
    before = kept.uncut if whole else kept.whole
    if shape == "Ceiling" and u >= step.stage.act_probability:
        return kept.with_whole(before)
    made: Tokens = getattr(kept, shape.lower())(step, before)
    return made
