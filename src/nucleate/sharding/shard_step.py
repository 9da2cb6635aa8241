"""Finds the tokens of each row that its draw needs, in two exchanges: summaries of the groups, then candidates.

A row whose summaries or candidates do not suffice gets a reason instead, and is exchanged whole by the caller.

The summaries also have what logprobs need: the mass, the highest tokens and the requested ones of each shard. Ranks of
the sampled tokens take one more exchange, of a count per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.outputs import StepLogprobs, TokenLogprob
from nucleate.sampling import noise
from nucleate.sharding.local_shard import LocalShard, RowShifts, race
from nucleate.sharding.rank_exchange import RankExchange, gather_arrays, padded
from nucleate.sharding.shard_layout import FoundTokens, ShardLayout, exchange_tokens
from nucleate.sharding.shard_plan import (
    CANDIDATES,
    GROUPS,
    MAX_CANDIDATES,
    ROUNDING,
    TOP_P,
    RowPlan,
    candidate_bound,
    left_out,
    top_p_bounds,
    top_p_kept,
)

INVALID = "it has NaN, +inf or no finite score"
HUGE = "its scores are too large to be summarized in float32"
NEAR_TIE = "a decision is too close to a tie"
FLAT = "its top-p may keep tokens of every group"
TOO_MANY = f"more than {MAX_CANDIDATES} tokens of a shard may be kept"

Floats = NDArray[np.float64]


class StepRow(NamedTuple):
    """A row of a step that may need no exchange of the whole row."""

    plan: RowPlan
    shifts: RowShifts | None  #: None if the pipeline begins with no Shift
    key: tuple[int, int]  #: seed and step of the noise of its draw


class ShardStep:
    """One step of B rows. raw_BN: the logits of this rank's shard from id ``first`` on, float32 [B, N], no padding."""

    def __init__(self, exchange: RankExchange, raw_BN: torch.Tensor, first: int, rows: Sequence[StepRow]) -> None:
        self._exchange, self._rows = exchange, rows
        self._exact = [at for at, row in enumerate(rows) if row.plan.path in (TOP_P, GROUPS)]
        """The rows whose masses are needed."""
        self._t_M = np.array([rows[at].plan.t for at in self._exact])
        self._local = LocalShard(raw_BN, first, [row.shifts for row in rows])
        self._local_masses_MP = self._local.masses(self._exact, self._t_M)
        taps = {at: row.plan.tap.request for at, row in enumerate(rows) if row.plan.tap is not None}
        self.logprobs = ShardLogprobs(exchange, raw_BN, first, taps)
        self._layout: ShardLayout
        self._maxima_RBP = np.zeros((0, 0, 0), np.float32)
        self._maxima_BG = np.zeros((0, 0), np.float32)
        self._masses_BG = self._tops_BG = np.zeros((0, 0))
        """Of exact rows: weights relative to the top of the row, of groups and of their highest tokens."""
        self._threshold_B = np.full(len(rows), np.inf, np.float32)
        self._local_k_B, self._group_B = np.zeros(len(rows), np.int64), np.full(len(rows), -1)

    def run(self, layout: ShardLayout) -> list[FoundTokens | str]:
        """The tokens of each row, or why it has to be exchanged whole."""
        self._layout = layout
        self._exchange_summaries()
        whole = {at: why for at in range(len(self._rows)) if (why := self._reason(at))}
        whole |= self._bound({at: row for at, row in enumerate(self._rows) if at not in whole})
        found = exchange_tokens(self._exchange, layout, *self._candidates(), self._capacity())
        return [whole[at] if at in whole else self._final(at, tokens) for at, tokens in enumerate(found)]

    def _exchange_summaries(self) -> None:
        """Gather the maxima of all groups, the masses of those of exact rows, and what logprobs need."""
        most = max(self._layout.pieces)
        masses_MP, maxima_BP = padded(self._local_masses_MP, most, 0.0), padded(self._local.maxima_RP, most, -math.inf)
        send = [masses_MP, *self.logprobs.tensors, maxima_BP]
        masses_RMP, *self.logprobs.received, self._maxima_RBP = gather_arrays(self._exchange, send)()
        self._maxima_BG = self._layout.group_maxima(self._maxima_RBP)
        self._masses_BG, self._tops_BG = np.zeros((2, *self._maxima_BG.shape))
        if self._exact:
            exact_MG, tops_RM = self._maxima_BG[self._exact], self._maxima_RBP[:, self._exact].max(2)
            top_M = exact_MG.max(1).astype(np.float64)
            with np.errstate(all="ignore"):  # of invalid rows
                self._masses_BG[self._exact] = self._layout.group_weights(masses_RMP, tops_RM, top_M, self._t_M)
                self._tops_BG[self._exact] = np.exp((exact_MG - top_M[:, None]) / self._t_M[:, None])

    def _reason(self, at: int) -> str:
        """Why the summaries of a row cannot be used; "" if they can."""
        top, row = float(self._maxima_BG[at].max()), self._rows[at]
        if not -math.inf < top < math.inf:
            return INVALID
        if row.plan.path in (TOP_P, GROUPS):
            if not math.isfinite(self._masses_BG[at].sum()):
                return INVALID
            if row.shifts is not None and abs(top) * 2.0**-24 / row.plan.t > ROUNDING:
                return HUGE
        return ""

    def _bound(self, rows: Mapping[int, StepRow]) -> dict[int, str]:
        """Find the thresholds of rows, or the group of their draw. Returns why some are exchanged whole."""
        whole = {}
        for at, row in rows.items():
            if row.plan.path == CANDIDATES:
                self._threshold_B[at], self._local_k_B[at] = candidate_bound(row.plan, self._maxima_BG[at])
            elif row.plan.path == GROUPS:
                groups_G = np.arange(self._layout.group_count)
                self._group_B[at] = race(groups_G, self._masses_BG[at], row.key, noise.GROUP)
                if self._group_B[at] < 0:
                    whole[at] = NEAR_TIE
        mine = [at for at, row in rows.items() if row.plan.path == TOP_P]
        if mine:
            fractions = np.array([left_out(rows[at].plan) for at in mine])
            groups = top_p_bounds(fractions, self._masses_BG[mine], self._tops_BG[mine])
            for at, group in zip(mine, groups.tolist(), strict=True):
                if group < 0:
                    whole[at] = FLAT
                else:
                    self._threshold_B[at] = self._maxima_BG[at, group]
        return whole

    def _candidates(self) -> tuple[NDArray[np.int64], torch.Tensor, torch.Tensor]:
        """This rank's tokens that reach the thresholds, or may win a draw in a selected group; see exchange_tokens."""
        counts_B, columns_K, raw_K = self._local.above(self._threshold_B, self._local_k_B)
        if (counts_B > MAX_CANDIDATES).any():
            stays_K = torch.from_numpy(np.repeat(counts_B <= MAX_CANDIDATES, counts_B)).to(columns_K.device)
            columns_K, raw_K = columns_K[stays_K], raw_K[stays_K]
            counts_B = np.where(counts_B > MAX_CANDIDATES, -1, counts_B)
        mine = np.flatnonzero(self._layout.holds(self._exchange.rank, self._group_B)).tolist()
        if not mine:
            return counts_B, columns_K, raw_K
        drawn = [(at, int(self._group_B[at]), self._rows[at].plan.t, self._rows[at].key) for at in mine]
        tokens = [self._local.contenders(*one) for one in drawn]
        order = np.concatenate(
            [
                np.repeat(np.arange(len(counts_B)), np.maximum(counts_B, 0)),
                *(np.full(len(ids), at) for at, (ids, _) in zip(mine, tokens, strict=True)),
            ]
        )
        by_row_K = torch.from_numpy(np.argsort(order, kind="stable")).to(columns_K.device)
        columns_K = torch.cat([columns_K, *(torch.from_numpy(ids).to(columns_K.device) for ids, _ in tokens)])[by_row_K]
        raw_K = torch.cat([raw_K, *(torch.from_numpy(raw).to(raw_K.device) for _, raw in tokens)])[by_row_K]
        counts_B[mine] = [len(ids) for ids, _ in tokens]
        return counts_B, columns_K, raw_K

    def _capacity(self) -> int:
        """For how many tokens of a rank the exchange has room at first: the same number on all ranks."""
        reached_RB = (self._maxima_RBP >= self._threshold_B[:, None]).sum(2)
        drawn_R = [self._layout.holds(rank, self._group_B).sum() for rank in range(self._exchange.size)]
        best_R = [np.minimum(self._local_k_B, count).sum() for count in self._layout.counts]
        return int(max(1.25 * reached_RB.sum(1) + np.array(drawn_R) + np.array(best_R))) + 8

    def _final(self, at: int, tokens: FoundTokens | None) -> FoundTokens | str:
        """The tokens without those that a top-p removes."""
        plan, shifts, _ = self._rows[at]
        if tokens is None:
            return TOO_MANY
        if plan.path != TOP_P:
            return tokens
        x_N: Any = tokens.raw_N.astype(np.float64)
        if shifts is not None:
            x_N = shifts.apply(x_N, tokens.ids_N)
        top32 = float(self._maxima_BG[at].max())
        with np.errstate(over="ignore"):
            total = self._masses_BG[at].sum() * math.exp(min((top32 - x_N.max()) / plan.t, 700.0))
        kept_N = top_p_kept(plan, x_N, total)
        return NEAR_TIE if kept_N is None else FoundTokens(tokens.ids_N[kept_N], tokens.raw_N[kept_N])


