"""Describes what a device keeps of a row: its leading Shifts, and the stages after them. Knows no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nucleate.backends.rules import LARGEST, reads
from nucleate.backends.structure import Staged, odd_name
from nucleate.core.stage import Shift

Words = tuple[tuple[int, ...], ...]
"""Sequences of token ids."""

COUNTS = {"prompt_count", "output_count"}

FIXED, UNTIL, WORDS, NGRAM, REPEATS = "fixed", "until", "words", "ngram", "repeats"
"""Where the list of a Shift comes from. FIXED: it is always the same. The device computes the others in each step: ids
that are banned while the output is short, last tokens of words whose earlier tokens end the output, tokens that would
complete an n-gram again, tokens that extend a repeat (DRY)."""


class DeviceShift(NamedTuple):
    """A Shift as a device runs it. What comes before ``numbers`` is equal for rows that are computed together."""

    kind: type[Shift]
    touches: str  #: "seen", "output" or "listed"
    window: int | None
    counts: bool  #: whether it needs to know how often tokens occurred
    source: str  #: where its list comes from, see FIXED; "" if it has none
    switches: tuple[tuple[str, Any], ...]  #: attributes that are true, false or none
    names: tuple[str, ...]  #: of its numbers
    numbers: tuple[float, ...] = ()  #: what its rule reads
    limits: tuple[float, ...] = ()  #: what its list depends on
    listing: Mapping[int, float] = {}  #: FIXED: its list. UNTIL: the ids
    words: Words = ()  #: WORDS: the words. REPEATS: sequences that no repeat crosses

    @property
    def structure(self) -> tuple[Any, ...]:
        """What rows that are computed together have in common."""
        return self[: self._fields.index("numbers")]

    @property
    def follows(self) -> bool:
        """Whether it depends on which earlier tokens the last ones repeat."""
        return self.source in (NGRAM, REPEATS)

    @property
    def span(self) -> float:
        """How many of the last tokens it depends on."""
        spans: list[float] = [len(word) for word in self.words]
        if self.counts:
            spans.append(math.inf if self.window is None or self.window < 0 else self.window)
        if self.follows:
            last_n = self.limits[-1] if self.source == REPEATS else -1.0
            spans.append(math.inf if last_n < 0 else last_n)
        return max(spans, default=0)


class Resident(NamedTuple):
    """A row's pipeline, as a device runs it."""

    numbers: Sequence[float]  #: see ``chain.Numbers``
    shifts: tuple[DeviceShift, ...] = ()  #: in their order
    allowed: frozenset[int] | None = None  #: the only tokens, if not None
    wanted: tuple[int, tuple[int, ...]] | None = None  #: see ``Tap.wanted``; None: no logprobs
    staged: Staged | None = None  #: the stages after the Shifts, where ``numbers`` does not describe them

    @property
    def span(self) -> float:
        """How many of the last tokens it depends on."""
        return max((shift.span for shift in self.shifts), default=0)

    @property
    def follows(self) -> bool:
        """Whether it depends on which earlier tokens the last ones repeat."""
        return any(shift.follows for shift in self.shifts)


def device_shift(
    shift: Shift,
    source: str = "",
    limits: Sequence[float] = (),
    listing: Mapping[int, float] | None = None,
    words: Sequence[str | tuple[int, ...]] = (),
) -> DeviceShift | str:
    """What a device runs of a Shift; or why it cannot. words: those that are text stay on the host."""
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
    structure = kind, shift.touches, window, counts, source, tuple(switches.items()), tuple(numbers)
    given = tuple(map(float, numbers.values())), tuple(map(float, limits))
    return DeviceShift(*structure, *given, listing or {}, tuple(word for word in words if isinstance(word, tuple)))
