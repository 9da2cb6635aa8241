"""Pipelines that run as one kernel: scales, cuts and a draw, whose rules can be compiled and leave nothing to be told.

A program is what that kernel, ``walk``, is given of a pipeline: for each step what it is, and where its rules are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.backends.cpu.staged.bounds import never_negative
from nucleate.backends.cpu.staged.entries import address, numbers
from nucleate.backends.cpu.staged.facts import Facts, Step
from nucleate.backends.cpu.staged.lines import form
from nucleate.backends.cpu.staged.room import Room
from nucleate.backends.cpu.staged.shortlist import counts
from nucleate.backends.cpu.staged.space import (
    BENT,
    COLUMNS,
    COUNTED,
    DRAW,
    EVERY,
    FLOOR,
    LONGEST,
    MASS,
    MODE,
    MOMENTS,
    ODD,
    ORDER,
    PREFIX,
    RULE,
    SCALE,
    SHAPE,
    SQUARE,
    STRICT,
    SUMMED,
    TARGET,
    TIES,
    TRIED,
    WANTS,
)
from nucleate.backends.cpu.staged.walk import walk
from nucleate.backends.rules import reads, sums_to_mass
from nucleate.core.stage import Prefix

MOST = 256
"""So many programs are remembered."""

RULES = {
    "Scale": (SCALE, {RULE: "apply"}),
    "Floor": (FLOOR, {RULE: "floor"}),
    "Prefix": (PREFIX, {RULE: "weight", ORDER: "order", TARGET: "target"}),
    "Draw": (DRAW, {RULE: "score"}),
}


class Program(NamedTuple):
    """A pipeline as the kernel is given it."""

    stages: Any
    at: int  #: the address of its steps; 0 if there is none
    length: int
    held: Any  #: what must stay where it is


_known: dict[int, Program] = {}


def straight(work: Room, row_V: NDArray[Any], facts: Facts, seed: int, step: int) -> int:
    """The token drawn from a row; ODD if it has to be run step by step."""
    program = _known.get(id(facts.stages))
    if program is None or program.stages is not facts.stages:
        program = _program(facts)
        if len(_known) >= MOST:
            _known.clear()
        _known[id(facts.stages)] = program
    if not program.at:
        return ODD
    return int(walk(row_V, program.at, program.length, work.control, np.uint64(seed), np.uint64(step)))


def _program(facts: Facts) -> Program:
    """The steps of a pipeline that do something."""
    steps = [step for step in facts.steps if not step.idle]
    table, held = np.zeros((len(steps), COLUMNS), np.int64), []
    if len(steps) > LONGEST or not all(map(_fits, steps)):
        return Program(facts.stages, 0, 0, None)
    for line, one in zip(table, steps, strict=True):
        given = _fill(line, one)
        if given is None:
            return Program(facts.stages, 0, 0, None)
        held.append(given)
    return Program(facts.stages, table.ctypes.data, len(steps), (table, held))


def _fits(step: Step) -> bool:
    """Whether the kernel knows what to do with a step."""
    stage = step.stage
    match step.shape:
        case "Scale":
            return bool(stage.monotone) and form(stage, "apply") == "line"
        case "Prefix":
            return type(stage).order is Prefix.order or form(stage, "order") == "bent"
        case "Draw":
            return bool(stage.uniforms == "each")
    return step.shape == "Floor"


def _fill(line: NDArray[np.int64], step: Step) -> list[NDArray[np.float64]] | None:
    """Write a step down; what it refers to, or None if a rule cannot be compiled."""
    stage, held = step.stage, []
    asked: set[str] = set()
    shape, rules = RULES[step.shape]
    for column, rule in rules.items():
        if rule == "order" and type(stage).order is Prefix.order:
            continue
        at, given = address(stage, rule), numbers(stage, rule)
        if not at or given is None:
            return None
        held.append(np.array(given))
        line[column : column + 2] = at, held[-1].ctypes.data
        asked |= reads(stage, rule).row
    wants = MASS * bool(asked & {"mass", "entropy"}) | SQUARE * ("square" in asked)
    line[SHAPE], line[WANTS] = shape, wants | MOMENTS * bool(asked & {"n", "mean", "var"})
    if step.shape == "Draw":
        line[WANTS] |= MASS
    if step.shape == "Prefix":
        line[MODE], line[STRICT], line[TIES] = _mode(stage), not stage.reaches, bool(stage.ties)
        line[WANTS] |= MASS if line[MODE] & 7 == SUMMED else 0
    return held


def _mode(stage: Any) -> int:
    """Among which tokens a Prefix finds its own."""
    bent = type(stage).order is not Prefix.order
    if counts(stage):
        return COUNTED
    if sums_to_mass(stage):
        return SUMMED | (BENT if bent else 0)
    return TRIED if not bent and not stage.ties and never_negative(stage, "weight") else EVERY
