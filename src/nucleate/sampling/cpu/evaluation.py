"""Runs any pipeline on the CPU. Returns the same tokens as ``reference.run``.

NumPy evaluates the rules of stages on the few tokens that matter; nothing is compiled per stage. A row starts as a
lazy ``full_row.FullRow``: kernels compute the statistics that a rule reads in passes over the row. A truncation stage
gets the top of the ranking as a list, as long as its decision needs, and returns a ``candidate_list.CandidateList``.
Invalid rows, and decisions closer than the error of the kernels' sums, are left to the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.outputs import StepLogprobs
from nucleate.sampling import noise, reference
from nucleate.sampling.cpu.candidate_list import CandidateList, UndecidedRow, uniform
from nucleate.sampling.cpu.edited_row import EditedRow, thread_workspace
from nucleate.sampling.cpu.full_row import FullRow
from nucleate.sampling.history import History, HistoryView
from nucleate.sampling.rules import PipelineStep, PipelineSteps, steps_of, updated_stages
from nucleate.sampling.stage import Pipeline, SampledToken, Stage, Tap

Tokens = FullRow | CandidateList


class ObservedToken(SampledToken):
    """A sampled token whose log-probabilities are computed when a rule reads them: the sum of a row takes a pass."""

    _kept: tuple[Tokens, Tokens]

    @classmethod
    def between(cls, token: int, before: Tokens, after: Tokens) -> ObservedToken:
        """The token, with the tokens before and after a stage."""
        observed = cls(token, np.nan, np.nan)
        observed._kept = before, after
        return observed

    @property
    def logprob_before(self) -> float:
        return self._kept[0].logprob(self.id)

    @property
    def logprob_after(self) -> float:
        return self._kept[1].logprob(self.id)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.id, self.logprob_before, self.logprob_after))

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]


def run(
    logits_V: NDArray[Any], stages: Pipeline, seed: int, step: int, past: HistoryView = History()
) -> reference.RowResult:
    """Sample a token, report logprobs, and update stateful stages. As ``reference.run``."""
    try:
        with np.errstate(all="ignore"):
            return _run(logits_V, steps_of(stages), seed, step, past)
    except UndecidedRow:
        return reference.run(logits_V, stages, seed, step, past)


def survivors(
    logits_V: NDArray[Any], stages: Pipeline, past: HistoryView = History(), u: float = 1.0
) -> reference.Survivors:
    """The tokens that survive all stages except the draw, ranked. As ``reference.survivors``."""
    try:
        with np.errstate(all="ignore"):
            kept, _ = _apply_stages(logits_V, steps_of(stages).steps, past, u, needs_total=True)
            return kept.survivors()
    except UndecidedRow:
        return reference.survivors(logits_V, stages, past, u)


def probabilities(logits_V: NDArray[Any], stages: Pipeline, past: HistoryView = History()) -> reference.Floats:
    """The distribution that the draw samples from, float64 [V]. As ``reference.probabilities``."""
    return reference.probabilities(logits_V, stages, past, survivors)


def step_logprobs(logits_V: NDArray[Any], token: int, request: tuple[int, tuple[int, ...]]) -> StepLogprobs:
    """The logprobs of a sampled token for a Tap before all other stages. request: ``Tap.request``."""
    with np.errstate(all="ignore"):
        return _full_row(logits_V).step_logprobs(token, request)


def _full_row(logits_V: NDArray[Any]) -> FullRow:
    work = thread_workspace(len(logits_V))
    work.reset()
    return FullRow(EditedRow(work, work.as_float32(logits_V)))


def _run(
    logits_V: NDArray[Any], pipeline: PipelineSteps, seed: int, step: int, past: HistoryView
) -> reference.RowResult:
    stages, steps = pipeline.stages, pipeline.steps
    if steps[-1].kind.shape != "Draw":
        raise UndecidedRow
    u = uniform(seed, step, noise.XTC) if pipeline.has_ceiling else 1.0
    kept, observed = _apply_stages(logits_V, steps, past, u, pipeline.needs_total)
    token = kept.draw(steps[-1], *reference.noise_of(stages, past, seed, step))
    logprobs, updated = None, list(stages)
    for i, (before, after) in observed.items():
        stage = stages[i]
        if isinstance(stage, Tap):
            logprobs = before.step_logprobs(token, stage.request)
        if type(stage).update is not Stage.update:
            updated[i] = stage.update(ObservedToken.between(token, before, after))
    return reference.RowResult(token, logprobs, updated_stages(pipeline, tuple(updated)) if observed else stages)


def _apply_stages(
    logits_V: NDArray[Any], steps: tuple[PipelineStep, ...], past: HistoryView, u: float, needs_total: bool
) -> tuple[Tokens, dict[int, tuple[Tokens, Tokens]]]:
    """The surviving tokens; and, by index, the tokens before and after each stage that observes the sampled token."""
    kept: Tokens = _full_row(logits_V)
    observed = {}
    for i, step in enumerate(steps):
        if step.is_neutral:
            continue
        before = kept
        if step.greedy:
            kept = kept.first_token(kept.total_mass if needs_total else kept.total)
        else:
            kept = _apply_stage(kept, step, past, u, needs_total, len(logits_V))
        if step.observes_token:
            observed[i] = before, kept
    return kept, observed


def _apply_stage(kept: Tokens, step: PipelineStep, past: HistoryView, u: float, needs_total: bool, size: int) -> Tokens:
    """The tokens that survive one stage."""
    shape = step.kind.shape
    if shape in ("Draw", "Tap"):
        return kept
    if shape == "Shift":
        return kept.shift(step, past, size)
    if shape == "Transform":
        return kept.transform(step, past)
    if shape == "Scale":
        return kept.scale(step)
    before = kept.total_mass if needs_total else kept.total
    if shape == "Ceiling" and u >= step.stage.act_probability:
        return kept.with_total(before)
    result: Tokens = getattr(kept, shape.lower())(step, before)
    return result
