"""The next token of many seeds, counted, beside the exact distribution."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.inspector.trace_view import number
from nucleate.sampling import reference
from nucleate.sampling.functional import Batch
from nucleate.sampling.pipeline import Params, simplify
from nucleate.sampling.single_row import SeededDraws, single_rows

MAX_DRAWS = 10_000
"""Most draws of one call of the inspector."""
BLOCK = 256
"""Draws between two looks at the clock."""
LEAST_EXPECTED = 5.0
"""Tokens that expect fewer draws are pooled for the chi-square statistic."""


class DrawCounts(NamedTuple):
    """The tokens of some seeds, counted."""

    counts_V: NDArray[np.int64]
    probabilities_V: NDArray[np.float64]  #: the exact distribution over all seeds
    requested: int  #: number of seeds that were requested
    drawn: int  #: number of seeds that were used; fewer if the time was over
    first_seed: int
    random: bool  #: False if a secret key decides instead of the seeds


def draw_counts(
    logits_V: Any,
    params: Params,
    *,
    prompt_ids: Sequence[int] | None = None,
    output_ids: Sequence[int] | None = None,
    step: int = 0,
    mask: Any = None,
    companion: Any = None,
    count: int = 1000,
    first_seed: int = 0,
    seconds: float = 2.0,
) -> DrawCounts:
    """Count the tokens that ``sample`` returns for the seeds first_seed + i modulo 2**64, i = 0 to count - 1.

    logits_V: float [V]. Other arguments as in ``trace``; the seed of ``params`` is not used. seconds: stop after this
    time, but not before the first draws. Raises RowError if the row cannot be sampled.
    """
    end = time.monotonic() + seconds
    [row] = single_rows(Batch(logits_V, params, prompt_ids, output_ids, mask, companion, "reference"), step)
    stages: Any = simplify(row.stages)
    draws = SeededDraws(row.logits_V, stages, row.past, row.step)
    p_V = reference.probabilities(row.logits_V, stages, row.past, lambda *given: draws.survivors(given[-1]))
    counts_V, drawn = np.zeros(len(p_V), np.int64), 0
    while drawn < count and (drawn == 0 or time.monotonic() < end):
        size = min(BLOCK, count - drawn)
        seeds_S = np.array([(first_seed + drawn + i) % 2**64 for i in range(size)], np.uint64)
        counts_V += np.bincount(draws.tokens(seeds_S), minlength=len(p_V))
        drawn += size
    return DrawCounts(counts_V, p_V, count, drawn, first_seed, not stages[-1].keyed)


def draws_view(result: DrawCounts, text: Callable[[int], str], top: int = 20) -> dict[str, Any]:
    """Counts beside the distribution, as values of JSON: of the ``top`` likeliest tokens, and of all others.

    text: the text of a token id. ``chi_square`` compares all counts with the distribution; None if a key decides.
    """
    p_V, counts_V = result.probabilities_V, result.counts_V
    ids = np.argsort(-p_V, kind="stable")[: min(top, np.count_nonzero(p_V))].tolist()
    others_V = np.ones(len(p_V), bool)
    others_V[ids] = False
    statistic, freedom = chi_square(counts_V, p_V * result.drawn)
    return {
        "count": result.requested,
        "drawn": result.drawn,
        "first_seed": result.first_seed,
        "tokens": [
            {"id": token, "text": text(token), "probability": float(p_V[token]), "count": int(counts_V[token])}
            for token in ids
        ],
        "rest": {"probability": float(p_V[others_V].sum()), "count": int(counts_V[others_V].sum())},
        "chi_square": number(statistic) if result.random else None,
        "degrees_of_freedom": freedom if result.random else None,
    }


def chi_square(counts_N: NDArray[np.int64], expected_N: NDArray[np.float64]) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; 0, 0 if there is only one category.

    Tokens that expect fewer than five draws are pooled with others of a similar probability, so that every category
    expects five or more.
    """
    order_N = np.argsort(-expected_N, kind="stable")
    counts_N, expected_N = counts_N[order_N], expected_N[order_N]
    large = np.count_nonzero(expected_N >= LEAST_EXPECTED)
    start_N = np.cumsum(expected_N[large:]) - expected_N[large:]
    pool_N = (start_N // (2 * LEAST_EXPECTED)).astype(np.int64)  # each begins less than one token after its bound
    categories_N = np.concatenate((np.arange(large), large + pool_N))
    counts, expected = (np.bincount(categories_N, values_N) for values_N in (counts_N, expected_N))
    if len(expected) > 1 and expected[-1] < LEAST_EXPECTED:
        counts[-2:-1] += counts[-1]
        expected[-2:-1] += expected[-1]
        counts, expected = counts[:-1], expected[:-1]
    return float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1
