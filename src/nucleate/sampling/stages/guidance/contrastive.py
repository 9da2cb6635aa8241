"""Contrastive decoding (Li et al., arXiv 2210.15097), with the parameters of its authors' code."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import INFINITY, SLACK, log, log_softmax, where
from nucleate.sampling.stage import MAX_WEIGHT, Combine, param


class Contrastive(Combine):
    """Prefer tokens that the model finds more likely than a weaker companion model (contrastive decoding)."""

    companion_model = True
    beta: float = param(
        "Weight of the companion model's log-probabilities, which are subtracted; 1 as in the paper",
        neutral=0.0,
        low=0.0,
        high=MAX_WEIGHT,
        name="contrastive_beta",
    )
    alpha: float = param(
        "Plausibility: minimum probability, relative to the model's most likely token",
        default=0.1,
        low=0.0,
        high=1.0,
        open_low=True,
        name="contrastive_alpha",
    )
    tau: float = param(
        "Temperature of the companion model", default=1.0, low=1 / MAX_WEIGHT, name="contrastive_temperature"
    )

    def apply(self, x: Any, other: Any) -> Any:
        plausible = x >= x.max() + (log(self.alpha) - SLACK)
        other = other if self.tau == 1.0 else log_softmax(other / self.tau)
        return where(plausible, x - self.beta * other, -INFINITY)
