"""The specification of a row on a device: its leading Shifts and the stages after them; or why the CPU must run it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nucleate.sampling.dispatch.fused_pipeline import FusedParams, numbers_of, unchanging
from nucleate.sampling.dispatch.rules import LARGEST, bans, reads
from nucleate.sampling.dispatch.signature import PipelineSignature, odd_name, staged_of
from nucleate.sampling.history import History
from nucleate.sampling.maths import INFINITY
from nucleate.sampling.stage import Pipeline, Shift, Tap
from nucleate.sampling.stages.constraints.bad_words import BadWords
from nucleate.sampling.stages.constraints.min_tokens import MinTokens
from nucleate.sampling.stages.penalties.dry import Dry
from nucleate.sampling.stages.penalties.no_repeat_ngram import NoRepeatNgram

Words = tuple[tuple[int, ...], ...]
"""Sequences of token ids."""

COUNTS = {"prompt_count", "output_count"}

FIXED, UNTIL, WORDS, NGRAM, REPEATS = "fixed", "until", "words", "ngram", "repeats"
"""Where the list of a Shift comes from. FIXED: it is constant. The device computes the others in each step: ids
that are banned while the output is short, last tokens of words whose earlier tokens end the output, tokens that would
complete an n-gram again, tokens that extend a repeat (DRY)."""


class DeviceShift(NamedTuple):
    """A Shift on a device. Rows are computed together if the fields before ``numbers`` are equal."""

    kind: type[Shift]
    touches: str  #: "seen", "output" or "listed"
    window: int | None
    counts: bool  #: whether it reads token counts
    source: str  #: where its list comes from, see FIXED; "" if it has none
    switches: tuple[tuple[str, Any], ...]  #: attributes that are true, false or none
    names: tuple[str, ...]  #: of its numbers
    numbers: tuple[float, ...] = ()  #: what its rule reads
    limits: tuple[float, ...] = ()  #: what its list depends on
    listing: Mapping[int, float] = {}  #: FIXED: its list. UNTIL: the ids
    words: Words = ()  #: WORDS: the words. REPEATS: sequences that no repeat crosses

    @property
    def structure(self) -> tuple[Any, ...]:
        """The fields that are equal for rows that are computed together."""
        return self[: self._fields.index("numbers")]

    @property
    def follows(self) -> bool:
        """Whether it depends on repetitions of earlier tokens."""
        return self.source in (NGRAM, REPEATS)

    @property
    def span(self) -> float:
        """The number of last tokens that it depends on."""
        spans: list[float] = [len(word) for word in self.words]
        if self.counts:
            spans.append(math.inf if self.window is None or self.window < 0 else self.window)
        if self.follows:
            last_n = self.limits[-1] if self.source == REPEATS else -1.0
            spans.append(math.inf if last_n < 0 else last_n)
        return max(spans, default=0)


class DeviceRowSpec(NamedTuple):
    """The pipeline of a row on a device."""

    numbers: Sequence[float]  #: see ``fused_pipeline.FusedParams``
    shifts: tuple[DeviceShift, ...] = ()  #: in their order
    allowed: frozenset[int] | None = None  #: the only tokens, if not None
    wanted: tuple[int, tuple[int, ...]] | None = None  #: see ``Tap.wanted``; None: no logprobs
    staged: PipelineSignature | None = None  #: the stages after the Shifts, where ``numbers`` does not describe them

    @property
    def span(self) -> float:
        """The number of last tokens that it depends on."""
        return max((shift.span for shift in self.shifts), default=0)

    @property
    def follows(self) -> bool:
        """Whether it depends on repetitions of earlier tokens."""
        return any(shift.follows for shift in self.shifts)


def device_row(stages: Pipeline, vocab_size: int | None) -> DeviceRowSpec | str:
    """The specification of a row with these stages; or why the CPU must run it.

    vocab_size: V; None if it is not known.
    """
    tap = stages[0] if isinstance(stages[0], Tap) else None
    start = int(tap is not None)
    end = next(i for i, stage in enumerate(stages) if i >= start and not isinstance(stage, Shift))
    shifts = [stage for stage in stages[start:end] if isinstance(stage, Shift)]
    if tap is not None and not shifts and isinstance(stages[start], Tap):
        return f"{stages[start]!r} is the second of its kind"
    row = with_shifts(shifts)
    if isinstance(row, str):
        return row
    named = max((*(row.allowed or ()), *(max(_named(shift), default=0) for shift in row.shifts)), default=0)
    if vocab_size is not None and not 0 <= named < vocab_size:
        return f"it names token {named}"
    row = row._replace(wanted=tap.wanted if tap else None)
    numbers = numbers_of(stages[end:])
    if isinstance(numbers, FusedParams):
        return row._replace(numbers=numbers._replace(k=min(numbers.k, vocab_size or numbers.k)))
    staged = staged_of(stages[end:], masked=any(shift.touches == "masked" for shift in shifts))
    return staged if isinstance(staged, str) else row._replace(staged=staged)


def with_shifts(shifts: Sequence[Shift]) -> DeviceRowSpec | str:
    """The specification of a row with these Shifts only; or why the CPU must run it."""
    row = DeviceRowSpec(FusedParams())
    for shift in shifts:
        if shift.touches == "masked" and bans(shift):  # the mask of a call comes after all of these
            continue
        if shift.touches == "unlisted" and bans(shift) and unchanging(shift):
            listed = frozenset(shift.listing(History()))
            row = row._replace(allowed=listed if row.allowed is None else row.allowed & listed)
            continue
        if isinstance(shift, Dry) and any(issubclass(one.kind, Dry) for one in row.shifts):
            return f"{shift!r} is the second of its kind"
        one = _described(shift)
        if isinstance(one, str):
            return one
        row = row._replace(shifts=(*row.shifts, one))
    return row


def _described(shift: Shift) -> DeviceShift | str:
    """Convert a Shift for a device; or return why that is not possible."""
    made: DeviceShift | str = f"{shift!r} has a rule that cannot run on a device"
    match shift:
        case MinTokens(n, ends):
            made = device_shift(shift, UNTIL, (n,), dict.fromkeys(ends, -INFINITY))
        case NoRepeatNgram(n):
            made = device_shift(shift, NGRAM, (n,))
        case BadWords(words):  # text is spelled by now, or refused where its list is read
            made = device_shift(shift, WORDS, words=words)
        case Dry(multiplier, base, allowed, breakers, last_n):
            limits = multiplier, base, shift.room, allowed, last_n
            made = device_shift(shift, REPEATS, limits, words=breakers or ())
        case _ if shift.touches in ("seen", "output"):
            made = device_shift(shift)
        case _ if shift.touches == "listed":
            made = _fixed(shift)
    return made


def _fixed(shift: Shift) -> DeviceShift | str:
    """The same for a Shift with a constant list."""
    if not unchanging(shift):
        return f"{shift!r} depends on the history"
    listing = shift.listing(History())
    if any(math.isnan(value) or value == INFINITY for value in listing.values()):
        return f"{shift!r} adds a value that is no number"
    return device_shift(shift, FIXED, listing=listing)


def _named(shift: DeviceShift) -> list[int]:
    """The token ids in the parameters of a Shift."""
    return [*shift.listing, *(word[-1] for word in shift.words if shift.source == WORDS)]


def device_shift(
    shift: Shift,
    source: str = "",
    limits: Sequence[float] = (),
    listing: Mapping[int, float] | None = None,
    words: Sequence[str | tuple[int, ...]] = (),
) -> DeviceShift | str:
    """Build the DeviceShift of a Shift; or return why that is not possible."""
    kind, inputs = type(shift), reads(shift, "apply")
    why = odd_name(kind.apply)
    if why or inputs.mine is None:
        return f"{kind.__name__}.apply {why or 'is not one expression of numbers'}"
    values = {name: getattr(shift, name) for name in inputs.mine}
    switches = {name: value for name, value in values.items() if isinstance(value, bool | None)}
    numbers = {name: value for name, value in values.items() if name not in switches}
    if any(isinstance(one, int) and abs(one) > LARGEST for one in numbers.values()):
        return f"{shift!r} has an integer that is too large"
    counts = shift.touches != "listed" or bool(COUNTS & {*kind.apply.__code__.co_names})
    window = shift.window if shift.window is None else max(-1, min(shift.window, LARGEST))
    structure = kind, shift.touches, window, counts, source, tuple(switches.items()), tuple(numbers)
    given = tuple(map(float, numbers.values())), tuple(map(float, limits))
    return DeviceShift(*structure, *given, listing or {}, tuple(word for word in words if isinstance(word, tuple)))
