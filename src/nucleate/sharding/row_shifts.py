"""The Shifts at the beginning of a row's pipeline, applied to some of its tokens: those of a shard, or candidates.

The rules are those of the stages, evaluated in float64 as by the reference backend, so the scores are the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling.dispatch.rules import bans_tokens
from nucleate.sampling.history import HistoryView, Ids
from nucleate.sampling.reference import checked_values
from nucleate.sampling.stage import Shift, TokenInfo

Floats = NDArray[np.float64]


class _Inputs(NamedTuple):
    """What a Shift reads in this step."""

    shift: Shift
    seen: tuple[Ids, Ids, Ids]  #: the tokens that occurred, ascending, with their counts in prompt and output
    listed: tuple[Ids, Floats]  #: the listed tokens, ascending, with their values
    value_V: Any  #: of ``touches = "all"``


class RowShifts:
    """The Shifts of one row in one step.

    past: the history; mask_W: the bitmask of the step, applied where a Mask is; size: V. Raises what the stages raise,
    and ValueError for listed tokens outside the vocabulary.
    """

    def __init__(
        self, shifts: tuple[Shift, ...], past: HistoryView, mask_W: NDArray[np.int32] | None, size: int
    ) -> None:
        self._mask_W, self._inputs = mask_W, [_inputs(shift, past, size) for shift in shifts]
        dense = [one for one in self._inputs if one.shift.touches not in ("seen", "output", "listed")]
        self._bans = [one for one in dense if one.shift.touches != "all" and bans_tokens(one.shift)]
        self._touches_all = len(self._bans) < len(dense)

    def touched(self, first: int, end: int) -> Ids:
        """The ids from first to end whose scores ``apply`` has to compute; ``banned`` has the others that change."""
        if self._touches_all:
            return np.arange(first, end)
        kinds = {
            "seen": lambda one: one.seen[0],
            "output": lambda one: one.seen[0],
            "listed": lambda one: one.listed[0],
        }
        found = [kinds[one.shift.touches](one) for one in self._inputs if one.shift.touches in kinds]
        ids_N = np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)
        return ids_N[(ids_N >= first) & (ids_N < end)]

    def banned(self, first: int, end: int) -> NDArray[np.bool_] | None:
        """Which of the ids from first to end are banned by a bitmask or a list of allowed tokens; None: none."""
        if not self._bans:
            return None
        token, banned_N = TokenInfo(np.arange(first, end), 0, 0, 0), np.zeros(end - first, bool)
        for one in self._bans:
            banned_N |= self._touches(one, token)
        return banned_N

    def apply(self, x_N: NDArray[Any], ids_N: Ids) -> Floats:
        """The scores of some tokens after the Shifts. ids_N: ascending. Raises ValueError for a NaN or +inf."""
        x_N = np.asarray(x_N, np.float64)
        with np.errstate(all="ignore"):
            for one in self._inputs:
                shift, (seen, prompt, output) = one.shift, one.seen
                value_N = one.value_V[ids_N] if np.ndim(one.value_V) else one.value_V
                prompt_N, output_N = _spread(seen, prompt, ids_N), _spread(seen, output, ids_N)
                token = TokenInfo(ids_N, prompt_N, output_N, _spread(*one.listed, ids_N), value_N)
                shifted_N = shift.apply(x_N, token)
                if shift.touches == "all":
                    shifted_N = np.asarray(shifted_N, np.float32).astype(np.float64)
                x_N = np.where(self._touches(one, token) & (x_N > -np.inf), shifted_N, x_N)
                if not (x_N < np.inf).all():
                    raise ValueError(f"NaN or +inf after {shift.name}")
        return x_N

    def _touches(self, one: _Inputs, token: TokenInfo) -> NDArray[np.bool_]:
        """Which of some tokens a Shift touches."""
        touched_N: NDArray[np.bool_] = np.ones(len(token.id), bool)
        match one.shift.touches:
            case "seen":
                touched_N = token.prompt_count + token.output_count > 0
            case "output":
                touched_N = token.output_count > 0
            case "listed":
                touched_N = np.isin(token.id, one.listed[0])
            case "unlisted":
                touched_N = ~np.isin(token.id, one.listed[0])
            case "masked":
                words_N = -1 if self._mask_W is None else self._mask_W[token.id >> 5]
                touched_N = (words_N >> (token.id & 31)) & 1 == 0
        return touched_N


def _inputs(shift: Shift, past: HistoryView, size: int) -> _Inputs:
    ids_K, prompt_K, output_K = past.counts(shift.window)
    order_K = np.argsort(ids_K)
    listing = past.listing(shift)
    listed_N, value_N = np.fromiter(listing, np.int64, len(listing)), np.fromiter(listing.values(), float, len(listing))
    order_N = np.argsort(listed_N)
    if len(listed_N) and not 0 <= listed_N[order_N[0]] <= listed_N[order_N[-1]] < size:
        raise ValueError("a listed token is outside the vocabulary")
    value_V = checked_values(shift, past.values(shift, size), size) if shift.touches == "all" else 0.0
    seen = ids_K[order_K], prompt_K[order_K], output_K[order_K]
    return _Inputs(shift, seen, (listed_N[order_N], value_N[order_N]), value_V)


def _spread(ids_K: Ids, value_K: NDArray[Any], ids_N: Ids) -> Floats:
    """The values of ids_K at the places of the same ids in ids_N, 0 elsewhere. Both are ascending."""
    result_N = np.zeros(len(ids_N))
    if len(ids_K) and len(ids_N):
        at_K = np.minimum(np.searchsorted(ids_N, ids_K), len(ids_N) - 1)
        found_K = ids_N[at_K] == ids_K
        result_N[at_K[found_K]] = value_K[found_K]
    return result_N
