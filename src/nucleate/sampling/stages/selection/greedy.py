"""Greedy decoding."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.stage import Draw


class Greedy(Draw):
    """Select the most likely token; among equal ones, the lowest id."""

    rank = 99
    uniforms = "none"

    @property
    def greedy(self) -> bool:
        return True

    def score(self, x: Any, u: Any) -> Any:
        return x
