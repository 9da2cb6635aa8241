"""What a device keeps of a row whose pipeline runs there: numbers and lists. Knows no stage, and no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

LONGEST_WINDOW = 1 << 12
"""Of penalties; what they count is on the device."""


class Penalties(NamedTuple):
    """Of tokens that occurred; the defaults do nothing."""

    scale: float = 1.0  #: divides scores above 0, multiplies others
    each: float = 0.0  #: subtracted for each time in the output
    once: float = 0.0  #: subtracted if in the output
    window: int | None = None  #: see ``Shift.window``
    counts: bool = False  #: whether there are any


class Resident(NamedTuple):
    """A row's pipeline, as far as the logits are concerned; what is told of them comes from elsewhere."""

    numbers: Sequence[float]  #: see ``plan.Numbers``
    penalties: Penalties = Penalties()
    before: Mapping[int, float] = {}  #: added before the penalties; -inf is a ban
    until: Mapping[int, int] = {}  #: bans that end when the output has so many tokens
    allowed: frozenset[int] | None = None  #: the only ones, if not None
    wanted: tuple[int, tuple[int, ...]] | None = None  #: see ``Tap.wanted``; None: no logprobs

    @property
    def edits(self) -> bool:
        """Whether scores of single tokens change."""
        return bool(self.penalties.counts or self.before or self.until)
