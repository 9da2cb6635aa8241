"""A Shift as a device runs it over the entries of a row, after others: its rule, its numbers, its list.

Knows no stage and no torch: it reads the rule, and says why it cannot be bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from nucleate.core.stage import Shift

COUNTS = {"prompt_count", "output_count"}


class Ordered(NamedTuple):
    """Its numbers and its list are a row's; the rest is what rows of a structure share."""

    kind: type[Shift]
    touches: str  #: "seen", "output" or "listed"
    window: int | None
    counts: bool  #: whether it reads how often tokens occurred
    repeats: bool  #: whether its list is what the row's repeats say
    switches: tuple[tuple[str, Any], ...]  #: attributes that are true, false or none
    names: tuple[str, ...]  #: of its numbers
    numbers: tuple[float, ...] = ()
    listing: Mapping[int, float] = {}

    @property
    def structure(self) -> Ordered:
        return self._replace(numbers=(), listing={})


def ordered_of(shift: Shift, listing: Mapping[int, float], *, repeats: bool = False) -> Ordered | str:
    """What a device is to run of a Shift; or why it cannot. repeats: its list is worked out from what was said."""
    from nucleate.backends.cuda.staged.structure import odd_name
    from nucleate.backends.rules import LARGEST, reads

    kind, asked = type(shift), reads(shift, "apply")
    why = odd_name(kind.apply)
    if why or asked.mine is None:
        return f"{kind.__name__}.apply {why or 'is not one expression of numbers'}"
    values = {name: getattr(shift, name) for name in asked.mine}
    switches = {name: value for name, value in values.items() if isinstance(value, bool | None)}
    numbers = {name: value for name, value in values.items() if name not in switches}
    if any(isinstance(one, int) and abs(one) > LARGEST for one in numbers.values()):
        return f"{shift!r} has an integer that is too large"
    counts = shift.touches != "listed" or bool(COUNTS & {*kind.apply.__code__.co_names})
    window = shift.window if shift.window is None else max(-1, min(shift.window, LARGEST))
    return Ordered(
        kind,
        shift.touches,
        window,
        counts,
        repeats,
        tuple(switches.items()),
        tuple(numbers),
        tuple(map(float, numbers.values())),
        listing,
    )
