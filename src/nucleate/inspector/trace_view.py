"""A trace as the inspector shows it: some tokens, their probabilities after each stage, and the numbers of the draw.

The values are those of the trace, and all can be written as strict JSON. Does not depend on where the trace is from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.parameters.converters import shown
from nucleate.sampling.inputs import check_token
from nucleate.sampling.noise import GROUP_SIZE
from nucleate.sampling.reference import Contest, Intervals
from nucleate.sampling.stage import shape_of
from nucleate.sampling.trace import Trace, TraceStep
from nucleate.sampling.trace_reasons import removal_reasons

VERSION = 1
MAX_TOKENS = 512
"""Most tokens of a step that are shown."""
FINAL = 10
"""How many of the likeliest tokens after the last stage before the draw are shown, wherever the model ranks them."""
MAX_IN_DRAW = 64
"""Most groups, and most tokens, of a draw that are shown."""


def trace_view(trace: Trace, text: Callable[[int], str], top: int = 40, include: Sequence[int] = ()) -> dict[str, Any]:
    """The shown part of a trace, as values of JSON.

    text: the text of a token id. top: how many of the model's likeliest tokens to show, 1 to 512. include: further
    token ids. The selected token and the likeliest ones before the draw are shown as well, in all at most 512 tokens.
    Raises ParameterError for an id outside the vocabulary.
    """
    ids = shown_ids(trace, top, include)
    ranks = [int(trace.steps[0].change.after.ranks[token]) + 1 or None for token in ids]
    picked = trace.token_id
    return {
        "version": VERSION,
        "seed": trace.seed,
        "error": trace.error,
        "picked": None if picked is None else {"id": picked, "text": text(picked)},
        "tokens": [{"id": token, "text": text(token), "rank": rank} for token, rank in zip(ids, ranks, strict=True)],
        "stages": [_stage(trace, step, np.array(ids, np.int64)) for step in trace.steps],
        "draw": draw_view(trace, text),
    }


def shown_ids(trace: Trace, top: int, include: Sequence[int] = ()) -> list[int]:
    """The shown token ids, in the model's ranking; then those that the model's logits exclude."""
    if not trace.steps:
        return []
    for token in include:
        check_token(token, trace.steps[0].change.after.size)
    first, last = trace.steps[0], trace.steps[-1 if trace.token_id is None else -2]
    wanted = [*([] if trace.token_id is None else [trace.token_id]), *include, *last.most_likely(min(top, FINAL))]
    wanted = list(dict.fromkeys([*wanted, *first.most_likely(top)]))[:MAX_TOKENS]
    ranks = first.change.after.ranks
    return sorted(wanted, key=lambda token: (int(ranks[token]) < 0, int(ranks[token]), token))


def _stage(trace: Trace, step: TraceStep, ids_K: NDArray[np.int64]) -> dict[str, Any]:
    change, stage = step.change, step.stage
    reasons = removal_reasons(change, ids_K.tolist(), trace.draw)
    place = {token: str(index) for index, token in enumerate(ids_K.tolist())}
    p, rest = _probabilities(step, ids_K)
    return {
        "name": step.name,
        "shape": "" if stage is None else shape_of(stage).lower(),
        "label": step.name if stage is None else shown(stage),
        "why": step.why,
        "kept": step.left,
        "removed": int(np.count_nonzero(change.is_removed)),
        "changed": int(np.count_nonzero(change.is_touched)),
        "entropy": step.entropy,
        "removed_probability": step.removed_probability,
        "kl": number(step.kl),
        "p": p,
        "rest": rest,
        "reasons": {place[token]: reason for token, reason in reasons.items()},
    }


def _probabilities(step: TraceStep, ids_K: NDArray[np.int64]) -> tuple[list[float | None], float]:
    """Probabilities of tokens after a step, None for removed ones; and the probability of all other tokens."""
    after = step.change.after
    ranks_K = after.ranks[ids_K]
    hidden_N = np.ones(len(after.kept.ids_N), bool)
    hidden_N[ranks_K[ranks_K >= 0]] = False
    p_N = after.probabilities
    return [None if rank < 0 else float(p_N[rank]) for rank in ranks_K], float(p_N[hidden_N].sum())


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
        entries = _contest(tokens, named)
        scores = [named(each["id"]) | {"score": each["total"], "won": each["won"]} for each in entries]
        return {"kind": "none", "tokens": scores}
    size = trace.steps[0].change.after.size

    def group(number: int) -> dict[str, Any]:
        first = number * GROUP_SIZE
        return {"group": number, "first_id": first, "last_id": min(first + GROUP_SIZE, size) - 1}

    return {"kind": "each", "groups": _contest(groups, group), "tokens": _contest(tokens, named)}


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
        for i in np.lexsort((ids_N, -total_N))[:MAX_IN_DRAW]
    ]


def _intervals(line: Intervals, named: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """The intervals, as shares of the sum of all weights."""
    ids_N, weight_N, before_N, target = line
    end, won = float(before_N[-1] + weight_N[-1]), int(np.flatnonzero(ids_N == line.winner)[0])
    places = [*range(min(MAX_IN_DRAW, len(ids_N)))]
    if won >= MAX_IN_DRAW:
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
