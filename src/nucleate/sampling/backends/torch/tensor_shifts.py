"""The leading Shifts of rows as tensor code: the rules of the stages on the tokens that they touch.

Rows with the same Shifts in the same order are computed together. The columns of such a group are the tokens that any
of its Shifts may touch, repeated ones too: equal tokens get equal scores. Nothing synchronises with the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from nucleate.sampling.backends.torch.bound_stage import BoundAttributes
from nucleate.sampling.backends.torch.slots import STEP, UNBROKEN, Slots
from nucleate.sampling.backends.torch.torch_device import sent
from nucleate.sampling.dispatch import device_row
from nucleate.sampling.dispatch.device_row import DeviceShift
from nucleate.sampling.stage import TokenInfo
from nucleate.sampling.stages.penalties.dry import LARGEST


class ShiftInput(NamedTuple):
    """What the rows of a group give one of their Shifts."""

    shift: DeviceShift  #: of one of them
    apply: Callable[..., Any]  #: its rule, with the numbers of the rows
    limits: tuple[torch.Tensor, ...]  #: [N, 1] each
    ids_NM: torch.Tensor  #: int64, of lists that name tokens; V where there is none
    values_NM: torch.Tensor
    words_NWT: torch.Tensor  #: int64, -1 before the first token of each


class ShiftGroup(NamedTuple):
    """Rows of a call with the same Shifts, in the same order."""

    places_N: torch.Tensor | None  #: of the rows in the call; None: they are all of it
    slots_N: torch.Tensor
    shifts: tuple[ShiftInput, ...]

    @property
    def looks(self) -> bool:
        return any(one.shift.counts or one.shift.follows or one.shift.words for one in self.shifts)

    @property
    def follows(self) -> bool:
        return any(one.shift.follows for one in self.shifts)


class TokenWindow(NamedTuple):
    """What the Shifts of a group see in a step."""

    slots: Slots
    group: ShiftGroup
    size: int  #: V
    said_NL: torch.Tensor  #: int64, the last one first; V where there is none
    back_L: torch.Tensor  #: how many places back each is, from 1
    steps_N1: torch.Tensor


def groups_of(
    rows: Sequence[tuple[DeviceShift, ...]], slots: Sequence[int], size: int, floats: torch.dtype, device: Any
) -> list[ShiftGroup]:
    """The groups among rows of a call; rows without Shifts are in none."""
    kinds: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        if row:
            kinds.setdefault(tuple(one.structure for one in row), []).append(place)
    made = []
    for places in kinds.values():
        columns = zip(*(rows[place] for place in places), strict=True)
        shifts = tuple(_given(some, size, floats, device) for some in columns)
        where, held = sent([places, [slots[place] for place in places]], device)
        made.append(ShiftGroup(None if len(places) == len(rows) else where, held, shifts))
    return made


def _given(some: Sequence[DeviceShift], size: int, floats: torch.dtype, device: Any) -> ShiftInput:
    def columns(rows: Sequence[Sequence[float]]) -> tuple[torch.Tensor, ...]:
        made = sent(torch.tensor(rows, dtype=floats).view(len(rows), -1), device)
        return tuple(made.split(1, 1))

    ids = padded([[*one.listing] for one in some], size)
    values = torch.zeros(ids.shape, dtype=floats)
    for row, one in enumerate(some):
        values[row, : len(one.listing)] = torch.tensor([*one.listing.values()], dtype=floats)
    length = max((len(word) for one in some for word in one.words), default=1)
    words = [[(-1,) * (length - len(word)) + word for word in one.words] for one in some]
    count = max(map(len, words))
    words_NWT = torch.tensor([[*row, *[(-1,) * (length - 1) + (size,)] * (count - len(row))] for row in words])
    words_NWT = words_NWT.to(torch.int64).view(len(some), count, length).clamp(max=size)
    numbers = dict(zip(some[0].names, columns([one.numbers for one in some]), strict=False))
    me: Any = BoundAttributes({**numbers, **dict(some[0].switches)})
    return ShiftInput(
        some[0], partial(some[0].kind.apply, me), columns([one.limits for one in some]),
        *(sent(whole, device) for whole in (ids, values, words_NWT)),
    )  # fmt: skip


def padded(lists: Sequence[Sequence[int]], nothing: int) -> torch.Tensor:
    """Lists of integers as int64 [R, K]. nothing: what fills them up; larger ones count as it, if it is not below 0."""
    most = max(map(len, lists), default=0)
    lines = [[*ids, *[nothing] * (most - len(ids))] for ids in lists]
    whole = torch.tensor(lines, dtype=torch.int64).view(len(lists), most)
    return whole if nothing < 0 else whole.clamp(max=nothing)


def shifted(group: ShiftGroup, slots: Slots, x_RV: torch.Tensor) -> torch.Tensor:
    """Scores of a call with those of a group shifted. A score that is -inf, +inf or NaN stays, also in between."""
    size, x_NV = x_RV.shape[1], x_RV
    if group.places_N is not None:
        x_NV = x_RV.index_select(0, group.places_N)
    seen = _seen(group, slots, size)
    lists = [_listed(one, seen) for one in group.shifts]
    columns = [
        seen.said_NL,
        *(ids_NM for one, (ids_NM, _) in zip(group.shifts, lists, strict=True) if not one.shift.follows),
    ]
    ids_NK = torch.cat(columns, 1)
    room_NV = torch.nn.functional.pad(x_NV, (0, 1))  # what is no token is read and written behind the row
    y_NK = room_NV.gather(1, ids_NK).to(slots.floats)
    counts: dict[Any, torch.Tensor] = {}
    for one, listed in zip(group.shifts, lists, strict=True):
        y_NK = _applied(one, seen, listed, ids_NK, y_NK, counts)
    y_NV = room_NV.scatter(1, ids_NK, y_NK.to(x_NV.dtype))[:, :-1]
    return y_NV if group.places_N is None else x_RV.index_copy(0, group.places_N, y_NV)


def _seen(group: ShiftGroup, slots: Slots, size: int) -> TokenWindow:
    steps_N1 = slots.column(group.slots_N, STEP)[:, None]
    if not group.looks:
        return TokenWindow(slots, group, size, steps_N1[:, :0], steps_N1[0, :0], steps_N1)
    said_NL = slots.said(group.slots_N)
    back_L = torch.arange(1, slots.ring + 1, device=slots.device)
    return TokenWindow(slots, group, size, torch.where(said_NL < 0, size, said_NL), back_L, steps_N1)


def _applied(
    one: ShiftInput,
    seen: TokenWindow,
    listed: tuple[torch.Tensor, torch.Tensor],
    ids_NK: torch.Tensor,
    y_NK: torch.Tensor,
    counts: dict[Any, torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Scores after a Shift."""
    shift, value_NK, prompt_NK, output_NK = one.shift, y_NK[:, :0], 0.0, 0.0
    if shift.counts:
        output_NK = _count(seen, True, shift.window, ids_NK, counts)
        prompt_NK = _count(seen, False, shift.window, ids_NK, counts)
    if shift.touches == "listed":
        value_NK = _spread(*listed, ids_NK, seen.size)
        touched_NK = ~value_NK.isnan()
        value_NK = torch.where(touched_NK, value_NK, 0.0)
    else:
        touched_NK = output_NK > 0 if shift.touches == "output" else prompt_NK + output_NK > 0
    after_NK = one.apply(y_NK, TokenInfo(ids_NK, prompt_NK, output_NK, value_NK))
    return torch.where(touched_NK & (y_NK.abs() < torch.inf), after_NK, y_NK)


