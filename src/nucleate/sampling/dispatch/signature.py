"""Pipeline signatures: the part of a pipeline that rows of a batch share, and the numbers of each row.

A signature is read from the rules of the stages, or states why tensors cannot run them. Imports no torch.
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
from nucleate.sampling.dispatch.rules import LARGEST, LINE, NUMBERS, RuleInputs, StageStandIn, TracedNumber, rules_of
from nucleate.sampling.stage import DrawnToken, Pipeline, RowStats, Stage, shape_of
from nucleate.sampling.stages.selection.greedy import Greedy
from nucleate.sampling.stages.selection.gumbel import Gumbel
from nucleate.sampling.stages.temperature.temperature import Temperature
from nucleate.sampling.stages.truncation.min_p import MinP
from nucleate.sampling.stages.truncation.top_k import TopK
from nucleate.sampling.stages.truncation.top_n_sigma import TopNSigma
from nucleate.sampling.stages.truncation.top_p import TopP

CHAIN: Pipeline = (Temperature(0.5), TopNSigma(1.0), TopK(5), MinP(0.5), TopP(0.5), MinP(0.5), Temperature(0.5))
"""The stages of the fused pipeline, in the order of its parameters, see ``chained``."""
UNUSED = 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0
"""The parameters of a fused pipeline without effect,"""
NEUTRAL = 1.0, 1e30, 2.0**62, 0.0, float("inf"), 0.0, 1.0
"""and the values with which each stage keeps all tokens, for rows that do not use it."""
GREEDY = *UNUSED[:2], 1.0, *UNUSED[3:]


class RuleSignature(NamedTuple):
    """A rule of a stage."""

    name: str
    row: frozenset[str]  #: which statistics it reads
    ones: bool  #: it returns 1 for every score
    sums: bool  #: it returns exp(x - row.top)
    straight: bool  #: linear and increasing in x; a Scale also maps the maximum to 0 and reads no other statistics
    low: bool  #: returns a threshold that is not above the maximum, and reads no other statistics


class StageSignature(NamedTuple):
    """A stage of a signature. Its numbers belong to each row."""

    kind: type[Stage]
    shape: str
    rules: tuple[RuleSignature, ...]
    greedy: bool  #: it keeps only the first token
    ties: bool  #: see ``Prefix.ties``
    switches: tuple[tuple[str, Any], ...]  #: attributes that are true, false or none
    numbers: tuple[str, ...]  #: the others that its rules read
    learns: tuple[str, ...]  #: those that ``after`` changes,
    hears: frozenset[str] = frozenset()  #: and which of "before" and "after" of ``DrawnToken`` it reads

    @property
    def width(self) -> int:
        return len(self.numbers)


class PipelineSignature(NamedTuple):
    """A signature, with the numbers of one row."""

    steps: tuple[StageSignature, ...]  #: the last one is a Draw
    numbers: tuple[float, ...]  #: of all steps, in their order
    spared: tuple[tuple[int, ...], ...] = ()  #: of each Ceiling
    masked: bool = False  #: the bitmask of a call comes before a Tap that is the first step
    wanted: tuple[int, tuple[int, ...]] | None = None  #: of the Tap among the steps

    @property
    def learns(self) -> bool:
        """Whether some numbers change after each token (stateful stages)."""
        return any(step.learns for step in self.steps)

    def numbers_of(self, stages: Pipeline) -> tuple[float, ...]:
        """The numbers of stages with this signature, which are the last ones of a pipeline."""
        last = zip(stages[-len(self.steps) :], self.steps, strict=True)
        return tuple(float(getattr(stage, name)) for stage, step in last for name in step.numbers)


def staged_of(stages: Pipeline, masked: bool = False) -> PipelineSignature | str:
    """The signature of stages without Shifts; or why a device cannot run them."""
    steps: list[StageSignature] = []
    for stage in stages:
        step = _step(stage)
        if isinstance(step, str):
            return step
        steps.append(step)
    numbers = [getattr(stage, name) for stage, step in zip(stages, steps, strict=True) for name in step.numbers]
    if any(isinstance(one, int) and abs(one) > LARGEST for one in numbers):
        return "one of its integers is too large"
    named = [stage for stage, step in zip(stages, steps, strict=True) if step.shape in ("Ceiling", "Tap")]
    return PipelineSignature(
        tuple(steps),
        tuple(map(float, numbers)),
        tuple(stage.spared for stage in named if hasattr(stage, "spared")),
        masked,
        next((stage.wanted for stage in named if hasattr(stage, "wanted")), None),
    )


def chained(rows: Sequence[Sequence[float]]) -> list[PipelineSignature]:
    """Rows of the fused pipeline with one common signature: all stages that any row uses. rows: FusedParams."""
    rows = [GREEDY if row[0] == 0 or row[2] == 1 else row for row in rows]
    if all(row == GREEDY for row in rows):
        return [PipelineSignature((_stepped(Greedy()),), ())] * len(rows)
    used = [i for i, unused in enumerate(UNUSED) if any(row[i] != unused for row in rows)]
    steps = tuple(_stepped(stage) for stage in (*(CHAIN[i] for i in used), Gumbel(0)))
    return [
        PipelineSignature(steps, tuple(row[i] if row[i] != UNUSED[i] else NEUTRAL[i] for i in used)) for row in rows
    ]


def _stepped(stage: Stage) -> StageSignature:
    step = _step(stage)
    assert not isinstance(step, str), step  # noqa: S101  # a stage of the chain
    return step


def moved(stages: Pipeline, steps: tuple[StageSignature, ...], numbers: list[float]) -> Pipeline:
    """The stages of a row with their updated state. stages: the last ones are those of the steps."""
    place, found = 0, list(stages)
    for i, step in enumerate(steps, len(stages) - len(steps)):
        own = dict(zip(step.numbers, numbers[place : place + step.width], strict=True))
        place += step.width
        if step.learns and any(getattr(found[i], name) != own[name] for name in step.learns):
            found[i] = dataclasses.replace(found[i], **{name: own[name] for name in step.learns})  # type: ignore[type-var]
    return tuple(found)


def _step(stage: Stage) -> StageSignature | str:
    kind, shape = type(stage), shape_of(stage)
    if shape == "Shift":
        return f"{stage!r} comes after a stage that looks at the whole row"
    learns = _learned(stage) if kind.after is not Stage.after and not stage.neutral else ((), (), frozenset())
    if isinstance(learns, str):
        return learns
    names = dict.fromkeys(learns[0])
    rules = {} if stage.greedy and shape != "Draw" else rules_of(stage)
    for rule, inputs in rules.items():
        why = odd_name(getattr(kind, rule))
        if why or inputs.mine is None:
            return f"{kind.__name__}.{rule} {why or 'is not one expression of numbers'}"
        names.update(dict.fromkeys(inputs.mine))
    if shape == "Ceiling":
        names["chance"] = None
    values = {name: getattr(stage, name) for name in names}
    switches = tuple((name, value) for name, value in values.items() if isinstance(value, bool | None))
    numbers = tuple(name for name, value in values.items() if not isinstance(value, bool | None))
    bare = tuple(_rule(stage, shape, rule, inputs) for rule, inputs in rules.items())
    return StageSignature(
        kind, shape, bare, stage.greedy, bool(getattr(stage, "ties", False)), switches, numbers, *learns[1:]
    )


def _rule(stage: Stage, shape: str, name: str, inputs: RuleInputs) -> RuleSignature:
    row = RowStats(*(1.0,) * len(RowStats._fields))._replace(top=0.0)
    straight, alone = False, inputs.row <= {"top"}
    if (shape == "Draw" and name == "score") or (shape == "Scale" and alone and stage.monotone):  # type: ignore[attr-defined]
        other = 0.5 if shape == "Draw" else row  # a score takes a uniform number instead of a row
        if inputs.form == LINE:
            with np.errstate(all="ignore"):
                top, below = getattr(stage, name)(np.array([0.0, -1.0]), other).tolist()
            straight = below < top and (shape == "Draw" or top == 0)
    low = name == "floor" and alone and inputs.mine is not None and bool(stage.floor(row) <= 0)  # type: ignore[attr-defined]
    return RuleSignature(name, inputs.row, inputs.ones, inputs.sums, straight, low)


def _learned(stage: Stage) -> tuple[tuple[str, ...], tuple[str, ...], frozenset[str]] | str:
    """Which numbers ``after`` reads, or changes, which it changes, and what it hears; or why it cannot be bound."""
    function: Any = type(stage).after
    rule_name = f"{type(stage).__name__}.after"
    why = odd_name(function, dataclasses.replace)
    if why:
        return f"{rule_name} {why}"
    me = StageStandIn(stage)
    try:
        changes = function(me, DrawnToken(*[TracedNumber(frozenset((name,))) for name in DrawnToken._fields]))  # type: ignore[arg-type]
        read = {**dict.fromkeys(me._read), **dict.fromkeys(changes)}  # noqa: SLF001
    except Exception:  # noqa: BLE001  # a rule may do anything
        return f"{rule_name} is not one expression of numbers"
    fixed = any(getattr(type(stage), name) is not getattr(Stage, name) for name in ("greedy", "neutral"))
    if fixed or shape_of(stage) == "Ceiling" or any(type(getattr(stage, name)) is not float for name in changes):
        return f"{rule_name} may change more than numbers"
    heard: frozenset[str] = frozenset().union(*(one.row for one in changes.values() if isinstance(one, TracedNumber)))
    return tuple(read), tuple(changes), heard


def odd_name(function: Any, *known: Any) -> str:
    """Why a rule, or what it calls, cannot be bound, "" if it can: it names what is neither a number nor a rule."""
    for name, value in _named(function):
        if isinstance(value, NUMBERS) or value in (abs, *known) or getattr(value, "__module__", "") == maths.__name__:
            continue
        if not isinstance(value, types.FunctionType):
            return f"names {name}, which is no name of maths"
        if why := odd_name(value, *known, function):
            return why
    return ""


def _named(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function loads by a name that is not its own: (name, value)."""
    codes = [function.__code__]
    for code in codes:
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        for name in dict.fromkeys(one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"):
            yield name, function.__globals__.get(name, getattr(builtins, name, None))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell.cell_contents
