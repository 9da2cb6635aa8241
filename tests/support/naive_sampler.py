"""A second, independent meaning of a pipeline: its rows, its draw, its report, its state. Slow, and free of NumPy."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import naive_stages
from naive_stages import BadRowError, Row, fresh

__all__ = ["BadRowError", "Past", "draw", "probabilities", "run", "step", "uniform"]


class Past(NamedTuple):
    """What a step knows beside its logits: what was said, what is allowed, how the coin fell."""

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
    """The tokens that stay, in order, and their scores."""
    *_, row = rows(logits, stages, past)
    return row


def probabilities(logits, stages, past):
    """Over all coins: between two chances of an XTC all of them fall the same way."""
    chances = sorted({0.0, 1.0, *(stage.probability for stage in stages if stage.name == "xtc")})
    found = [0.0] * len(logits)
    for low, high in pairwise(chances):
        row = run(logits, stages, past._replace(u=(low + high) / 2))
        for token in row.order:
            found[token] += (high - low) * row.e[token] / row.mass
    return found


def philox(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(c[0] * 0xD2511F53, 2**32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def uniform(seed, step, stream, index):
    word0, word1, _, _ = philox((index, step % 2**32, step >> 32, stream), (seed % 2**32, seed >> 32))
    return (word0 * 2**32 + word1 + 0.5) / 2**64


def gumbel(seed, step, stream, index):
    return -math.log(-math.log1p(-uniform(seed, step, stream, index)))


def draw(kind, row, seed, step):
    """The token: greedy, by two levels of Gumbel noise, or walked down the order. From the top: noise must count."""
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
    """The token drawn; what the logprobs stage tells, as (chosen, top, asked) of (id, logprob, rank); the states."""

    token: int
    told: tuple | None
    states: list


def step(logits, stages, seed, at, past):
    """One step. The coin is the step's own: past.u is not looked at."""
    past = past._replace(u=uniform(seed, at, 2, 0))
    found = list(rows(logits, stages, past))
    token = draw(stages[-1].name, found[-1], seed, at)
    told, states = None, []
    for stage, before, after in zip(stages, found, found[1:], strict=False):
        state = None
        if stage.name == "logprobs" and (stage.n is not None or stage.ids):
            told = report(before, token, stage.n or 0, stage.ids)
        if stage.name == "mirostat" and stage.tau:
            state = stage.mu - stage.eta * (-after.log_p(token) / math.log(2) - stage.tau)
        if stage.name == "adaptive_p" and stage.target is not None:
            state = stage.decay * stage.mean + (1 - stage.decay) * math.exp(before.log_p(token))
        states.append(state)
    return Step(token, told, states)


def report(row, chosen, n, asked):
    """Ranks go by score, then by id, as of the place: also where rounding has made equal what was not."""
    order = sorted(row.order, key=lambda token: (-row.x[token], token))
    rank = {token: place for place, token in enumerate(order, 1)}

    def one(token):
        return (token, row.log_p(token), rank[token]) if token in rank else (token, -math.inf, None)

    return one(chosen), [one(token) for token in order[:n]], [one(token) for token in asked]
