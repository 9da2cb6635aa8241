"""Traces the rules of stages: which row statistics and parameters a rule reads, and whether it is linear in the score.

A rule is called once with stand-ins for numbers that record the operations. This needs no backend and no compiler. The
properties of a pipeline's stages that follow from it are computed once and cached (``steps_of``).
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from nucleate.sampling.maths import INFINITY, exp
from nucleate.sampling.stage import Pipeline, Prefix, RowStats, Shift, Stage, Tap, TokenInfo, min_keep_of, shape_of

NUMERIC_TYPES = (int, float, np.integer, np.floating, types.NoneType)

MAX_INTEGER = 2**62
"""The largest integer parameter that kernels and tensors accept: it fits int64 with room for arithmetic."""

RULES = {"Scale": ("apply",), "Floor": ("floor",), "Prefix": ("weight", "target", "order"), "Ceiling": ("ceiling",)}
"""The rules of each shape that receive the row statistics."""

DRAW_RULES = {"none": ("score",), "each": ("score",), "one": ("weight", "target")}
"""The rules of a Draw by its ``uniforms``."""

SCORE_RULES = {"apply", "weight", "order", "score"}
"""The rules whose first argument is the scores."""


class RuleInputs(NamedTuple):
    """What a rule reads, and how its result depends on the score."""

    row: frozenset[str]  #: names of row statistics
    attributes: tuple[str, ...] | None  #: names of the stage's numeric attributes; None if they cannot be determined
    is_one: bool  #: the rule returns 1 for every score
    form: str  #: see ``TracedNumber``
    is_softmax_weight: bool = False  #: the rule is exp(x - row.top), so that the weights sum to ``row.mass``


POLYNOMIALS = CONSTANT, LINEAR, QUADRATIC, CUBIC = "constant", "linear", "quadratic", "cubic"
"""By degree."""
ABS_LINEAR, OTHER = "abs_linear", "other"
UNKNOWN_INPUTS = RuleInputs(frozenset(RowStats._fields), None, is_one=False, form=OTHER)


class TracedNumber(NDArrayOperatorsMixin):
    """Stand-in for a number: records the row statistics that a result depends on, and how it depends on the score x.

    form: CONSTANT, independent of x; LINEAR, QUADRATIC or CUBIC, a polynomial of x of at most that
    degree; ABS_LINEAR, the absolute value of a linear function; OTHER.
    """

    def __init__(self, row: frozenset[str] = frozenset(), form: str = CONSTANT, *, is_one: bool = False) -> None:
        self.row, self.form, self.is_one = row, form, is_one

    def __array_ufunc__(self, ufunc: Any, method: str, *arguments: Any, **others: Any) -> TracedNumber:
        traces = [one for one in arguments if isinstance(one, TracedNumber)]
        row, forms = frozenset().union(*(one.row for one in traces)), {one.form for one in traces}
        if forms <= {CONSTANT}:
            return TracedNumber(row)
        form = OTHER
        if method == "__call__" and not others and forms <= {*POLYNOMIALS}:
            degrees = [POLYNOMIALS.index(getattr(one, "form", CONSTANT)) for one in arguments]
            degree = len(POLYNOMIALS)
            if ufunc in (np.add, np.subtract, np.negative, np.positive):
                degree = max(degrees)
            elif ufunc is np.multiply or (ufunc is np.divide and degrees[1] == 0):
                degree = sum(degrees)
            elif ufunc is np.absolute and degrees == [1]:
                form = ABS_LINEAR
            form = POLYNOMIALS[degree] if degree < len(POLYNOMIALS) else form
        return TracedNumber(row, form)

    def __array_function__(self, function: Any, kinds: Any, arguments: Any, others: Any) -> Any:
        if function is np.ones_like:
            return TracedNumber(is_one=True)
        return self.__array_ufunc__(function, "", *arguments)

    def __getitem__(self, part: Any) -> TracedNumber:
        return TracedNumber(self.row, self.form if self.form == CONSTANT else OTHER)

    def __bool__(self) -> bool:
        raise TypeError("a rule that branches on a number has no single result")


class ReplaceRecorder:
    """Stand-in for a stage: ``dataclasses.replace`` returns a dict of the changes."""

    __dataclass_fields__: ClassVar[Mapping[str, Any]] = {}

    def __new__(cls, *arguments: Any, **changes: Any) -> Any:
        return super().__new__(cls) if arguments else changes


class StageStandIn(ReplaceRecorder):
    """Stand-in for a stage: bool and None attributes keep their values, numbers become stand-ins."""

    def __init__(self, stage: Stage) -> None:
        self.__dict__.update(_stage=stage, _attributes_read={})

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stage, name)
        if not isinstance(value, NUMERIC_TYPES):
            raise TypeError(f"{name} is not a number")
        self._attributes_read[name] = True
        return value if name in self._stage.parameters and isinstance(value, bool | None) else TracedNumber()


_inputs: dict[Any, RuleInputs] = {}
_switches: dict[type[Stage], tuple[str, ...]] = {}


def rule_settings(stage: Stage) -> tuple[Any, ...]:
    """What determines the inputs of the rules of a stage: its type, bool attributes, and which numbers are None."""
    kind = type(stage)
    if kind not in _switches:
        _switches[kind] = tuple(name for name, one in kind.parameters.items() if one.kind == "bool" or one.optional)
    values = [getattr(stage, name) for name in _switches[kind]]
    return kind, *[value if value is None or value is True or value is False else 0 for value in values]


def rule_inputs(stage: Stage, rule: str) -> RuleInputs:
    """The inputs of one rule of a stage. Cached."""
    key = (rule, *rule_settings(stage))
    found = _inputs.get(key)
    if found is None:
        found = _inputs[key] = _trace_rule(stage, rule)
    return found


def rules_of_stage(stage: Any) -> dict[str, RuleInputs]:
    """The inputs of all rules of a stage, by name; ``order`` only if the stage overrides it."""
    shape = shape_of(stage)
    names = DRAW_RULES[stage.uniforms] if shape == "Draw" else RULES.get(shape, ())
    plain = shape == "Prefix" and type(stage).order is Prefix.order
    return {name: rule_inputs(stage, name) for name in names if not (plain and name == "order")}


def _trace_rule(stage: Stage, rule: str) -> RuleInputs:
    function = getattr(type(stage), rule)
    stand_in, row = StageStandIn(stage), RowStats(*[TracedNumber(frozenset((name,))) for name in RowStats._fields])
    known = {"row": row, "token": TokenInfo(*[TracedNumber() for _ in TokenInfo._fields])}
    names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    arguments = [known.get(name, TracedNumber()) for name in names]
    if rule in SCORE_RULES:
        arguments[0] = TracedNumber(form=LINEAR)
    try:
        result = function(stand_in, *arguments)
    except Exception:  # noqa: BLE001  # a rule may do anything
        return UNKNOWN_INPUTS
    result = result if isinstance(result, TracedNumber) else TracedNumber()  # a rule may return a number
    is_softmax_weight = rule == "weight" and _same_code(function, _softmax_weight)
    return RuleInputs(result.row, tuple(stand_in._attributes_read), result.is_one, result.form, is_softmax_weight)  # noqa: SLF001


def _same_code(rule: Any, other: Any) -> bool:
    """Whether two rules have the same code and the same globals."""
    code, expected = rule.__code__, other.__code__
    names = {name: value for name, value in other.__globals__.items() if name in expected.co_names}
    return (
        (code.co_code, code.co_names, code.co_consts) == (expected.co_code, expected.co_names, expected.co_consts)
        and not rule.__closure__
        and all(name in rule.__globals__ and rule.__globals__[name] == value for name, value in names.items())
    )


def _softmax_weight(self: Any, x: Any, row: RowStats) -> Any:
    return exp(x - row.top)


def _add_listed_value(self: Any, x: Any, token: TokenInfo) -> Any:
    return x + token.listed


def _add_value(self: Any, x: Any, token: TokenInfo) -> Any:
    return x + token.value


def _ban(self: Any, x: Any, token: TokenInfo) -> Any:
    return x - INFINITY


def adds_listed_value(stage: Shift) -> bool:
    """Whether a Shift adds the values of its list to the scores."""
    return _same_code(type(stage).apply, _add_listed_value)


def adds_value(stage: Shift) -> bool:
    """Whether a Shift adds ``Shift.values`` to the scores."""
    return _same_code(type(stage).apply, _add_value)


def bans_tokens(stage: Shift) -> bool:
    """Whether a Shift bans all tokens that it touches."""
    return _same_code(type(stage).apply, _ban)


CACHED_PIPELINES = 256
"""Maximum number of cached pipelines."""
EXACT_STATISTICS = {"top", "n", "sorted_scores"}


class StageKind(NamedTuple):
    """Properties of a stage's rules, shared by stages with equal ``rule_settings``."""

    shape: str  #: see ``shape_of``
    names: frozenset[str]  #: row statistics that the rules read
    inexact: bool  #: the rules read statistics that are sums of scores
    form: str  #: of ``Scale.apply`` or ``Prefix.order``, see ``TracedNumber``
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
