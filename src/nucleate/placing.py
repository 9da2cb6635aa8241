"""What a device is to keep of a row, from its stages; or why the host runs it. Knows no tensor and no kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from nucleate.backends.chain import EACH_TIME, ONCE, SCALE, Chain, Counted, Numbers, unchanging
from nucleate.backends.cuda.resident import Penalties, Repeats, Resident
from nucleate.core.history import History
from nucleate.core.maths import INFINITY
from nucleate.core.stage import Pipeline, Shift, Tap
from nucleate.plan import banned, edits_of, has_rule, numbers_of
from nucleate.stages.bad_words import BadWords
from nucleate.stages.dry import LARGEST, Dry
from nucleate.stages.min_tokens import MinTokens
from nucleate.stages.no_repeat_ngram import NoRepeatNgram

FOREVER = 1 << 62
"""No output is as long."""


def resident_of(chain: Chain | str) -> Resident | str:
    """What a device is to keep of a row with this chain, or why it runs on the host."""
    if isinstance(chain, str):
        return chain
    row = Resident(chain.numbers, wanted=chain.tap.wanted if chain.tap else None)
    for edit in chain.edits:
        with_it = _counting(row, edit) if isinstance(edit, Counted) else _listing(row, edit)
        if isinstance(with_it, str):
            return with_it
        row = with_it
    return row


def placed(stages: Pipeline, chain: Chain | str) -> Resident | str:
    """What a device is to keep of a row with these stages, which the chain may run or not; or why the host runs it.

    After the leading Shifts come any stages whose rules can be bound to a device's numbers.
    """
    row = resident_of(chain)
    if not isinstance(row, str):
        return row
    from nucleate.backends.cuda.staged.structure import staged_of  # it loads the compiler

    tap = stages[0] if isinstance(stages[0], Tap) else None
    start = int(tap is not None)
    end = next(i for i, stage in enumerate(stages) if i >= start and not isinstance(stage, Shift))
    shifts = [stage for stage in stages[start:end] if isinstance(stage, Shift)]
    if tap is not None and not shifts and isinstance(stages[start], Tap):
        return f"{stages[start]!r} is the second of its kind"
    row, numbers = resident_of_shifts(shifts), numbers_of(stages[end:])
    if not isinstance(row, str):
        row = row._replace(wanted=tap.wanted if tap else None)
        if not isinstance(numbers, str):
            return row._replace(numbers=numbers)
    staged = staged_of(stages[end:], masked=any(shift.touches == "masked" for shift in shifts))
    if isinstance(row, str) or isinstance(staged, str):
        return row if isinstance(row, str) else staged  # type: ignore[return-value]  # one of them is
    return row._replace(staged=staged)


def resident_of_shifts(shifts: Sequence[Shift]) -> Resident | str:
    """What a device is to keep of a row that begins with these; or why it runs on the host."""
    edits = edits_of(list(shifts))
    row = edits if isinstance(edits, str) else resident_of(Chain(None, edits, Numbers()))
    return _in_order(shifts) if isinstance(row, str) else row


def _in_order(shifts: Sequence[Shift]) -> Resident | str:
    """The same, one after the other, but for bans: these may come at any place."""
    row: Resident | str = Resident(Numbers())
    for shift in shifts:
        if isinstance(row, str):
            return row
        bans = has_rule(shift, banned)
        if isinstance(shift, MinTokens | NoRepeatNgram | BadWords) or (shift.touches == "unlisted" and bans):
            row = _listing(row, shift)
        elif isinstance(shift, Dry):
            row = _then(_listing(row, shift), shift, {}, repeats=True)
        elif shift.touches in ("seen", "output"):
            row = _then(row, shift, {})
        elif shift.touches == "listed":
            told = shift.listing(History()) if unchanging(shift) else None
            row = f"{shift!r} depends on what was said" if told is None else _then(row, shift, told)
        elif shift.touches != "masked" or not bans:  # the mask of a call comes after all of these
            return f"{shift!r} has a rule of its own"
    return row


def _then(row: Resident | str, shift: Shift, listing: Mapping[int, float], *, repeats: bool = False) -> Resident | str:
    """A row with one more Shift."""
    from nucleate.backends.cuda.ordered import ordered_of

    one = ordered_of(shift, listing, repeats=repeats)
    if isinstance(row, str):
        return row
    return one if isinstance(one, str) else row._replace(ordered=(*row.ordered, one))


def _counting(row: Resident, edit: Counted) -> Resident | str:
    """A row on a device with penalties."""
    codes, had = [code for code, _ in edit.rules], row.penalties
    if SCALE in codes and (SCALE in codes[1:] or had.counts or row.late or row.repeats):
        return "its repetition penalty is not the first of its penalties"
    window = None if edit.window is None else min(edit.window, FOREVER)
    if had.counts and had.window != window:
        return "its penalties count different tokens"
    scale = math.prod([had.scale, *(number for code, number in edit.rules if code == SCALE)])
    each = math.fsum([had.each, *(number for code, number in edit.rules if code == EACH_TIME)])
    once = math.fsum([had.once, *(number for code, number in edit.rules if code == ONCE)])
    return row._replace(penalties=Penalties(scale, each, once, window, counts=True))


def _listing(row: Resident, shift: Shift) -> Resident | str:
    """A row on a device with a list."""
    if isinstance(shift, MinTokens | NoRepeatNgram | BadWords | Dry):
        return _following(row, shift)
    if not unchanging(shift):
        return f"{shift!r} depends on what was said"
    listing = shift.listing(History())
    if shift.touches == "unlisted":
        return row._replace(allowed=frozenset(listing) if row.allowed is None else row.allowed & frozenset(listing))
    if any(math.isnan(value) or value == INFINITY for value in listing.values()):
        return f"{shift!r} adds what is no number"
    return _added_to(row, listing)


def _following(row: Resident, shift: Shift) -> Resident | str:
    """The same of a list that depends on what was said, which a device works out."""
    match shift:
        case MinTokens(n, ends):
            until = {token: max(min(n, FOREVER), row.until.get(token, 0)) for token in ends}
            return row._replace(until={**row.until, **until})
        case NoRepeatNgram(n):
            return row._replace(ngram=min(n, row.ngram or n, FOREVER))
        case BadWords(words):  # text is spelled by now, or refused by whoever asks for its list
            longer = tuple(word for word in words if isinstance(word, tuple) and len(word) > 1)
            row = row._replace(words=(*row.words, *longer))
            return _added_to(row, {word[0]: -INFINITY for word in words if isinstance(word, tuple) and len(word) == 1})
        case Dry():
            return f"{shift!r} is the second of its kind" if row.repeats else row._replace(repeats=_repeats(shift))
    return f"{shift!r} depends on what was said"


def _added_to(row: Resident, listing: Mapping[int, float]) -> Resident:
    """A row that adds numbers to scores; a ban may come at any place."""
    bans = {token: value for token, value in listing.items() if value == -INFINITY}
    rest = {token: value for token, value in listing.items() if value != -INFINITY}
    if row.penalties.counts:
        late = {token: row.late.get(token, 0.0) + value for token, value in rest.items()}
        row, rest = row._replace(late={**row.late, **late}), {}
    added = {token: row.before.get(token, 0.0) + value for token, value in (bans | rest).items()}
    return row._replace(before={**row.before, **added})


def _repeats(dry: Dry) -> Repeats:
    """See ``Dry.penalties``."""
    most = min(dry.multiplier * dry.base**dry.room, math.exp(LARGEST))
    breakers = tuple(ids for ids in dry.breakers or () if isinstance(ids, tuple))
    room = min(math.ceil(dry.room), FOREVER)
    allowed, last = min(dry.allowed_length, FOREVER), min(dry.last_n, FOREVER)
    return Repeats(dry.multiplier, dry.base, most, room, allowed, last, breakers)
