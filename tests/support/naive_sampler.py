"""An independent pure Python implementation of a pipeline: rows, sampling, logprobs and states."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import naive_stages
from naive_stages import BadRowError, Row, fresh, uniform

__all__ = ["BadRowError", "Past", "draw", "probabilities", "run", "step", "uniform"]


class Past(NamedTuple):
    """The inputs of a step besides the logits. u: the uniform number for XTC."""

    prompt: list
    output: list
    mask: object = None
    u: float = 1.0


def rows(logits, stages, past):
    """The row as given, then after each stage."""
    row = fresh({token: float(value) for token, value in enumerate(logits)})
    yield row
    for stage in stages:
        after = getattr(naive_stages, f"_{stage.name}")(stage, row, past) or row
        row = row if stage.rank < 50 and after.x == row.x else after  # a shift that changes no score changes nothing
        yield row


def run(logits, stages, past):
    """The surviving tokens in rank order, with their scores."""
    *_, row = rows(logits, stages, past)
    return row


def probabilities(logits, stages, past):
    """The probabilities over all values of u. Between two XTC probabilities the result is constant."""
    chances = sorted({0.0, 1.0, *(stage.probability for stage in stages if stage.name == "xtc")})
    found = [0.0] * len(logits)
    for low, high in pairwise(chances):
        row = run(logits, stages, past._replace(u=(low + high) / 2))
        for token in row.order:
            found[token] += (high - low) * row.e[token] / row.mass
    return found


def gumbel(seed, step, stream, index):
    return -math.log(-math.log1p(-uniform(seed, step, stream, index)))


def draw(kind, row, seed, step):
    """Sample a token: greedy, by two levels of Gumbel noise, or by inverse CDF. Scores are relative to the maximum."""
    row = Row(row.order, {token: row.x[token] - row.top for token in row.order})
    if kind == "greedy":
        return row.order[0]
    if kind == "categorical":
        target, before = uniform(seed, step, 0, 0) * row.mass, 0.0
        chosen = row.order[0]
        for token in row.order:
            if before >= target:
                break
            chosen = token
            before += row.e[token]
        return chosen
    groups = {}
    for token in row.order:
        groups.setdefault(token // 256, []).append(token)
    scores = {}
    for group, tokens in groups.items():
        part = row.keep(tokens)
        scores[group] = part.top + math.log(part.mass) + gumbel(seed, step, 1, group)
    winner = min(groups, key=lambda group: (-scores[group], group))
    return min(groups[winner], key=lambda token: (-(row.x[token] + gumbel(seed, step, 0, token)), token))


class Step(NamedTuple):
    """The sampled token; the logprobs as (chosen, top, requested) of (id, logprob, rank); the states."""

    token: int
    logprobs: tuple | None
    states: list


def step(logits, stages, seed, at, past):
    """One step. Its uniform number comes from the seed; past.u is ignored."""
    past = past._replace(u=uniform(seed, at, 2, 0))
    found = list(rows(logits, stages, past))
    token = draw(stages[-1].name, found[-1], *naive_stages.noise(stages[-1], past, seed, at))
    logprobs, states = None, []
    for stage, before, after in zip(stages, found, found[1:], strict=False):
        state = None
        if stage.name == "logprobs" and (stage.n is not None or stage.ids):
            logprobs = report(before, token, stage.n or 0, stage.ids)
        if stage.name in ("mirostat", "mirostat_v1") and stage.tau:
            state = stage.mu - stage.eta * (-after.log_p(token) / math.log(2) - stage.tau)
        if stage.name == "adaptive_p" and stage.target is not None:
            state = stage.decay * stage.mean + (1 - stage.decay) * math.exp(before.log_p(token))
        states.append(state)
    return Step(token, logprobs, states)


def report(row, chosen, n, requested):
    """Logprobs at this position in the pipeline. Ranks are by score, then by id."""
    order = sorted(row.order, key=lambda token: (-row.x[token], token))
    rank = {token: position for position, token in enumerate(order, 1)}

    def one(token):
        return (token, row.log_p(token), rank[token]) if token in rank else (token, -math.inf, None)

    return one(chosen), [one(token) for token in order[:n]], [one(token) for token in requested]
