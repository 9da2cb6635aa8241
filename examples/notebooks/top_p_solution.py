"""A solution of exercise_top_p.ipynb, for teachers. The tests fill it into the notebook and run it."""

import numpy as np


def softmax(x_V):
    """The probabilities of scores."""
    e_V = np.exp(x_V - np.max(x_V))
    return e_V / e_V.sum()


def keep_top_p(p_V, p):
    """Which tokens stay: the smallest set of most likely tokens whose probabilities reach p."""
    order = np.argsort(-p_V, kind="stable")  # equal tokens stay in the order of their ids
    sums = np.cumsum(p_V[order])
    keep_V = np.zeros(len(p_V), bool)
    keep_V[order] = sums - p_V[order] < p  # the sum before the token
    return keep_V


def top_p_probabilities(x_V, p):
    """The distribution after top-p."""
    p_V = softmax(x_V)
    q_V = np.where(keep_top_p(p_V, p), p_V, 0)
    return q_V / q_V.sum()


def draw(p_V, u):
    """The first token at which the cumulative probability exceeds u."""
    sums = np.cumsum(p_V)
    return int(np.searchsorted(sums, u * sums[-1], side="right"))
