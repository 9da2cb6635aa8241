"""The numbers of a draw as the inspector shows them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nucleate.sampling.noise import GROUP_SIZE
from nucleate.sampling.reference import Contest, Intervals
from nucleate.sampling.trace import Trace

MOST = 64
"""Most groups, and most tokens, of a draw that are shown."""


def draw_view(trace: Trace, text: Callable[[int], str]) -> dict[str, Any] | None:
    """The draw of a trace, as values of JSON; None if no token was selected. text: the text of a token id.

    "each": groups of 256 consecutive token ids, then the tokens of the winning group, by descending total of score and
    noise. "one": the interval of each token between 0 and 1, in rank order; that which holds u is selected. "none":
    tokens by descending score. "hidden": a secret key decides. At most 64 of each, with the selected one.
    """
    if trace.token_id is None:
        return None
    if trace.draw is None:
        return {"kind": "hidden"}

    def named(token: int) -> dict[str, Any]:
        return {"id": token, "text": text(token)}

    tokens, groups = trace.draw.tokens, trace.draw.groups
    if isinstance(tokens, Intervals):
        return _intervals(tokens, named)
    if groups is None:
        entries = [{**entry, "score": entry["total"]} for entry in _contest(tokens, named)]
        return {"kind": "none", "tokens": [_without(entry, "noise", "total") for entry in entries]}
    size = trace.steps[0].change.after.size
    return {
        "kind": "each",
        "groups": _contest(groups, lambda group: _group(group, size)),
        "tokens": _contest(tokens, named),
    }


def _without(entry: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in names}


def _group(group: int, size: int) -> dict[str, Any]:
    """A group of a vocabulary."""
    return {"group": group, "first_id": group * GROUP_SIZE, "last_id": min((group + 1) * GROUP_SIZE, size) - 1}


def _contest(contest: Contest, named: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """The candidates by descending total, equal ones by ascending id: the first one is selected."""
    (ids_N, x_N, total_N), winner = contest, contest.winner
    with np.errstate(all="ignore"):
        noise_N = total_N - x_N
    return [
        {
            **named(int(ids_N[i])),
            "score": number(x_N[i]),
            "noise": number(noise_N[i]),
            "total": number(total_N[i]),
            "won": int(ids_N[i]) == winner,
        }
        for i in np.lexsort((ids_N, -total_N))[:MOST]
    ]


def _intervals(line: Intervals, named: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """The intervals, as shares of the sum of all weights."""
    ids_N, weight_N, before_N, target = line
    end, won = float(before_N[-1] + weight_N[-1]), int(np.flatnonzero(ids_N == line.winner)[0])
    places = [*range(min(MOST, len(ids_N)))]
    if won >= MOST:
        places[-1] = won
    tokens = [
        {
            **named(int(ids_N[i])),
            "low": number(before_N[i] / end),
            "high": number((before_N[i] + weight_N[i]) / end),
            "won": i == won,
        }
        for i in places
    ]
    return {"kind": "one", "u": number(target / end), "tokens": tokens}


def number(value: Any) -> float | None:
    """A finite number; None for others, which JSON does not have."""
    return float(value) if math.isfinite(value) else None
