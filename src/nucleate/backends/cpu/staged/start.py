"""The tokens a pipeline starts from: the row as it lies in memory, or all tokens as the first Shifts leave them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.backends.cpu.staged import shifts, summary
from nucleate.backends.cpu.staged.facts import Step
from nucleate.backends.cpu.staged.raw import Raw, dense
from nucleate.backends.cpu.staged.room import Floats, Kept, Odd, Room
from nucleate.core.history import Past
from nucleate.core.stage import Shift

FEW = 512
"""Of so many all may be looked at."""

Tokens = Kept | Raw
Spans = dict[int, tuple[Tokens, Tokens]]
"""Before and after the stages, by place, that are told of the token drawn later."""


def start(work: Room, logits_V: NDArray[Any], steps: tuple[Step, ...], past: Past) -> tuple[Tokens, int, Spans]:
    """The tokens as of some stage, and its place. Before it there are Shifts at most, and a Tap of the row as given."""
    row_V = plain(work, np.asarray(logits_V, dtype=np.float32))
    spans: Spans = {}
    place = _next(steps, 0)
    if work.size > FEW:
        raw = None
        if place < len(steps) and steps[place].shape == "Tap":
            raw = Raw(work, row_V)
            spans[place] = raw, raw
            place = _next(steps, place + 1)
        if not (place < len(steps) and steps[place].shape == "Shift"):
            return raw or Raw(work, row_V), place, spans
    base = work.floats()
    top, low = summary.widen(row_V, base)
    check(top)
    while place < len(steps) and steps[place].shape == "Shift" and not steps[place].remembers:
        edit(base[: work.size], steps[place].stage, past)
        top, low = summary.scan(base, work.size)
        check(top)
        place = _next(steps, place + 1)
    return dense(work, base, top, low), place, spans


def _next(steps: tuple[Step, ...], place: int) -> int:
    """The place of the first stage from here on that does something."""
    while place < len(steps) and steps[place].idle:
        place += 1
    return place


def edit(x_V: Floats, stage: Shift, past: Past) -> None:
    try:
        shifts.edit(x_V, stage, past)
    except IndexError:
        raise Odd from None


def plain(work: Room, row_V: NDArray[np.float32]) -> NDArray[np.float32]:
    """A row as the kernels know it: contiguous and writeable."""
    flags = row_V.flags
    if flags.c_contiguous and flags.writeable and flags.aligned:
        return row_V
    work.row[:] = row_V
    return work.row


def check(top: float) -> None:
    if not top < np.inf:
        raise Odd
