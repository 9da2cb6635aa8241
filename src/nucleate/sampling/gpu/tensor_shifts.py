"""Applies the leading Shifts of rows (penalties, bias, bans) by torch operations, without synchronising.

Rows with the same Shifts in the same order form a group. Rules run on the K tokens that any Shift of the group may
touch, with duplicates, which get equal scores. N: rows of the group, L: tokens of the ring buffer, latest first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from nucleate.sampling import signature
from nucleate.sampling.gpu.ranked_tokens import BoundAttributes
from nucleate.sampling.gpu.torch_device import SINCE_BREAKER, STEP, Slots, to_device
from nucleate.sampling.signature import DeviceShift
from nucleate.sampling.stage import TokenInfo
from nucleate.sampling.stages.penalties.dry import LARGEST, BreakerMatcher


class ShiftInput(NamedTuple):
    """One Shift of a group, with the parameters and lists of its rows."""

    shift: DeviceShift  #: of the first row; see ``DeviceShift.group_key``
    apply: Callable[..., Any]  #: its rule, bound to the parameters of the rows
    list_params: tuple[torch.Tensor, ...]  #: ``DeviceShift.list_params``, [N, 1] each
    ids_NM: torch.Tensor  #: int64, token ids of constant lists, padded with V
    values_NM: torch.Tensor  #: their values
    words_NWT: torch.Tensor  #: int64, token sequences, padded with -1 on the left


class ShiftGroup(NamedTuple):
    """Rows of a call with the same Shifts, in the same order."""

    positions_N: torch.Tensor | None  #: of the rows in the call; None: all rows
    slots_N: torch.Tensor
    shifts: tuple[ShiftInput, ...]

    @property
    def reads_history(self) -> bool:
        return any(one.shift.uses_counts or one.shift.tracks_repeats or one.shift.words for one in self.shifts)

    @property
    def tracks_repeats(self) -> bool:
        return any(one.shift.tracks_repeats for one in self.shifts)


class TokenWindow(NamedTuple):
    """The last tokens of the rows of a group."""

    slots: Slots
    group: ShiftGroup
    size: int  #: V
    tokens_NL: torch.Tensor  #: int64, latest first, padded with V
    distance_L: torch.Tensor  #: their distance from the end, from 1
    steps_N1: torch.Tensor  #: number of output tokens


def groups_of(
    rows: Sequence[tuple[DeviceShift, ...]], slots: Sequence[int], size: int, floats: torch.dtype, device: Any
) -> list[ShiftGroup]:
    """Group the rows of a call by their Shifts. Rows without Shifts are in no group."""
    by_key: dict[Any, list[int]] = {}
    for position, row in enumerate(rows):
        if row:
            by_key.setdefault(tuple(one.group_key for one in row), []).append(position)
    groups = []
    for positions in by_key.values():
        columns = zip(*(rows[position] for position in positions), strict=True)
        shifts = tuple(_bind_shift(shifts_of_rows, size, floats, device) for shifts_of_rows in columns)
        where, slots_N = to_device([positions, [slots[position] for position in positions]], device)
        groups.append(ShiftGroup(None if len(positions) == len(rows) else where, slots_N, shifts))
    return groups


def _bind_shift(rows: Sequence[DeviceShift], size: int, floats: torch.dtype, device: Any) -> ShiftInput:
    def columns(values: Sequence[Sequence[float]]) -> tuple[torch.Tensor, ...]:
        return tuple(to_device(torch.tensor(values, dtype=floats).view(len(values), -1), device).split(1, 1))

    first = rows[0]
    ids = padded([[*one.listing] for one in rows], size)
    values = torch.zeros(ids.shape, dtype=floats)
    for row, one in enumerate(rows):
        values[row, : len(one.listing)] = torch.tensor([*one.listing.values()], dtype=floats)
    length = max((len(word) for one in rows for word in one.words), default=1)
    words = [[(-1,) * (length - len(word)) + word for word in one.words] for one in rows]
    count = max(map(len, words))
    words_NWT = torch.tensor([[*row, *[(-1,) * (length - 1) + (size,)] * (count - len(row))] for row in words])
    words_NWT = words_NWT.to(torch.int64).view(len(rows), count, length).clamp(max=size)
    params = dict(zip(first.param_names, columns([one.params for one in rows]), strict=False))
    attributes: Any = BoundAttributes({**params, **dict(first.switches)})
    return ShiftInput(
        first, partial(first.kind.apply, attributes), columns([one.list_params for one in rows]),
        *(to_device(tensor, device) for tensor in (ids, values, words_NWT)),
    )  # fmt: skip


def padded(lists: Sequence[Sequence[int]], padding: int) -> torch.Tensor:
    """Lists of integers as int64 [R, K]. Larger integers are replaced by the padding, if that is not negative."""
    longest = max(map(len, lists), default=0)
    rows = [[*ids, *[padding] * (longest - len(ids))] for ids in lists]
    ids_RK = torch.tensor(rows, dtype=torch.int64).view(len(lists), longest)
    return ids_RK if padding < 0 else ids_RK.clamp(max=padding)


def apply_shifts(group: ShiftGroup, slots: Slots, x_RV: torch.Tensor) -> torch.Tensor:
    """Apply the Shifts of a group to the scores of a call. Scores that are not finite stay."""
    size, x_NV = x_RV.shape[1], x_RV
    if group.positions_N is not None:
        x_NV = x_RV.index_select(0, group.positions_N)
    window = _token_window(group, slots, size)
    lists = [_list_of(one, window) for one in group.shifts]
    constant = (ids_NM for one, (ids_NM, _) in zip(group.shifts, lists, strict=True) if not one.shift.tracks_repeats)
    ids_NK = torch.cat([window.tokens_NL, *constant], 1)
    padded_NV = torch.nn.functional.pad(x_NV, (0, 1))  # column V is a dummy for padding
    y_NK = padded_NV.gather(1, ids_NK).to(slots.floats)
    counts: dict[Any, torch.Tensor] = {}
    for one, listing in zip(group.shifts, lists, strict=True):
        y_NK = _apply_shift(one, window, listing, ids_NK, y_NK, counts)
    y_NV = padded_NV.scatter(1, ids_NK, y_NK.to(x_NV.dtype))[:, :-1]
    return y_NV if group.positions_N is None else x_RV.index_copy(0, group.positions_N, y_NV)


def _token_window(group: ShiftGroup, slots: Slots, size: int) -> TokenWindow:
    steps_N1 = slots.gather_column(group.slots_N, STEP)[:, None]
    if not group.reads_history:
        return TokenWindow(slots, group, size, steps_N1[:, :0], steps_N1[0, :0], steps_N1)
    tokens_NL = slots.last_tokens(group.slots_N)
    distance_L = torch.arange(1, slots.ring_size + 1, device=slots.device)
    return TokenWindow(slots, group, size, torch.where(tokens_NL < 0, size, tokens_NL), distance_L, steps_N1)


def _apply_shift(
    one: ShiftInput,
    window: TokenWindow,
    listing: tuple[torch.Tensor, torch.Tensor],
    ids_NK: torch.Tensor,
    y_NK: torch.Tensor,
    counts: dict[Any, torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """The scores of K tokens after a Shift."""
    shift, value_NK, prompt_NK, output_NK = one.shift, y_NK[:, :0], 0.0, 0.0
    if shift.uses_counts:
        output_NK = _token_counts(window, True, shift.window, ids_NK, counts)
        prompt_NK = _token_counts(window, False, shift.window, ids_NK, counts)
    if shift.touches == "listed":
        value_NK = _scatter_list(*listing, ids_NK, window.size)
        touched_NK = ~value_NK.isnan()
        value_NK = torch.where(touched_NK, value_NK, 0.0)
    else:
        touched_NK = output_NK > 0 if shift.touches == "output" else prompt_NK + output_NK > 0
    after_NK = one.apply(y_NK, TokenInfo(ids_NK, prompt_NK, output_NK, value_NK))
    return torch.where(touched_NK & (y_NK.abs() < torch.inf), after_NK, y_NK)


def _token_counts(
    window: TokenWindow, output: bool, last_n: int | None, ids_NK: torch.Tensor, counts: dict[Any, torch.Tensor]
) -> Any:
    """Occurrences of tokens in output or prompt, as in ``History.counts``: float [N, K]. counts: a cache."""
    if last_n is not None and not output:
        return 0.0  # with a window all tokens count as output
    if (output, last_n) not in counts:
        count = window.steps_N1 if last_n is None else window.slots.ring_size if last_n < 0 else last_n
        counted_NL = ((window.distance_L <= count) == output).expand(window.tokens_NL.shape).to(torch.int32)
        none_NV = counted_NL.new_zeros(len(ids_NK), window.size + 1)
        found_NK = none_NV.scatter_add(1, window.tokens_NL, counted_NL).gather(1, ids_NK)
        counts[output, last_n] = found_NK.to(window.slots.floats)
    return counts[output, last_n]


def _scatter_list(ids_NM: torch.Tensor, values_NM: torch.Tensor, ids_NK: torch.Tensor, size: int) -> torch.Tensor:
    """The values of a list for K tokens, the minimum of duplicates; NaN for tokens that are not listed."""
    none_NV = values_NM.new_full((len(ids_NM), size + 1), torch.nan)
    return none_NV.scatter_reduce(1, ids_NM, values_NM, "amin", include_self=False).gather(1, ids_NK)


def _list_of(one: ShiftInput, window: TokenWindow) -> tuple[torch.Tensor, torch.Tensor]:
    """The list of a Shift in this step: token ids [N, M], padded with V, and their values."""
    match one.shift.source:
        case signature.MIN_TOKENS:
            return torch.where(window.steps_N1 < one.list_params[0], one.ids_NM, window.size), one.values_NM
        case signature.BAD_WORDS:
            output_NL = torch.where(window.distance_L <= window.steps_N1, window.tokens_NL, window.size)
            ids_NM = completing_tokens(one.words_NWT, output_NL, window.size)
            return ids_NM, one.values_NM.new_full(ids_NM.shape, -torch.inf)
        case signature.NGRAM:
            repeats_NL = _repeat_lengths(window) >= one.list_params[0] - 1
            ids_NL = torch.where(repeats_NL, window.tokens_NL, window.size)
            return ids_NL, one.values_NM.new_full(ids_NL.shape, -torch.inf)
        case signature.DRY:
            return _dry_list(one, window)
    return one.ids_NM, one.values_NM


def _repeat_lengths(window: TokenWindow) -> torch.Tensor:
    return window.slots.repeat_lengths_SL.index_select(0, window.group.slots_N)


def _dry_list(one: ShiftInput, window: TokenWindow) -> tuple[torch.Tensor, torch.Tensor]:
    """The list of DRY: tokens that would extend a repetition, with their penalties."""
    multiplier, base, max_exponent, allowed, last = one.list_params
    since_breaker_N1 = window.slots.gather_column(window.group.slots_N, SINCE_BREAKER)[:, None]
    window_N1 = torch.where(last < 0, window.slots.lengths(window.group.slots_N)[:, None], last)
    reach_NL = torch.minimum(_repeat_lengths(window), torch.minimum(window_N1 - window.distance_L, since_breaker_N1))
    ids_NL = torch.where(reach_NL >= allowed, window.tokens_NL, window.size)
    penalty_NL = multiplier * base ** torch.minimum((reach_NL - allowed).clamp(min=0), max_exponent)
    breakers_NW = completing_tokens(one.words_NWT, window.tokens_NL, window.size)
    is_breaker_NV = torch.zeros(len(ids_NL), window.size + 1, dtype=torch.bool, device=ids_NL.device)
    is_breaker_NV = is_breaker_NV.scatter(1, breakers_NW, torch.ones_like(breakers_NW, dtype=torch.bool))
    ids_NL = torch.where(is_breaker_NV.gather(1, ids_NL), window.size, ids_NL)
    return ids_NL, -penalty_NL.clamp(max=math.exp(LARGEST))


def completing_tokens(words_NWT: torch.Tensor, tokens_NL: torch.Tensor, size: int) -> torch.Tensor:
    """The last tokens of the sequences whose other tokens end the history: int64 [N, W]; V for the others."""
    count = words_NWT.shape[2] - 1
    tokens_NT = torch.nn.functional.pad(tokens_NL[:, :count].flip(1), (max(0, count - tokens_NL.shape[1]), 0), value=-2)
    tokens_NT, before_NWT = torch.where(tokens_NT == size, -2, tokens_NT), words_NWT[:, :, :count]
    matches_NW = ((before_NWT < 0) | (before_NWT == tokens_NT[:, None])).all(2)
    return torch.where(matches_NW, words_NWT[:, :, count], size)


def update_repeats(group: ShiftGroup, slots: Slots, tokens_N: torch.Tensor, size: int) -> None:
    """Update ``Slots.repeat_lengths_SL`` and SINCE_BREAKER after a token was appended to each row; -1 for none."""
    tokens_NL = torch.nn.functional.pad(slots.last_tokens(group.slots_N)[:, 1:], (0, 1), value=-1)
    token_N1 = tokens_N[:, None]
    old_NL = slots.repeat_lengths_SL.index_select(0, group.slots_N)
    new_NL = torch.where(token_N1 < 0, old_NL, torch.where(tokens_NL == token_N1, old_NL + 1, 0))
    slots.repeat_lengths_SL.index_copy_(0, group.slots_N, new_NL)
    for one in group.shifts:
        if one.shift.source == signature.DRY:
            since_breaker_N = slots.gather_column(group.slots_N, SINCE_BREAKER)
            is_breaker_N = (completing_tokens(one.words_NWT, tokens_NL, size) == token_N1).any(1)
            new_N = torch.where(is_breaker_N, 0, since_breaker_N + 1)
            since_breaker_N = torch.where(tokens_N < 0, since_breaker_N, new_N)
            slots.columns[SINCE_BREAKER].index_copy_(0, group.slots_N, since_breaker_N)


def tokens_since_breaker(shifts: Sequence[DeviceShift], tokens: list[int]) -> int:
    """Number of tokens since the last DRY sequence breaker."""
    breakers = [word for one in shifts if one.source == signature.DRY for word in one.words]
    return BreakerMatcher(breakers).since_breaker(tokens) if breakers else len(tokens)
