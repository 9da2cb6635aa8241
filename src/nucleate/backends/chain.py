"""Describes what the hot chain does for one row: its edits and its parameters. Plain values, no compiler.

The hot chain is the pipeline of most requests: bias, penalties and bans, temperature, top-n-sigma, top-k, min-p, top-p,
and a Gumbel draw. ``dispatch.chain`` recognises it; the fused kernels of each backend run it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nucleate.core.stage import Shift, Tap

SCALE, EACH_TIME, ONCE = range(3)
"""Rules of penalties, each with a number: divide by it or multiply, subtract it for each time in the output, once."""

Rules = tuple[tuple[int, float], ...]


class Counted(NamedTuple):
    """Penalties in a row that count the same tokens."""

    window: int | None
    rules: Rules


Edit = Counted | Shift
"""A change of the scores before the cuts: penalties, or a Shift that adds what it lists, or bans what it does not."""


class Numbers(NamedTuple):
    """The parameters of the hot chain, in its order, but that top-k and min-p commute. The defaults do nothing."""

    t: float = 1.0  #: temperature
    sigmas: float = 0.0  #: top-n-sigma
    k: int = 0  #: top-k
    m: float = 0.0  #: min-p
    p: float = 1.0  #: top-p
    late_m: float = 0.0  #: min-p after top-p
    late_t: float = 1.0  #: temperature after the cuts


class Chain(NamedTuple):
    """A pipeline that the hot chain runs. The mask of a step is no edit: it comes with the logits."""

    tap: Tap | None  #: which logprobs to report, of the raw logits
    edits: tuple[Edit, ...]
    numbers: Numbers


class _Unreadable:
    """A history that raises when it is read."""

    def __getattribute__(self, name: str) -> Any:
        raise LookupError(name)


def unchanging(stage: Shift) -> bool:
    """Whether a stage lists the same tokens whatever the history."""
    if type(stage).follow is not Shift.follow:
        return False
    try:
        stage.listing(_Unreadable())  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  # whatever comes of reading it
        return False
    return True
