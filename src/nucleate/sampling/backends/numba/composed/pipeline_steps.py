"""Properties of a pipeline that every step needs, computed once."""

from __future__ import annotations

from typing import Any, NamedTuple

from nucleate.sampling.dispatch.rules import rules_of, settings
from nucleate.sampling.stage import Pipeline, Stage, Tap, shape_of

CACHED_PIPELINES = 256
"""Pipelines that are remembered."""


class StageKind(NamedTuple):
    """What the rules of a stage read. Stages of equal ``settings`` share it."""

    shape: str  #: see ``shape_of``
    names: frozenset[str]  #: row statistics that its rules read
    inexact: bool  #: these are more than the top, so that they come from sums
    form: str  #: of the ``apply`` of a Scale, or the ``order`` of a Prefix, see ``rules.form``
    has_order: bool  #: a Prefix with an order of its own
    unit_weights: bool  #: a Prefix whose weights are 1
    softmax_weights: bool  #: its weights are exp(x - row.top), which sum to the mass
    reads_total: bool  #: a rule reads the mass before the first cut


class PipelineStep(NamedTuple):
    """A stage, and what it is."""

    stage: Any
    kind: StageKind
    is_neutral: bool  #: it does nothing
    greedy: bool
    observes_token: bool  #: it is told of the token that is drawn


class PipelineSteps(NamedTuple):
    """A pipeline, step by step."""

    stages: Pipeline
    steps: tuple[PipelineStep, ...]
    needs_total: bool  #: a rule reads the mass before the first cut
    has_ceiling: bool  #: there is a Ceiling


_pipelines: dict[int, PipelineSteps] = {}
_kinds: dict[Any, StageKind] = {}


def steps_of(stages: Pipeline) -> PipelineSteps:
    """Looked up by identity: a batch passes the same tuple in each step."""
    entry = _pipelines.get(id(stages))
    if entry is None or entry.stages is not stages:
        entry = _cached(stages, tuple(map(_step, stages)))
    return entry


def updated_stages(pipeline: PipelineSteps, stages: Pipeline) -> Pipeline:
    """The same pipeline after some of its stages have learned: of these alone anything is found out again."""
    pairs = zip(stages, pipeline.steps, strict=True)
    return _cached(stages, tuple(step if step.stage is stage else _step(stage) for stage, step in pairs)).stages


def _cached(stages: Pipeline, steps: tuple[PipelineStep, ...]) -> PipelineSteps:
    needs_total, has_ceiling = (
        any(step.kind.reads_total for step in steps),
        any(step.kind.shape == "Ceiling" for step in steps),
    )
    if len(_pipelines) >= CACHED_PIPELINES:
        _pipelines.clear()
    entry = _pipelines[id(stages)] = PipelineSteps(stages, steps, needs_total, has_ceiling)
    return entry


def _step(stage: Stage) -> PipelineStep:
    neutral, greedy = stage.neutral, stage.greedy
    observes_token = isinstance(stage, Tap) or type(stage).after is not Stage.after
    return PipelineStep(stage, _kind(stage), neutral and not greedy, greedy, observes_token and not neutral)


def _kind(stage: Any) -> StageKind:
    key = settings(stage)
    if key not in _kinds:
        rules, shape = rules_of(stage), shape_of(stage)
        names = frozenset[str]().union(*(rule.row for rule in rules.values()))
        shape_rule = rules.get("order") or rules.get("apply")
        weight = rules.get("weight")
        _kinds[key] = StageKind(
            shape, names, bool(names - {"top"}), shape_rule.form if shape_rule else "", "order" in rules,
            bool(weight and weight.ones), bool(weight and weight.sums), "whole" in names,
        )  # fmt: skip
    return _kinds[key]