def _count(
    seen: TokenWindow, output: bool, window: int | None, ids_NK: torch.Tensor, counts: dict[Any, torch.Tensor]
) -> Any:
    """How often tokens are in the output, or in the prompt, as ``History.counts`` says: floats [N, K]."""
    if window is not None and not output:
        return 0.0  # with a window all tokens count as output
    if (output, window) not in counts:
        last = seen.steps_N1 if window is None else seen.slots.ring if window < 0 else window
        counted_NL = ((seen.back_L <= last) == output).expand(seen.said_NL.shape).to(torch.int32)
        none_NV = counted_NL.new_zeros(len(ids_NK), seen.size + 1)
        found_NK = none_NV.scatter_add(1, seen.said_NL, counted_NL).gather(1, ids_NK)
        counts[output, window] = found_NK.to(seen.slots.floats)
    return counts[output, window]


def _spread(ids_NM: torch.Tensor, values_NM: torch.Tensor, ids_NK: torch.Tensor, size: int) -> torch.Tensor:
    """The numbers of a list by columns, of several of a token the least; NaN for tokens that are not on it."""
    none_NV = values_NM.new_full((len(ids_NM), size + 1), torch.nan)
    return none_NV.scatter_reduce(1, ids_NM, values_NM, "amin", include_self=False).gather(1, ids_NK)


