"""One call of a ShardedSampler: samples some rows from exchanged tokens, and the others from whole rows."""

from __future__ import annotations

import numpy as np
import torch

from nucleate.sharding.rank_exchange import RankExchange
from nucleate.sharding.shard_layout import ShardLayout, gather_rows
from nucleate.sharding.shard_plan import WHOLE, RowPlan
from nucleate.sharding.shard_rows import Masks, SampledRows, ShardRows, sampled_rows
from nucleate.sharding.shard_step import ShardStep, StepRow


class ShardedCall:
    """A call for some rows. logits_RN: the logits of this rank's shard, from id ``first`` on.

    Computes what needs no other rank; ``run`` exchanges.
    """

    def __init__(
        self,
        exchange: RankExchange,
        rows: ShardRows,
        logits_RN: torch.Tensor,
        first: int,
        numbers: list[int],
        masks_R: Masks,
    ) -> None:
        self._exchange, self._rows, self._logits_RN = exchange, rows, logits_RN
        self._numbers, self._masks_R = numbers, masks_R
        self._step_rows: dict[int, StepRow] = {}
        self.whole: dict[int, str] = {}
        """The rows that are exchanged whole, by index, with the reason."""
        for at, (row, mask_W) in enumerate(zip(numbers, masks_R, strict=True)):
            step_row = rows.step_row(row, mask_W)
            if isinstance(step_row, str):
                self.whole[at] = step_row
            else:
                self._step_rows[at] = step_row
        self._places = list(self._step_rows)
        if self._places:
            count = max(0, min(first + logits_RN.shape[1], rows.sampler.vocab_size) - first)
            part_BN = logits_RN if len(self._places) == len(numbers) else logits_RN[self._places]
            raw_BN = part_BN[:, :count].float().contiguous()
            self._step = ShardStep(exchange, raw_BN, first, [*self._step_rows.values()])

    def run(self, layout: ShardLayout, companion_RN: torch.Tensor | None) -> SampledRows:
        """The results, by index."""
        result = SampledRows({}, {}, {})
        if self._places:
            self._sample_found(layout, result)
        if self.whole:
            self._sample_whole(layout, sorted(self.whole), companion_RN, result)
        return result

    def _sample_found(self, layout: ShardLayout, result: SampledRows) -> None:
        places = self._places
        tokens = dict(enumerate(self._step.run(layout)))
        self.whole |= {places[at]: why for at, why in tokens.items() if isinstance(why, str)}
        found = {at: one for at, one in tokens.items() if not isinstance(one, str)}
        mine = [places[at] for at in found]
        rows, masks_R = [self._numbers[at] for at in mine], [self._masks_R[at] for at in mine]
        result.include(self._rows.sample(rows, [*found.values()], masks_R), mine)
        reporting = {
            at: (token, float(one.raw_N[np.searchsorted(one.ids_N, token)]))
            for at, one in found.items()
            if self._step_rows[places[at]].plan.tap is not None and (token := result.tokens.get(places[at], -1)) >= 0
        }
        if reporting:
            result.logprobs.update({places[at]: one for at, one in self._step.logprobs.report(reporting).items()})

    def _sample_whole(
        self, layout: ShardLayout, places: list[int], companion_RN: torch.Tensor | None, result: SampledRows
    ) -> None:
        logits_RV = gather_rows(self._exchange, layout, self._logits_RN[places])
        other_RV = None if companion_RN is None else gather_rows(self._exchange, layout, companion_RN[places])
        rows, masks_R = [self._numbers[at] for at in places], [self._masks_R[at] for at in places]
        sampled = sampled_rows(self._rows.sampler, logits_RV, rows, masks_R, other_RV)
        result.include(sampled, places)
        for at, token in sampled.tokens.items():
            self._rows.follow(rows[at], token)


def described(plan: RowPlan, why: str) -> str:
    """What is exchanged for a row, and why if it is the whole row."""
    return f"{WHOLE}: {why}" if why else plan.path
