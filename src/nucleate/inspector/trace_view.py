"""A trace as the inspector shows it: some tokens, their probabilities after each stage, and the numbers of the draw.

The values are those of the trace, and all can be written as strict JSON. Does not depend on where the trace is from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.inspector.draw_view import draw_view, number
from nucleate.parameters.converters import shown
from nucleate.sampling.inputs import check_token
from nucleate.sampling.stage import shape_of
from nucleate.sampling.trace import Trace, TraceStep
from nucleate.sampling.trace_reasons import removal_reasons

VERSION = 1
MAX_TOKENS = 512
"""Most tokens of a step that are shown."""
FINAL = 10
"""How many of the likeliest tokens after the last stage before the draw are shown, wherever the model ranks them."""


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