def _listed(one: ShiftInput, seen: TokenWindow) -> tuple[torch.Tensor, torch.Tensor]:
    """The list of a Shift in this step: tokens [N, M], V for none, and their numbers."""
    match one.shift.source:
        case device_row.UNTIL:
            return torch.where(seen.steps_N1 < one.limits[0], one.ids_NM, seen.size), one.values_NM
        case device_row.WORDS:
            output_NL = torch.where(seen.back_L <= seen.steps_N1, seen.said_NL, seen.size)
            ids_NM = ending(one.words_NWT, output_NL, seen.size)
            return ids_NM, one.values_NM.new_full(ids_NM.shape, -torch.inf)
        case device_row.NGRAM:
            again_NL = _repeats(seen) >= one.limits[0] - 1
            ids_NL = torch.where(again_NL, seen.said_NL, seen.size)
            return ids_NL, one.values_NM.new_full(ids_NL.shape, -torch.inf)
        case device_row.REPEATS:
            return _penalised(one, seen)
    return one.ids_NM, one.values_NM


def _repeats(seen: TokenWindow) -> torch.Tensor:
    return seen.slots.repeats_SL.index_select(0, seen.group.slots_N)


def _penalised(one: ShiftInput, seen: TokenWindow) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that extend a repeat, see ``stages.dry``."""
    multiplier, base, room, allowed, last = one.limits
    unbroken_N1 = seen.slots.column(seen.group.slots_N, UNBROKEN)[:, None]
    window_N1 = torch.where(last < 0, seen.slots.ends(seen.group.slots_N)[:, None], last)
    reach_NL = torch.minimum(_repeats(seen), torch.minimum(window_N1 - seen.back_L, unbroken_N1))
    ids_NL = torch.where(reach_NL >= allowed, seen.said_NL, seen.size)
    penalty_NL = multiplier * base ** torch.minimum((reach_NL - allowed).clamp(min=0), room)
    spared_NW = ending(one.words_NWT, seen.said_NL, seen.size)
    spared_NV = torch.zeros(len(ids_NL), seen.size + 1, dtype=torch.bool, device=ids_NL.device)
    spared_NV = spared_NV.scatter(1, spared_NW, torch.ones_like(spared_NW, dtype=torch.bool))
    ids_NL = torch.where(spared_NV.gather(1, ids_NL), seen.size, ids_NL)
    return ids_NL, -penalty_NL.clamp(max=math.exp(LARGEST))


def ending(words_NWT: torch.Tensor, said_NL: torch.Tensor, size: int) -> torch.Tensor:
    """The last tokens of sequences whose earlier ones were said just now: int64 [N, W], V for none."""
    count = words_NWT.shape[2] - 1
    said_NT = torch.nn.functional.pad(said_NL[:, :count].flip(1), (max(0, count - said_NL.shape[1]), 0), value=-2)
    said_NT, before_NWT = torch.where(said_NT == size, -2, said_NT), words_NWT[:, :, :count]
    there_NW = ((before_NWT < 0) | (before_NWT == said_NT[:, None])).all(2)
    return torch.where(there_NW, words_NWT[:, :, count], size)


def follow(group: ShiftGroup, slots: Slots, tokens_N: torch.Tensor, size: int) -> None:
    """Keep up to date which tokens repeat others, after rows went on with a token each, below 0 for none."""
    said_NL, token_N1 = torch.nn.functional.pad(slots.said(group.slots_N)[:, 1:], (0, 1), value=-1), tokens_N[:, None]
    had_NL = slots.repeats_SL.index_select(0, group.slots_N)
    now_NL = torch.where(token_N1 < 0, had_NL, torch.where(said_NL == token_N1, had_NL + 1, 0))
    slots.repeats_SL.index_copy_(0, group.slots_N, now_NL)
    for one in group.shifts:
        if one.shift.source == device_row.REPEATS:
            unbroken_N = slots.column(group.slots_N, UNBROKEN)
            ended_N = (ending(one.words_NWT, said_NL, size) == token_N1).any(1)
            unbroken_N = torch.where(tokens_N < 0, unbroken_N, torch.where(ended_N, 0, unbroken_N + 1))
            slots.columns[UNBROKEN].index_copy_(0, group.slots_N, unbroken_N)


def unbroken(shifts: Sequence[DeviceShift], said: list[int]) -> int:
    """How many tokens were said since the last sequence that no repeat crosses."""
    breakers = {word for one in shifts if one.source == device_row.REPEATS for word in one.words}
    lengths = sorted({*map(len, breakers)})
    for count in range(len(said)):
        end = len(said) - count
        if any(length <= end and tuple(said[end - length : end]) in breakers for length in lengths):
            return count
    return len(said)
