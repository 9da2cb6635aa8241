"""Properties of a pipeline's stages, computed once and cached."""

from __future__ import annotations

from typing import Any, NamedTuple

from nucleate.sampling.dispatch.rules import rule_settings, rules_of_stage
from nucleate.sampling.min_keep import min_keep_of
from nucleate.sampling.stage import Pipeline, Stage, Tap, shape_of

CACHED_PIPELINES = 256
"""Maximum number of cached pipelines."""
EXACT_STATISTICS = {"top", "n", "sorted_scores"}


class StageKind(NamedTuple):
    """Properties of a stage's rules, shared by stages with equal ``rule_settings``."""

    shape: str  #: see ``shape_of``
    names: frozenset[str]  #: row statistics that the rules read
    inexact: bool  #: the rules read statistics that are sums of scores
    form: str  #: of ``Scale.apply`` or ``Prefix.order``, see ``rules.form``
    has_order: bool  #: a Prefix with its own order
    unit_weights: bool  #: a Prefix whose weights are 1
    softmax_weights: bool  #: the weights are exp(x - row.top)
    reads_total: bool  #: a rule reads the mass before the first truncation
    sorted_count: int  #: see ``Stage``


class PipelineStep(NamedTuple):
    """A stage with its properties."""

    stage: Any
    kind: StageKind
    is_neutral: bool  #: has no effect
    greedy: bool
    observes_token: bool  #: a Tap, or a stateful stage
    min_keep: int  #: see ``min_keep_of``


class PipelineSteps(NamedTuple):
    """A pipeline with the properties of its stages."""

    stages: Pipeline
    steps: tuple[PipelineStep, ...]
    needs_total: bool  #: a rule reads the mass before the first truncation
    has_ceiling: bool


_pipelines: dict[int, PipelineSteps] = {}
_kinds: dict[Any, StageKind] = {}


def steps_of(stages: Pipeline) -> PipelineSteps:
    """The cached properties of a pipeline. Looked up by identity: a batch passes the same tuple in each step."""
    entry = _pipelines.get(id(stages))
    if entry is None or entry.stages is not stages:
        entry = _cached(stages, tuple(map(_step, stages)))
    return entry


def updated_stages(pipeline: PipelineSteps, stages: Pipeline) -> Pipeline:
    """Cache the pipeline with updated stages; recomputes the properties of the changed ones only."""
    pairs = zip(stages, pipeline.steps, strict=True)
    return _cached(stages, tuple(step if step.stage is stage else _step(stage) for stage, step in pairs)).stages


def _cached(stages: Pipeline, steps: tuple[PipelineStep, ...]) -> PipelineSteps:
    needs_total = any(step.kind.reads_total for step in steps)
    has_ceiling = any(step.kind.shape == "Ceiling" for step in steps)
    if len(_pipelines) >= CACHED_PIPELINES:
        _pipelines.clear()
    entry = _pipelines[id(stages)] = PipelineSteps(stages, steps, needs_total, has_ceiling)
    return entry


def _step(stage: Stage) -> PipelineStep:
    neutral, greedy = stage.neutral, stage.greedy
    observes_token = isinstance(stage, Tap) or type(stage).update is not Stage.update
    return PipelineStep(
        stage, _kind(stage), neutral and not greedy, greedy, observes_token and not neutral, min_keep_of(stage)
    )


def _kind(stage: Any) -> StageKind:
    key = rule_settings(stage)
    if key not in _kinds:
        rules, shape = rules_of_stage(stage), shape_of(stage)
        names = frozenset[str]().union(*(rule.row for rule in rules.values()))
        shape_rule = rules.get("order") or rules.get("apply")
        weight = rules.get("weight")
        _kinds[key] = StageKind(
            shape, names, bool(names - EXACT_STATISTICS), shape_rule.form if shape_rule else "", "order" in rules,
            bool(weight and weight.is_one), bool(weight and weight.is_softmax_weight), "full_mass" in names,
            stage.sorted_count,
        )  # fmt: skip
    return _kinds[key]
