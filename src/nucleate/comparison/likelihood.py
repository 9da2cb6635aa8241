"""Scores generated tokens by the unmodified model, in one forward pass per output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nucleate.models.protocol import Model


class OutputScores(NamedTuple):
    """Means over the tokens of an output, in nats, by the model at temperature 1; None without tokens."""

    log_likelihood: float | None  #: of the tokens
    entropy: float | None  #: of the distribution before each token


def score(model: Model, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> OutputScores:
    """Score an output."""
    if not token_ids:
        return OutputScores(None, None)
    context = model.begin()
    logits_TV = np.asarray(context.forward_all([*prompt_ids, *token_ids[:-1]]))[-len(token_ids) :]
    chosen, entropies = [], []
    for logits_V, token in zip(logits_TV, token_ids, strict=True):  # one at a time: float64 copies take memory
        x_V = logits_V.astype(np.float64)
        x_V -= x_V.max()
        e_V = np.exp(x_V)
        mass = e_V.sum()
        chosen.append(x_V[token] - np.log(mass))
        entropies.append(np.log(mass) - (e_V * np.where(e_V > 0, x_V, 0.0)).sum() / mass)
    return OutputScores(float(np.mean(chosen)), float(np.mean(entropies)))
