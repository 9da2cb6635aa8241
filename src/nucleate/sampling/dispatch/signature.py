"""Pipeline signatures: what rows must have in common to be sampled together as tensors, and the parameters of each row.

A signature is derived from the rules of the stages. If tensors cannot run a rule, the result is the reason, a string.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from nucleate.sampling import maths
from nucleate.sampling.dispatch.rules import (
    LINEAR,
    MAX_INTEGER,
    NUMERIC_TYPES,
    RuleInputs,
    StageStandIn,
    TracedNumber,
    rules_of_stage,
)
from nucleate.sampling.min_keep import min_keep_of
from nucleate.sampling.stage import Pipeline, RowStats, SampledToken, Stage, shape_of
from nucleate.sampling.stages.selection.greedy import Greedy
from nucleate.sampling.stages.selection.gumbel import Gumbel
from nucleate.sampling.stages.temperature.temperature import Temperature
from nucleate.sampling.stages.truncation.min_p import MinP
from nucleate.sampling.stages.truncation.top_k import TopK
from nucleate.sampling.stages.truncation.top_n_sigma import TopNSigma
from nucleate.sampling.stages.truncation.top_p import TopP

FUSED_STAGES: Pipeline = (Temperature(0.5), TopNSigma(1.0), TopK(5), MinP(0.5), TopP(0.5), MinP(0.5), Temperature(0.5))
"""One stage for each field of FusedParams, in order."""
NO_EFFECT = 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0
"""The FusedParams of stages that a row does not have."""
KEEP_ALL = 1.0, 1e30, 2.0**62, 0.0, float("inf"), 0.0, 1.0
"""Parameters with which each stage keeps all tokens: for rows without a stage that other rows of the batch have."""
GREEDY_PARAMS = *NO_EFFECT[:2], 1.0, *NO_EFFECT[3:]


class RuleSignature(NamedTuple):
    """A rule of a stage, and what backends may assume about it."""

    name: str
    row: frozenset[str]  #: the row statistics that it reads
    is_one: bool  #: it returns 1 for every score
    is_softmax_weight: bool  #: it returns exp(x - row.top)
    is_linear: bool  #: it is linear and increasing in x; a Scale also maps the maximum to 0 and reads only ``top``
    below_top: bool  #: it returns a threshold that is not above the maximum score, and reads only ``top``


class StageSignature(NamedTuple):
    """The part of a stage that rows of a batch share. The values of its numeric parameters differ per row."""

    kind: type[Stage]
    shape: str
    rules: tuple[RuleSignature, ...]
    greedy: bool  #: see ``Stage.greedy``
    ties: bool  #: see ``Prefix.ties``
    switches: tuple[tuple[str, Any], ...]  #: attributes that are bool or None, with their values
    param_names: tuple[str, ...]  #: the numeric attributes that its rules read
    state_names: tuple[str, ...]  #: those of them that ``Stage.update`` changes
    logprobs_read: frozenset[str] = frozenset()  #: the fields of SampledToken that ``Stage.update`` reads

    @property
    def num_params(self) -> int:
        return len(self.param_names)


class PipelineSignature(NamedTuple):
    """The signature of a pipeline, with the parameters of one row."""

    signatures: tuple[StageSignature, ...]  #: one per stage; the last one is a Draw
    params: tuple[float, ...]  #: the numeric parameters of all stages, in order
    exempt_ids: tuple[tuple[int, ...], ...] = ()  #: of each Ceiling
    mask_before_tap: bool = False  #: whether a Tap that is the first stage reports the masked distribution
    request: tuple[int, tuple[int, ...]] | None = None  #: see ``Tap.request``; None without a Tap

    @property
    def stateful(self) -> bool:
        """Whether some stage has a state."""
        return any(signature.state_names for signature in self.signatures)

    def params_of(self, stages: Pipeline) -> tuple[float, ...]:
        """The parameters of the last stages of a pipeline, which have this signature."""
        last = zip(stages[-len(self.signatures) :], self.signatures, strict=True)
        return tuple(float(getattr(stage, name)) for stage, signature in last for name in signature.param_names)


def pipeline_signature(stages: Pipeline, mask_before_tap: bool = False) -> PipelineSignature | str:
    """The signature of stages without Shifts; or the reason why tensors cannot run them."""
    signatures: list[StageSignature] = []
    for stage in stages:
        signature = _stage_signature(stage)
        if isinstance(signature, str):
            return signature
        signatures.append(signature)
    params = [
        getattr(stage, name)
        for stage, signature in zip(stages, signatures, strict=True)
        for name in signature.param_names
    ]
    if any(isinstance(one, int) and abs(one) > MAX_INTEGER for one in params):
        return "one of its integers is too large"
    named = [
        stage for stage, signature in zip(stages, signatures, strict=True) if signature.shape in ("Ceiling", "Tap")
    ]
    return PipelineSignature(
        tuple(signatures),
        tuple(map(float, params)),
        tuple(stage.exempt_ids for stage in named if hasattr(stage, "exempt_ids")),
        mask_before_tap,
        next((stage.request for stage in named if hasattr(stage, "request")), None),
    )


def fused_signatures(rows: Sequence[Sequence[float]]) -> list[PipelineSignature]:
    """Signatures for rows of fused pipelines, equal but for the parameters: with all stages that any row uses.

    rows: FusedParams of each.
    """
    rows = [GREEDY_PARAMS if row[0] == 0 or row[2] == 1 else row for row in rows]
    if all(row == GREEDY_PARAMS for row in rows):
        return [PipelineSignature((_fused_stage_signature(Greedy()),), ())] * len(rows)
    used = [i for i, unused in enumerate(NO_EFFECT) if any(row[i] != unused for row in rows)]
    signatures = tuple(_fused_stage_signature(stage) for stage in (*(FUSED_STAGES[i] for i in used), Gumbel(0)))
    return [
        PipelineSignature(signatures, tuple(row[i] if row[i] != NO_EFFECT[i] else KEEP_ALL[i] for i in used))
        for row in rows
    ]


def _fused_stage_signature(stage: Stage) -> StageSignature:
    signature = _stage_signature(stage)
    assert not isinstance(signature, str), signature  # noqa: S101  # all fused stages are supported
    return signature


def with_state(stages: Pipeline, signatures: tuple[StageSignature, ...], params: list[float]) -> Pipeline:
    """The pipeline of a row with updated state. params: of the last stages, whose signatures are given."""
    position, found = 0, list(stages)
    for i, signature in enumerate(signatures, len(stages) - len(signatures)):
        own = dict(zip(signature.param_names, params[position : position + signature.num_params], strict=True))
        position += signature.num_params
        if any(getattr(found[i], name) != own[name] for name in signature.state_names):
            found[i] = dataclasses.replace(found[i], **{name: own[name] for name in signature.state_names})  # type: ignore[type-var]
    return tuple(found)


def _stage_signature(stage: Stage) -> StageSignature | str:
    kind, shape = type(stage), shape_of(stage)
    if shape == "Shift":
        return f"{stage!r} comes after a stage that uses the whole row"
    if shape == "Transform":
        return f"{stage!r} is computed on the CPU"
    state_inputs = (
        _state_inputs(stage) if kind.update is not Stage.update and not stage.neutral else ((), (), frozenset())
    )
    if isinstance(state_inputs, str):
        return state_inputs
    names = dict.fromkeys(state_inputs[0])
    rules = {} if stage.greedy and shape != "Draw" else rules_of_stage(stage)
    for rule, inputs in rules.items():
        why = unsupported_reason(getattr(kind, rule))
        if why or inputs.attributes is None:
            return f"{kind.__name__}.{rule} {why or 'is not one expression of numbers'}"
        names.update(dict.fromkeys(inputs.attributes))
    if shape == "Ceiling":
        names["act_probability"] = None
    if min_keep_of(stage) > 1:
        names["min_keep"] = None
    values = {name: getattr(stage, name) for name in names}
    switches = tuple((name, value) for name, value in values.items() if isinstance(value, bool | None))
    params = tuple(name for name, value in values.items() if not isinstance(value, bool | None))
    rule_signatures = tuple(_rule_signature(stage, shape, rule, inputs) for rule, inputs in rules.items())
    return StageSignature(
        kind,
        shape,
        rule_signatures,
        stage.greedy,
        bool(getattr(stage, "ties", False)),
        switches,
        params,
        *state_inputs[1:],
    )


def _rule_signature(stage: Stage, shape: str, name: str, inputs: RuleInputs) -> RuleSignature:
    row = RowStats(*(1.0,) * len(RowStats._fields))._replace(top=0.0)
    is_linear, alone = False, inputs.row <= {"top"}
    if (shape == "Draw" and name == "score") or (shape == "Scale" and alone and stage.monotone):  # type: ignore[attr-defined]
        second = 0.5 if shape == "Draw" else row  # the second argument of ``score`` is a uniform number
        if inputs.form == LINEAR:
            with np.errstate(all="ignore"):
                top, below = getattr(stage, name)(np.array([0.0, -1.0]), second).tolist()
            is_linear = below < top and (shape == "Draw" or top == 0)
    below_top = name == "floor" and alone and inputs.attributes is not None and bool(stage.floor(row) <= 0)  # type: ignore[attr-defined]
    return RuleSignature(name, inputs.row, inputs.is_one, inputs.is_softmax_weight, is_linear, below_top)


def _state_inputs(stage: Stage) -> tuple[tuple[str, ...], tuple[str, ...], frozenset[str]] | str:
    """The attributes that ``Stage.update`` reads or changes, those that it changes, and the token fields it reads.

    Or the reason why tensors cannot run it.
    """
    function: Any = type(stage).update
    rule_name = f"{type(stage).__name__}.update"
    why = unsupported_reason(function, dataclasses.replace)
    if why:
        return f"{rule_name} {why}"
    stand_in = StageStandIn(stage)
    try:
        changes = function(stand_in, SampledToken(*[TracedNumber(frozenset((name,))) for name in SampledToken._fields]))  # type: ignore[arg-type]
        read = {**dict.fromkeys(stand_in._attributes_read), **dict.fromkeys(changes)}  # noqa: SLF001
    except Exception:  # noqa: BLE001  # a rule may do anything
        return f"{rule_name} is not one expression of numbers"
    fixed = any(getattr(type(stage), name) is not getattr(Stage, name) for name in ("greedy", "neutral"))
    if fixed or shape_of(stage) == "Ceiling" or any(type(getattr(stage, name)) is not float for name in changes):
        return f"{rule_name} may change more than numbers"
    logprobs_read: frozenset[str] = frozenset().union(
        *(one.row for one in changes.values() if isinstance(one, TracedNumber))
    )
    return tuple(read), tuple(changes), logprobs_read


def unsupported_reason(function: Any, *known: Any) -> str:
    """Why tensors cannot run a rule; "" if they can. The rule may use numbers, ``maths`` and other rules."""
    for name, value in _global_names(function):
        if (
            isinstance(value, NUMERIC_TYPES)
            or value in (abs, *known)
            or getattr(value, "__module__", "") == maths.__name__
        ):
            continue
        if not isinstance(value, types.FunctionType):
            return f"names {name}, which is not in nucleate.sampling.maths"
        if why := unsupported_reason(value, *known, function):
            return why
    return ""


def _global_names(function: Any) -> Iterator[tuple[str, Any]]:
    """The global and closure names that a function loads: (name, value)."""
    codes = [function.__code__]
    for code in codes:
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        for name in dict.fromkeys(one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"):
            yield name, function.__globals__.get(name, getattr(builtins, name, None))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell.cell_contents
