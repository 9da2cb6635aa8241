"""Logprobs of rows whose logits are sharded, at the beginning of the pipeline.

The summaries of a step have the mass, the highest tokens and the requested ones of each shard. Ranks of the sampled
tokens take one more exchange, of a count per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.outputs import StepLogprobs, TokenLogprob
from nucleate.sharding.rank_exchange import Field, RankExchange, pack, unpack

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
        self._sums_RT2 = np.zeros((0, 0, 2))
        self.tensors = self._summaries() if requests else []
        self._ids_RTN, self._x_RTN, self._x_RTQ = np.zeros((0, 0, 0), int), np.zeros((0, 0, 0)), np.zeros((0, 0, 0))

    def fields(self) -> list[Field]:
        """The fields of ``tensors``."""
        rows, most, others = len(self._requests), self._most, self._others
        if not rows:
            return []
        return [
            (np.float64, (rows, 2)),
            (np.int32, (rows, most)),
            (np.float32, (rows, most)),
            (np.float32, (rows, others)),
        ]

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

    def read(self, arrays: list[NDArray[Any]]) -> None:
        """Store the tensors of all ranks."""
        if self._requests:
            self._sums_RT2, self._ids_RTN, self._x_RTN, self._x_RTQ = arrays

    def report(self, sampled: Mapping[int, tuple[int, float]]) -> dict[int, StepLogprobs]:
        """The logprobs of rows, from their sampled tokens and the logits of these. Exchanges the tokens' ranks."""
        places = {row: place for place, row in enumerate(self._requests)}
        asked = {
            row: [chosen, *zip(self._requests[row][1], self._x_RTQ[:, places[row]].max(0).tolist(), strict=False)]
            for row, chosen in sampled.items()
        }
        ahead = iter(self._ahead([(places[row], *one) for row, tokens in asked.items() for one in tokens]))
        results = {}
        for row, tokens in asked.items():
            place, count = places[row], self._requests[row][0]
            top_R, mass_R = self._sums_RT2[:, place].T
            top, has_R = top_R.max(), top_R > -np.inf
            log_mass = np.log((np.exp(top_R[has_R] - top) * mass_R[has_R]).sum())
            ids_N, x_N = self._ids_RTN[:, place].ravel(), self._x_RTN[:, place].ravel().astype(np.float64)
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
        if not tokens:
            return []
        counts = torch.zeros(len(tokens), dtype=torch.int64)
        for at, (row, token, x) in enumerate(tokens):
            raw_N = self._raw_TN[row]
            split = min(max(token - self._first, 0), len(raw_N))  # equal scores come first if their id is lower
            counts[at] = int((raw_N[:split] >= x).sum() + (raw_N[split:] > x).sum())
        [counts_RN] = unpack(
            self._exchange.gather(pack([counts], self._exchange.device))(), [(np.int64, (len(tokens),))]
        )
        return [int(count) for count in counts_RN.sum(0)]
