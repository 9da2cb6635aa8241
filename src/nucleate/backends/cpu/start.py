"""The tokens a pipeline starts from: all of them after the first Shifts, or few, where the others cannot matter."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.backends.cpu import shifts, templates
from nucleate.backends.cpu.bind import reads
from nucleate.backends.cpu.room import Floats, Kept, Odd, Room
from nucleate.backends.cpu.templates import LOWEST
from nucleate.core.history import Past
from nucleate.core.stage import Floor, Pipeline, Prefix, Row, Scale, Shift, Stage, Tap

FEW = 512
"""Of so many all may be looked at."""

MOST_CANDIDATES = 4096
"""A start from more tokens than this is not worth its search."""

SOME = np.array([0.0, -1e-30, -1e-9, -1.0, -10.0, -100.0, -1e4, -1e9, -1e38])

NOTHING = Row(0, *[np.float64(0.0)] * 7)
"""For rules that ask for the top at most, which is 0 wherever scores are from the top."""


def start(work: Room, logits_V: NDArray[Any], stages: Pipeline, past: Past, whole: bool) -> tuple[Kept, int]:
    """The tokens as of the first stage that is no Shift, and its place: only some, where the others cannot matter."""
    row_V = np.asarray(logits_V, dtype=np.float32)
    place = 0
    if not whole and (found := _candidates(work, row_V, stages)) is not None:
        return found, 0
    base = work.floats()
    top, low = templates.widen(_plain(work, row_V), base)
    check(top)
    for place, stage in enumerate(stages):  # noqa: B007
        if not isinstance(stage, Shift) or remembers(stage):
            break
        if not stage.neutral:
            edit(base[: work.size], stage, past)
            top, low = templates.scan(base, work.size)
            check(top)
    if not whole and place and (found := _candidates_of(work, base, top, stages[place:])) is not None:
        return found, place
    return dense(work, base, top, low), place


def edit(x_V: Floats, stage: Shift, past: Past) -> None:
    try:
        shifts.edit(x_V, stage, past)
    except IndexError:
        raise Odd from None


def _plain(work: Room, row_V: NDArray[np.float32], size: int = 0) -> NDArray[np.float32]:
    """A row as the kernels know it: contiguous and writeable, padded up to a size."""
    size = size or work.size
    flags = row_V.flags
    if flags.c_contiguous and flags.writeable and flags.aligned and size == len(row_V):
        return row_V
    work.row[: work.size] = row_V
    return work.row[:size]


def check(top: float) -> None:
    if not top < np.inf:
        raise Odd


def dense(work: Room, base: Floats, top: float, low: float) -> Kept:
    """Tokens of which none has been cut; those at -inf are out."""
    if low > -np.inf:
        return Kept(work.every, base, base, work.size, top, None)
    ids, x = work.ids(), work.floats()
    m = templates.keep_above(base, work.every, work.size, 0.0, LOWEST, x, ids)
    return Kept(ids, x, base, m, top, None)


def _first_cut(work: Room, stages: Pipeline) -> tuple[Any, list[Any]] | None:
    """The first stage that cuts, and the scales before it, if nothing of them asks for more than the top."""
    if work.size <= FEW:
        return None
    scales: list[Any] = []
    for stage in stages:
        if stage.neutral:
            continue
        if stage.greedy or remembers(stage):
            return None
        if isinstance(stage, Scale) and stage.monotone and reads(stage, "apply").row <= {"top"}:
            scales.append(stage)
        elif (isinstance(stage, Prefix) and _counts(stage)) or (
            isinstance(stage, Floor) and reads(stage, "floor").row <= {"top"}
        ):
            return (stage, scales) if (_scaled(SOME, scales) < np.inf).all() else None
        else:
            return None
    return None


def _candidates(work: Room, row_V: NDArray[np.float32], stages: Pipeline) -> Kept | None:
    """Tokens among which those are that the first cut leaves; None where all may be needed."""
    if (found := _first_cut(work, stages)) is None:
        return None
    stage, scales = found
    row_V = _plain(work, row_V, work.padded)
    top = templates.tops_of(row_V, work.tops)
    if not -np.inf < top < np.inf:
        raise Odd
    cut: Any = None
    if isinstance(stage, Floor):
        if (raw := _raw_cut(work.tops, float(top), stage, scales)) is not None:
            cut = np.nextafter(np.float32(raw), np.float32(-np.inf))
    elif 0.0 < (k := float(stage.target(NOTHING))) <= MOST_CANDIDATES:
        cut = templates.kth(row_V, work.tops, np.float32(top), int(np.ceil(k)), work.v, work.cuts, work.sums)
    if cut is None:
        return None
    ids, x, base = work.ids(), work.floats(), work.floats()
    cut = np.float32(max(cut, np.finfo(np.float32).min))
    m = templates.pick_out(row_V, work.tops, cut, ids, x, base)
    return Kept(ids, x, base, m, float(top), None)


def _candidates_of(work: Room, base: Floats, top: float, stages: Pipeline) -> Kept | None:
    """The same after a Shift, where scores are float64."""
    if (found := _first_cut(work, stages)) is None:
        return None
    stage, scales = found
    tops = work.masses[: templates.tops_of_many(base, work.size, work.masses)]
    if isinstance(stage, Floor):
        cut = _raw_cut(tops, top, stage, scales)
    elif 0.0 < (k := float(stage.target(NOTHING))) <= len(tops):
        cut = templates.kth_top(tops, work.v, int(np.ceil(k)))
    else:
        cut = None
    if cut is None:
        return None
    ids, x = work.ids(), work.floats()
    m = templates.keep_above(base, work.every, work.size, 0.0, max(float(cut), LOWEST), x, ids)
    return Kept(ids, x, base, m, top, None)


def _counts(stage: Prefix) -> bool:
    """Whether a stage keeps a number of tokens, the best ones."""
    plain = type(stage).order is Prefix.order and stage.reaches and not stage.ties
    return plain and reads(stage, "weight").ones and not reads(stage, "target").row


def _raw_cut(tops_G: NDArray[Any], top: float, stage: Floor, scales: list[Any]) -> float | None:
    """A raw score below which no token is kept, or None: with scales by trying out a few."""
    cut, least = min(float(stage.floor(NOTHING)), 0.0), float(tops_G[tops_G > -np.inf].min())
    if not scales:
        raw = top + cut
    else:
        raw_N = np.linspace(top, least, 257)
        tried_N = _scaled(raw_N - top, scales)
        out = np.flatnonzero(tried_N - tried_N[0] < cut)
        raw = raw_N[out[0]] if len(out) else -np.inf
    raw -= 1e-6 * (abs(top) + abs(raw))  # more than what any rounding of it takes
    return raw if raw > least else None


def _scaled(x_N: Floats, scales: list[Any]) -> Floats:
    for scale in scales:
        x_N = np.asarray(scale.apply(x_N - x_N[0], NOTHING))
    return x_N


def remembers(stage: Stage) -> bool:
    """Whether a stage is told of the token that is drawn later."""
    return (isinstance(stage, Tap) or type(stage).after is not Stage.after) and not stage.neutral
