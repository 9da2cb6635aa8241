"""What a device is to run of a pipeline after its Shifts: its structure, which rows share, and a row's numbers.

Knows no stage and no torch: it reads the rules, and says why one cannot be bound.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import re
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from nucleate.backends.rules import LARGEST, NUMBERS, RULES, Self, Trace, reads
from nucleate.core import maths
from nucleate.core.maths import rebind
from nucleate.core.stage import Drawn, Pipeline, Prefix, Stage, shape_of

MATHS = {id(getattr(maths, name)): name for name in maths.NAMES if callable(getattr(maths, name))}
"""Names of functions that every backend has, by what they are."""

DRAWS = {"none": ("score",), "each": ("score",), "one": ("weight", "target")}
"""The rules of a Draw by its ``uniforms``."""

MOST_COLUMNS = 6
"""So many numbers of a stage a kernel reads."""

BUILTINS = {"abs": "absolute"}
"""What else a rule may name."""


class Rule(NamedTuple):
    """A rule of a stage."""

    name: str
    row: frozenset[str]  #: which statistics it reads
    ones: bool  #: it says 1 for every score


class Step(NamedTuple):
    """A stage as all rows of a structure have it. Its numbers are theirs."""

    kind: type[Stage]
    shape: str
    rules: tuple[Rule, ...]
    greedy: bool  #: it leaves the first token, whatever its rules say
    ties: bool  #: see ``Prefix.ties``
    switches: tuple[tuple[str, Any], ...]  #: attributes that are true, false or none
    numbers: tuple[str, ...]  #: the others that its rules read
    learns: tuple[str, ...]  #: those of them that ``after`` changes

    @property
    def columns(self) -> tuple[str, ...]:
        """Which attributes are columns: the numbers, then what is true or false, as 1 or 0."""
        return self.numbers + tuple(name for name, value in self.switches if value is not None)

    @property
    def width(self) -> int:
        return len(self.columns)


class Staged(NamedTuple):
    """A row of a structure."""

    steps: tuple[Step, ...]  #: the last one is a Draw
    numbers: tuple[float, ...]  #: the columns of all steps, in their order
    spared: tuple[tuple[int, ...], ...] = ()  #: of each Ceiling
    masked: bool = False  #: the bitmask of a call comes before a Tap that is the first step
    wanted: tuple[int, tuple[int, ...]] | None = None  #: of the Tap among the steps

    @property
    def learns(self) -> bool:
        """Whether some numbers change with each token."""
        return any(step.learns for step in self.steps)

    @property
    def no_kernel(self) -> str:
        """Why no kernel can be made of the structure; "" if nothing is known against it."""
        for step in self.steps:
            if any(value is None for _, value in step.switches):
                return f"a parameter of {step.kind.__name__} is none, and a kernel has only numbers"
            if step.width > MOST_COLUMNS:
                return f"{step.kind.__name__} has more than {MOST_COLUMNS} parameters"
        return ""

    def numbers_of(self, stages: Pipeline) -> tuple[float, ...]:
        """The numbers of stages of this structure, which come last among these."""
        last = zip(stages[-len(self.steps) :], self.steps, strict=True)
        return tuple(float(getattr(stage, name)) for stage, step in last for name in step.columns)


def staged_of(stages: Pipeline, masked: bool = False) -> Staged | str:
    """What a device is to run of stages without Shifts; or why it cannot."""
    steps: list[Step] = []
    for stage in stages:
        step = _step(stage)
        if isinstance(step, str):
            return step
        steps.append(step)
    numbers = [getattr(stage, name) for stage, step in zip(stages, steps, strict=True) for name in step.columns]
    if any(isinstance(one, int) and abs(one) > LARGEST for one in numbers):
        return "one of its integers is too large"
    named = [stage for stage, step in zip(stages, steps, strict=True) if step.shape in ("Ceiling", "Tap")]
    return Staged(
        tuple(steps),
        tuple(map(float, numbers)),
        tuple(stage.spared for stage in named if hasattr(stage, "spared")),
        masked,
        next((stage.wanted for stage in named if hasattr(stage, "wanted")), None),
    )


def moved(stages: Pipeline, steps: tuple[Step, ...], numbers: list[float]) -> Pipeline:
    """The stages of a row with what they have learned. stages: the last ones are those of the steps."""
    place, found = 0, list(stages)
    for i, step in enumerate(steps, len(stages) - len(steps)):
        own = dict(zip(step.columns, numbers[place : place + step.width], strict=True))
        place += step.width
        if step.learns and any(getattr(found[i], name) != own[name] for name in step.learns):
            found[i] = dataclasses.replace(found[i], **{name: own[name] for name in step.learns})  # type: ignore[type-var]
    return tuple(found)


def _step(stage: Stage) -> Step | str:
    kind, shape = type(stage), shape_of(stage)
    if shape == "Shift":
        return f"{stage!r} comes after a stage that looks at the whole row"
    learns = _learned(stage) if kind.after is not Stage.after and not stage.neutral else ((), ())
    if isinstance(learns, str):
        return learns
    names = dict.fromkeys(learns[0])
    rules = _rules(stage, shape)
    for rule in rules:
        why, asked = odd_name(getattr(kind, rule)), reads(stage, rule)
        if why or asked.mine is None:
            return f"{kind.__name__}.{rule} {why or 'is not one expression of numbers'}"
        names.update(dict.fromkeys(asked.mine))
    if shape == "Ceiling":
        names["chance"] = None
    values = {name: getattr(stage, name) for name in names}
    switches = tuple((name, value) for name, value in values.items() if isinstance(value, bool | None))
    numbers = tuple(name for name, value in values.items() if not isinstance(value, bool | None))
    bare = tuple(Rule(rule, reads(stage, rule).row, reads(stage, rule).ones) for rule in rules)
    return Step(kind, shape, bare, stage.greedy, bool(getattr(stage, "ties", False)), switches, numbers, learns[1])


def _rules(stage: Any, shape: str) -> tuple[str, ...]:
    """The rules of a stage that are run."""
    if shape == "Draw":
        return DRAWS[stage.uniforms]
    rules = () if stage.greedy else RULES.get(shape, ())
    plain = shape == "Prefix" and type(stage).order is Prefix.order
    return tuple(rule for rule in rules if not (plain and rule == "order"))


def _learned(stage: Stage) -> tuple[tuple[str, ...], tuple[str, ...]] | str:
    """Which numbers ``after`` reads, or changes, and which it changes; or why it cannot be bound."""
    function: Any = type(stage).after
    told = f"{type(stage).__name__}.after"
    why = odd_name(function, dataclasses.replace)
    if why:
        return f"{told} {why}"
    me = Self(stage)
    try:
        changes = following(function, {}, "traced")(me, Drawn(*[Trace() for _ in Drawn._fields]))  # type: ignore[arg-type]
        read = {**dict.fromkeys(me._read), **dict.fromkeys(changes)}  # noqa: SLF001
    except Exception:  # noqa: BLE001  # a rule may do anything
        return f"{told} is not one expression of numbers"
    fixed = any(getattr(type(stage), name) is not getattr(Stage, name) for name in ("greedy", "neutral"))
    if fixed or shape_of(stage) == "Ceiling" or any(type(getattr(stage, name)) is not float for name in changes):
        return f"{told} may change more than numbers"
    return tuple(read), tuple(changes)


def following(function: Any, names: dict[str, Any], tag: str) -> Any:
    """An ``after`` that gives the numbers that change, by name, instead of a stage."""
    known = {name: value for name, value in _named(function) if value is dataclasses.replace}
    return rebind(function, {**names, **dict.fromkeys(known, _changes)}, tag)


def _changes(me: Any, **changes: Any) -> dict[str, Any]:
    return changes


def odd_name(function: Any, *known: Any) -> str:
    """Why a rule, or what it calls, cannot be bound, "" if it can: it names what is neither a number nor a rule."""
    for name, value in _named(function):
        if id(value) in MATHS or isinstance(value, NUMBERS) or value in known:
            continue
        if isinstance(value, types.FunctionType):
            why = odd_name(value, *known, function)
            if why:
                return why
        elif BUILTINS.get(name) is None or value is not getattr(builtins, name):
            return f"names {name}, which is no name of maths"
    return ""


def _annotated(function: Any) -> Iterator[str]:
    """The names in the annotations of arguments."""
    for annotation in function.__annotations__.values():
        text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
        yield from re.findall(r"[A-Za-z_]\w*", text)


def _named(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function loads by a name that is not its own: (name, value)."""
    codes = [function.__code__]
    for code in codes:
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        for name in dict.fromkeys(one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"):
            yield name, function.__globals__.get(name, getattr(builtins, name, None))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell.cell_contents


def bound(function: Any, words: dict[str, Any], tag: str, made: Any = None, constant: Any = None) -> Any:
    """A rule, or what it calls, with other meanings of the names of maths.

    made, constant: what becomes of a function, and of a number that it names.
    """
    names = {"tl": words["tl"]} if "tl" in words else {}
    if constant is not None:  # the names in annotations are looked up too
        names |= dict.fromkeys(_annotated(function), constant(0))
    for name, value in _named(function):
        if id(value) in MATHS and callable(value):
            names[name] = words[MATHS[id(value)]]
        elif name in BUILTINS and value is getattr(builtins, name):
            names[name] = words[BUILTINS[name]]
        elif isinstance(value, types.FunctionType) and value is not dataclasses.replace:
            names[name] = bound(value, words, tag, made, constant)
        elif constant is not None and isinstance(value, NUMBERS):
            names[name] = constant(value)
    own = rebind(function, names, tag)
    return made(own) if made else own


__all__ = ["Staged", "Step", "bound", "following", "moved", "odd_name", "staged_of"]