Request = tuple[int, tuple[int, ...]]
"""How many of the most likely tokens, and which others, as in ``Tap.request``."""


class ShardLogprobs:
    """The logprobs of some rows of a step. raw_BN, first: the shard's logits. requests: by index of the row."""

    def __init__(
        self, exchange: RankExchange, raw_BN: torch.Tensor, first: int, requests: Mapping[int, Request]
    ) -> None:
        self._exchange, self._first, self._requests = exchange, first, requests
        self._raw_TN = raw_BN[list(requests)] if requests else raw_BN[:0]
        self._most = max((count for count, _ in requests.values()), default=0)
        self._others = max((len(ids) for _, ids in requests.values()), default=0)
        self.tensors = self._summaries() if requests else []
        self.received: list[NDArray[Any]] = []
        """``tensors`` of all ranks."""

    def _summaries(self) -> list[torch.Tensor]:
        """Of each row: maximum and sum of exp(x - maximum); the highest tokens, with scores; the requested scores."""
        rows, device = len(self._requests), self._raw_TN.device
        sums_T2 = torch.full((rows, 2), -torch.inf, dtype=torch.float64, device=device)
        ids_TN = torch.zeros((rows, self._most), dtype=torch.int32)
        x_TN, x_TQ = torch.full((rows, self._most), -torch.inf), torch.full((rows, self._others), -torch.inf)
        if self._raw_TN.shape[1]:
            exact_TN = self._raw_TN.double()
            sums_T2[:, 0] = exact_TN.amax(1)
            sums_T2[:, 1] = torch.exp(exact_TN - exact_TN.amax(1, keepdim=True)).sum(1)
            for at, (count, others) in enumerate(self._requests.values()):
                ids_N, x_N = self._highest(self._raw_TN[at], count)
                ids_TN[at, : len(ids_N)], x_TN[at, : len(ids_N)] = ids_N, x_N
                for place, token in enumerate(others):
                    if 0 <= token - self._first < self._raw_TN.shape[1]:
                        x_TQ[at, place] = self._raw_TN[at, token - self._first]
        return [sums_T2, ids_TN, x_TN, x_TQ]

    def _highest(self, raw_N: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids and scores of the first tokens in rank order."""
        if not count or not raw_N.max() < torch.inf:
            return torch.zeros(0, dtype=torch.int32), torch.zeros(0)
        lowest = raw_N.topk(min(count, len(raw_N))).values[-1]
        at_N = (raw_N >= lowest).nonzero().flatten().cpu()  # at least ``count``: topk does not order equal scores
        x_N = raw_N[at_N.to(raw_N.device)].cpu()
        order_N = torch.argsort(x_N, descending=True, stable=True)[:count]
        return (at_N[order_N] + self._first).to(torch.int32), x_N[order_N]

    def report(self, sampled: Mapping[int, tuple[int, float]]) -> dict[int, StepLogprobs]:
        """The logprobs of rows, from their sampled tokens and the logits of these. Exchanges the tokens' ranks."""
        if not sampled:
            return {}
        sums_RT2, ids_RTN, x_RTN, x_RTQ = self.received
        places = {row: place for place, row in enumerate(self._requests)}
        asked = {
            row: [chosen, *zip(self._requests[row][1], x_RTQ[:, places[row]].max(0).tolist(), strict=False)]
            for row, chosen in sampled.items()
        }
        ahead = iter(self._ahead([(places[row], *one) for row, tokens in asked.items() for one in tokens]))
        results = {}
        for row, tokens in asked.items():
            place, count = places[row], self._requests[row][0]
            top_R, mass_R = sums_RT2[:, place].T
            top, has_R = top_R.max(), top_R > -np.inf
            log_mass = np.log((np.exp(top_R[has_R] - top) * mass_R[has_R]).sum())
            ids_N, x_N = ids_RTN[:, place].ravel(), x_RTN[:, place].ravel().astype(np.float64)
            order_N = [at for at in np.lexsort((ids_N, -x_N)) if x_N[at] > -np.inf][:count]
            best = [
                TokenLogprob(int(ids_N[at]), float(x_N[at] - top - log_mass), n + 1) for n, at in enumerate(order_N)
            ]
            others = []
            for token, x in tokens:
                rank = next(ahead) + 1
                others.append(TokenLogprob(int(token), float(x - top - log_mass), rank if x > -np.inf else None))
            results[row] = StepLogprobs(others[0], tuple(best), tuple(others[1:]))
        return results

    def _ahead(self, tokens: list[tuple[int, int, float]]) -> list[int]:
        """The number of tokens before each of some tokens in the order of their row: (row, id, score)."""
        counts = torch.zeros(len(tokens), dtype=torch.int64)
        for at, (row, token, x) in enumerate(tokens):
            raw_N = self._raw_TN[row]
            split = min(max(token - self._first, 0), len(raw_N))  # equal scores come first if their id is lower
            counts[at] = int((raw_N[:split] >= x).sum() + (raw_N[split:] > x).sum())
        [counts_RN] = gather_arrays(self._exchange, [counts])()
        return [int(count) for count in counts_RN.sum(0)]
