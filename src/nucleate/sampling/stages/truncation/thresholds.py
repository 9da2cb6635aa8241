"""Truncations by a threshold.

Top-n-sigma: Tang et al., arXiv 2411.07641; in standard deviations, so that it is independent of temperature. Min-p:
Nguyen et al., arXiv 2407.01082. Top-a: BlinkDL, in KoboldAI; rises with the square of the highest probability. Epsilon
and eta: Hewitt, Manning, Liang, Truncation sampling as language model desmoothing, arXiv 2210.15191. P-less: arXiv
2509.23234; the collision probability, without parameters. XTC, "exclude top choices", from the other side: p-e-w,
https://github.com/oobabooga/text-generation-webui/pull/6335.
"""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, log, minimum, sqrt
from nucleate.sampling.stage import Ceiling, Floor, RowStats, fraction_parameter, min_keep_parameter, param


class TopNSigma(Floor):
    """Keep the tokens whose score is at most n standard deviations below the highest."""

    rank = 60
    n: float = param("Maximum distance from the highest logit, in standard deviations; 0: off", neutral=0.0, low=0.0)
    min_keep: int = min_keep_parameter()

    def floor(self, row: RowStats) -> Any:
        return row.top - self.n * sqrt(row.var) - SLACK


class MinP(Floor):
    """Keep the tokens with at least m times the probability of the most likely one."""

    rank = 63
    m: float = fraction_parameter(
        "Minimum probability of a token, relative to the most likely one; 0: off", neutral=0.0
    )
    min_keep: int = min_keep_parameter()

    def floor(self, row: RowStats) -> Any:
        return row.top + log(self.m) - SLACK


class TopA(Floor):
    """Keep the tokens with at least the probability a * (highest probability) ** 2."""

    rank = 64
    a: float = fraction_parameter(
        "Minimum probability of a token, as a factor of the squared highest probability; 0: off", neutral=0.0
    )
    min_keep: int = min_keep_parameter()

    def floor(self, row: RowStats) -> Any:
        return row.top + log(self.a) - log(row.mass) - SLACK


class Epsilon(Floor):
    """Keep the tokens with at least a given probability."""

    rank = 65
    e: float = fraction_parameter("Minimum probability of a token; 0: off", neutral=0.0, name="epsilon_cutoff")
    min_keep: int = min_keep_parameter()

    def floor(self, row: RowStats) -> Any:
        return row.top + log(row.mass) + log(self.e) - SLACK


class Eta(Floor):
    """Keep the tokens with at least the probability min(e, sqrt(e) * exp(-entropy))."""

    rank = 66
    e: float = fraction_parameter(
        "Minimum probability of a token, lower in flat distributions; 0: off", neutral=0.0, name="eta_cutoff"
    )
    min_keep: int = min_keep_parameter()

    def floor(self, row: RowStats) -> Any:
        return row.top + log(row.mass) + minimum(log(self.e), 0.5 * log(self.e) - row.entropy) - SLACK


class PLess(Floor):
    """Keep the tokens at least as likely as the sum of the squared probabilities."""

    rank = 67
    on: bool = param("Remove tokens less likely than the sum of the squared probabilities", neutral=False)
    min_keep: int = min_keep_parameter()

    def floor(self, row: RowStats) -> Any:
        return row.top + log(row.square) - log(row.mass) - SLACK


class Xtc(Ceiling):
    """With a given probability per step, remove all tokens above a threshold except the least likely of them."""

    rank = 80
    probability: float = fraction_parameter(
        "Probability, per step, of removing the top choices; 0: off", neutral=0.0, name="xtc_probability"
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
