"""XTC, "exclude top choices" (p-e-w, https://github.com/oobabooga/text-generation-webui/pull/6335)."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, log
from nucleate.sampling.stage import Ceiling, RowStats, min_keep_parameter, param


class Xtc(Ceiling):
    """With a given probability per step, remove all tokens above a threshold except the least likely of them."""

    rank = 80
    probability: float = param(
        "Probability, per step, of removing the top choices; 0: off",
        neutral=0.0,
        low=0.0,
        high=1.0,
        name="xtc_probability",
    )
    threshold: float = param(
        "Minimum probability of the tokens that are removed", default=0.1, low=0.0, high=0.5, name="xtc_threshold"
    )
    exempt: tuple[int, ...] = param("Token ids that are never removed", default=(), low=0, name="xtc_exempt_token_ids")
    min_keep: int = min_keep_parameter()

    @property
    def act_probability(self) -> float:
        return self.probability

    @property
    def exempt_ids(self) -> tuple[int, ...]:
        return self.exempt

    def ceiling(self, row: RowStats) -> Any:
        return row.top + log(row.mass) + log(self.threshold) - SLACK
