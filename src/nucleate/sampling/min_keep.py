"""``min_keep``: the parameter that truncations share, as in llama.cpp."""

from __future__ import annotations

from typing import Any

from nucleate.sampling.stage import Stage, param


def min_keep_parameter() -> Any:
    """Declare ``min_keep`` in the body of a Floor, Prefix or Ceiling; backends then keep that many tokens.

    A Floor keeps the first ones in rank order, a Prefix those in its own order. A Ceiling removes nothing if it would
    leave fewer.
    """
    return param(
        "Minimum number of tokens that every truncation except top_k keeps; 0 or 1: one",
        default=0,
        low=0,
        high=2**31 - 1,
        name="min_keep",
    )


def min_keep_of(stage: Stage) -> int:
    """The number of tokens that a truncation keeps in any case."""
    return max(1, getattr(stage, "min_keep", 0))
