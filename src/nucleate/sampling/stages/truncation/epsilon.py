"""Epsilon sampling (Hewitt, Manning, Liang: Truncation sampling as language model desmoothing, arXiv 2210.15191)."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.maths import SLACK, log
from nucleate.sampling.stage import Floor, RowStats, param


class Epsilon(Floor):
    """Keep every token at least this likely."""

    rank = 65
    e: float = param("least probability of a token", neutral=0.0, low=0.0, high=1.0, name="epsilon_cutoff")

    def floor(self, row: RowStats) -> Any:
        return row.top + log(row.mass) + log(self.e) - SLACK
