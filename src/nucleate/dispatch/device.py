"""Decides whether a device can run a row, and describes what it keeps of the row; or gives the reason why it cannot.

Without torch: what the descriptions mean on a device is the business of ``backends.cuda``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nucleate.backends import resident
from nucleate.backends.chain import Numbers, unchanging
from nucleate.backends.resident import DeviceShift, Resident, device_shift
from nucleate.backends.rules import bans
from nucleate.backends.structure import staged_of
from nucleate.core.history import History
from nucleate.core.maths import INFINITY
from nucleate.core.stage import Pipeline, Shift, Tap
from nucleate.dispatch.chain import numbers_of
from nucleate.stages.bad_words import BadWords
from nucleate.stages.dry import Dry
from nucleate.stages.min_tokens import MinTokens
from nucleate.stages.no_repeat_ngram import NoRepeatNgram


def device_row(stages: Pipeline, vocab_size: int | None) -> Resident | str:
    """What a device keeps of a row with these stages, or why the host has to run it.

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
    if isinstance(numbers, Numbers):
        return row._replace(numbers=numbers._replace(k=min(numbers.k, vocab_size or numbers.k)))
    staged = staged_of(stages[end:], masked=any(shift.touches == "masked" for shift in shifts))
    return staged if isinstance(staged, str) else row._replace(staged=staged)


def with_shifts(shifts: Sequence[Shift]) -> Resident | str:
    """A row that begins with these, and has no other stages; or why the host has to run it."""
    row = Resident(Numbers())
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
    """A Shift as a device runs it, or why it cannot."""
    made: DeviceShift | str = f"{shift!r} has a rule that a device does not have"
    match shift:
        case MinTokens(n, ends):
            made = device_shift(shift, resident.UNTIL, (n,), dict.fromkeys(ends, -INFINITY))
        case NoRepeatNgram(n):
            made = device_shift(shift, resident.NGRAM, (n,))
        case BadWords(words):  # text is spelled by now, or refused where its list is read
            made = device_shift(shift, resident.WORDS, words=words)
        case Dry(multiplier, base, allowed, breakers, last_n):
            limits = multiplier, base, shift.room, allowed, last_n
            made = device_shift(shift, resident.REPEATS, limits, words=breakers or ())
        case _ if shift.touches in ("seen", "output"):
            made = device_shift(shift)
        case _ if shift.touches == "listed":
            made = _fixed(shift)
    return made


def _fixed(shift: Shift) -> DeviceShift | str:
    """The same of one whose list is always the same."""
    if not unchanging(shift):
        return f"{shift!r} depends on the history"
    listing = shift.listing(History())
    if any(math.isnan(value) or value == INFINITY for value in listing.values()):
        return f"{shift!r} adds a value that is no number"
    return device_shift(shift, resident.FIXED, listing=listing)


def _named(shift: DeviceShift) -> list[int]:
    """The tokens that a Shift names."""
    return [*shift.listing, *(word[-1] for word in shift.words if shift.source == resident.WORDS)]
