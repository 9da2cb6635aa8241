"""One kernel per structure: the templates of its shapes, filled with its rules and folded into one function.

Refuses to know any stage. Functions find one another through their globals, and each binding has a name of its own,
because Triton names compiled functions by it; what is bound is part of the key of the cache as a digest.
"""

from __future__ import annotations

import hashlib
from collections import namedtuple
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, cast

import triton.language as tl

from nucleate.backends.cpu.staged.bind import digest
from nucleate.backends.cuda.special.compile import jit
from nucleate.backends.cuda.staged import draws, loads, program, shapes, tiles
from nucleate.backends.cuda.staged.kernel_words import WORDS
from nucleate.backends.cuda.staged.structure import Step, bound
from nucleate.core.maths import rebind

SHAPES: dict[str, Any] = {
    "Scale": shapes.scale,
    "Floor": shapes.cut_below,
    "Prefix": shapes.prefix,
    "Ceiling": shapes.beheaded,
    "Tap": shapes.tap,
}
STATISTICS = {
    "mass": tiles.MASS.value,
    "square": tiles.SQUARE.value,
    "entropy": tiles.CROSS.value,
    "mean": tiles.SUM.value,
    "var": tiles.VAR.value,
    "whole": tiles.WHOLE.value,
}


class Fused(NamedTuple):
    """A kernel, and what it needs."""

    kernel: Any
    digest: int
    based: bool  #: the scores as of the last time that the order was made anew,
    weighs: bool  #: weights,
    own: bool  #: keys of an order of a stage's own,
    dense: bool  #: scores by id,
    taps: bool  #: what a Tap is told,
    marks: int  #: and so many marks


@lru_cache(maxsize=256)
def fused(steps: tuple[Step, ...], masked: bool) -> Fused:
    """The kernel of a structure. masked: see ``Staged``. Raises what Triton says of rules that it does not take."""
    made_of = hashlib.sha256(repr(_told(steps, masked)).encode()).hexdigest()[:15]
    tag = f"staged_{made_of}"
    common = {
        "BASED": tl.constexpr(any(step.shape == "Scale" for step in steps)),
        "WHOLE": tl.constexpr(any("whole" in rule.row for step in steps[:-1] for rule in step.rules)),
        "FLIPS": tl.constexpr(any(step.shape == "Ceiling" for step in steps)),
    }
    function, marks, ceilings, place = _made(shapes.nothing, common, tag), 0, 0, 0
    for i, step in enumerate(steps):
        own = f"{tag}_{i}"
        stage = _stage(step, common, own, place, ceilings, late=i == 0 and not masked)
        for j, what in enumerate((_mark(marks, step, own), stage, _mark(marks + 1, step, own))):
            if what is not None:
                function = _made(shapes.then, {"before": function, "stage": what}, f"{own}_{j}")
        marks, ceilings = marks + 2 * bool(step.learns), ceilings + (step.shape == "Ceiling")
        place += step.width
    last = steps[-1]
    names = {**common, **_rules(last, tag), "AT": tl.constexpr(place - last.width), "WANTS": _wants(last)}
    kind = getattr(draws, last.kind.uniforms)  # type: ignore[attr-defined]
    draw = _made(kind, names, tag)
    kernel = _made(program.program, {**common, "stages": function, "draw": draw}, tag)
    return Fused(
        kernel,
        int(made_of, 16),
        common["BASED"].value,
        kind is draws.one or any(step.shape == "Prefix" for step in steps),
        any(_has(step, "order") for step in steps),
        kind is draws.each,
        any(step.shape == "Tap" for step in steps),
        marks,
    )


def _told(steps: tuple[Step, ...], masked: bool) -> list[Any]:
    """All that a kernel is made of."""
    rules = [[(rule, digest(getattr(step.kind, rule.name))) for rule in step.rules] for step in steps]
    flags = [(getattr(step.kind, "monotone", None), getattr(step.kind, "reaches", None)) for step in steps]
    return [masked, *zip([(*step[1:2], *step[3:]) for step in steps], rules, flags, strict=True)]


def _stage(step: Step, common: dict[str, Any], tag: str, place: int, ceilings: int, *, late: bool) -> Any:
    """What a stage does to the tokens; None for a Draw that leaves them as they are."""
    if step.greedy:
        return _made(shapes.greedy, common, tag)
    if step.shape == "Draw":
        return None
    names = {**common, **_rules(step, tag), "AT": tl.constexpr(place), "WANTS": _wants(step)}
    if step.shape == "Floor":
        names["first_only"] = _made(shapes.greedy, common, tag)
    names |= {
        "MONOTONE": tl.constexpr(getattr(step.kind, "monotone", True)),
        "REACHES": tl.constexpr(getattr(step.kind, "reaches", True)),
        "OWN": tl.constexpr(_has(step, "order")),
        "TIES": tl.constexpr(step.ties),
        "LATE": tl.constexpr(late),
        "SLOT": tl.constexpr(ceilings),
    }
    return _made(SHAPES[step.shape], names, tag)


def _mark(slot: int, step: Step, tag: str) -> Any:
    return _made(shapes.mark, {"SLOT": tl.constexpr(slot)}, f"{tag}_{slot}") if step.learns else None


def _has(step: Step, rule: str) -> bool:
    return any(one.name == rule for one in step.rules)


def _wants(step: Step) -> Any:
    """The statistics that the rules of a stage read."""
    wanted = 0
    for name in frozenset().union(*(rule.row for rule in step.rules)):
        wanted |= STATISTICS.get(name, 0) | (tiles.MASS.value if name == "entropy" else 0)
    return tl.constexpr(wanted)


def _rules(step: Step, tag: str) -> dict[str, Any]:
    """The rules of a stage, and what loads its numbers."""
    names = {rule.name: _rule(step.kind, rule.name, tag) for rule in step.rules}
    mine = namedtuple(step.kind.__name__, step.columns or ("nothing",))  # type: ignore[misc]  # noqa: PYI024
    names["mine"] = _made(loads.BY_COUNT[step.width], {"Mine": mine}, f"{tag}_mine")
    return names


def _rule(kind: Any, name: str, tag: str) -> Any:
    """A rule, and what it calls, for kernels."""
    return bound(getattr(kind, name), {**WORDS, "tl": tl}, f"{tag}_{name}", made=jit, constant=tl.constexpr)


def _made(template: Callable[..., Any], names: dict[str, Any], tag: str) -> Any:
    return jit(rebind(cast(Any, template), names, tag))
