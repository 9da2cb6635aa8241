"""Properties of a pipeline that every step needs, computed once."""

from __future__ import annotations

from typing import Any, NamedTuple

from nucleate.sampling.dispatch.rules import rule_settings, rules_of_stage
from nucleate.sampling.stage import Pipeline, Stage, Tap, shape_of

MOST = 256
"""Pipelines that are remembered."""


class StageKind(NamedTuple):
    """What the rules of a stage read. Stages of equal ``rule_settings`` share it."""

    shape: str  #: see ``shape_of``
    names: frozenset[str]  #: row statistics that its rules read
    inexact: bool  #: these are more than the top, so that they come from sums
    form: str  #: of the ``apply`` of a Scale, or the ``order`` of a Prefix, see ``rules.TracedNumber``
    own_order: bool  #: a Prefix with an order of its own
    counts: bool  #: a Prefix whose weights are 1
    summed: bool  #: its weights are exp(x - row.top), which sum to the mass
    whole: bool  #: a rule reads the mass before the first cut


class PipelineStep(NamedTuple):
    """A stage, and what it is."""

    stage: Any
    kind: StageKind
    idle: bool  #: it does nothing
    greedy: bool
    watches: bool  #: it is told of the token that is drawn


class PipelineSteps(NamedTuple):
    """A pipeline, step by step."""

    stages: Pipeline
    steps: tuple[PipelineStep, ...]
    whole: bool  #: a rule reads the mass before the first cut
    flips: bool  #: there is a Ceiling


_programs: dict[int, PipelineSteps] = {}
_kinds: dict[Any, StageKind] = {}


def program_of(stages: Pipeline) -> PipelineSteps:
    """Looked up by identity: a batch passes the same tuple in each step."""
    found = _programs.get(id(stages))
    if found is None or found.stages is not stages:
        found = _remembered(stages, tuple(map(_step, stages)))
    return found


def moved(program: PipelineSteps, stages: Pipeline) -> Pipeline:
    """The same pipeline after some of its stages have learned: of these alone anything is found out again."""
    known = zip(stages, program.steps, strict=True)
    return _remembered(stages, tuple(step if step.stage is stage else _step(stage) for stage, step in known)).stages


def _remembered(stages: Pipeline, steps: tuple[PipelineStep, ...]) -> PipelineSteps:
    whole, flips = any(step.kind.whole for step in steps), any(step.kind.shape == "Ceiling" for step in steps)
    if len(_programs) >= MOST:
        _programs.clear()
    found = _programs[id(stages)] = PipelineSteps(stages, steps, whole, flips)
    return found


def _step(stage: Stage) -> PipelineStep:
    neutral, greedy = stage.neutral, stage.greedy
    watches = isinstance(stage, Tap) or type(stage).update is not Stage.update
    return PipelineStep(stage, _kind(stage), neutral and not greedy, greedy, watches and not neutral)


def _kind(stage: Any) -> StageKind:
    key = rule_settings(stage)
    if key not in _kinds:
        rules, shape = rules_of_stage(stage), shape_of(stage)
        names = frozenset[str]().union(*(rule.row for rule in rules.values()))
        shown = rules.get("order") or rules.get("apply")
        weight = rules.get("weight")
        _kinds[key] = StageKind(
            shape, names, bool(names - {"top"}), shown.form if shown else "", "order" in rules,
            bool(weight and weight.is_one), bool(weight and weight.is_softmax_weight), "full_mass" in names,
        )  # fmt: skip
    return _kinds[key]
