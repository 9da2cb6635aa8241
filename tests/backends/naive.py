"""A second, independent meaning of every stage, in plain Python from docs/semantics.md: dicts, sorted, math.fsum.

Knows nothing of shapes or rules. A row is ``order``, a list of ids, and ``x``, their scores.
"""

from __future__ import annotations

import math
from collections import Counter

SLACK = 1e-6


class BadRowError(Exception):
    """No token can be drawn."""


def sort(x):
    if any(math.isnan(value) or value == math.inf for value in x.values()):
        raise BadRowError
    inside = [token for token, value in x.items() if value != -math.inf]
    if not inside:
        raise BadRowError
    return sorted(inside, key=lambda token: (-x[token], token))


def row(order, x):
    top = x[order[0]]
    e = {token: math.exp(x[token] - top) for token in order}
    return top, e, math.fsum(e.values())


def run(logits, stages, prompt=(), output=()):
    """The tokens that stay, in order, and their scores."""
    x = {token: float(value) for token, value in enumerate(logits)}
    order = sort(x)
    for stage in stages:
        x = {token: x[token] for token in order}
        rule = globals()[f"_{stage.name}"]
        changed = rule(stage, order, x, list(prompt), list(output))
        if isinstance(changed, dict):
            order, x = sort(changed), changed
        elif changed is not None:
            order = changed
    return order, {token: x[token] for token in order}


def _logit_bias(stage, order, x, prompt, output):
    return {token: x[token] + stage.bias.get(token, 0.0) for token in x}


def _repetition(stage, order, x, prompt, output):
    seen = {*prompt, *output}
    return {t: (v / stage.r if v > 0 else v * stage.r) if t in seen else v for t, v in x.items()}


def _frequency(stage, order, x, prompt, output):
    count = Counter(output)
    return {token: value - stage.f * count[token] for token, value in x.items()}


def _presence(stage, order, x, prompt, output):
    return {token: value - stage.a if token in output else value for token, value in x.items()}


def _ban(x, banned):
    return {token: -math.inf if token in banned else value for token, value in x.items()}


def _min_tokens(stage, order, x, prompt, output):
    return _ban(x, stage.ends if len(output) < stage.n else ())


def _suppress(stage, order, x, prompt, output):
    return _ban(x, stage.ids)


def _allowed(stage, order, x, prompt, output):
    return x if stage.ids is None else _ban(x, x.keys() - set(stage.ids))


def _temperature(stage, order, x, prompt, output):
    if stage.t == 1:
        return None
    if stage.t == 0:
        return order[:1]
    top = x[order[0]]
    for token in order:
        x[token] = _divide(x[token] - top, stage.t)  # in place: a Scale leaves the order
    return [token for token in order if x[token] != -math.inf]


def _divide(a, b):
    try:
        return a / b
    except OverflowError:
        return -math.inf


def _top_k(stage, order, x, prompt, output):
    return order[: stage.k] if stage.k > 0 else None


def _min_p(stage, order, x, prompt, output):
    if stage.m == 0:
        return None
    cut = x[order[0]] + math.log(stage.m) - SLACK
    return [token for token in order if x[token] >= cut]


def _at_least(order, x, log_chance):
    """The tokens at least this likely, and the best. In logs, because chances vanish below 1e-323."""
    top, _, mass = row(order, x)
    return [t for t in order if t == order[0] or x[t] - top - math.log(mass) >= log_chance - SLACK]


def _top_n_sigma(stage, order, x, prompt, output):
    if stage.n == 0:
        return None
    try:
        mean = math.fsum(x[t] for t in order) / len(order)
        sigma = math.sqrt(math.fsum((x[t] - mean) ** 2 for t in order) / len(order))
    except OverflowError:  # scores beyond 1e154, from a temperature near 0: no score is that many deviations away
        return None
    return [t for t in order if t == order[0] or x[t] >= x[order[0]] - stage.n * sigma - SLACK]


def _top_a(stage, order, x, prompt, output):
    _, _, mass = row(order, x)
    return _at_least(order, x, math.log(stage.a) - 2 * math.log(mass)) if stage.a else None


def _epsilon(stage, order, x, prompt, output):
    return _at_least(order, x, math.log(stage.e)) if stage.e else None


def _eta(stage, order, x, prompt, output):
    _, e, mass = row(order, x)
    entropy = -math.fsum(v / mass * math.log(v / mass) for v in e.values() if v)
    return _at_least(order, x, min(math.log(stage.e), math.log(stage.e) / 2 - entropy)) if stage.e else None


def _p_less(stage, order, x, prompt, output):
    _, e, mass = row(order, x)
    return _at_least(order, x, math.log(math.fsum((v / mass) ** 2 for v in e.values()))) if stage.on else None


def _top_p(stage, order, x, prompt, output):
    if stage.p == 1:
        return None
    _, e, mass = row(order, x)
    kept, before = [], []
    for token in order:
        if kept and math.fsum(before) >= stage.p * mass * (1 - SLACK):
            break
        kept.append(token)
        before.append(e[token])
    return kept


def _greedy(stage, order, x, prompt, output):
    return order[:1]


def _gumbel(stage, order, x, prompt, output):
    return None


_categorical = _gumbel


def probabilities(logits, stages, prompt=(), output=()):
    order, x = run(logits, stages, prompt, output)
    _, e, mass = row(order, x)
    return [e[token] / mass if token in e else 0.0 for token in range(len(logits))]


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


def draw(logits, stages, step, prompt=(), output=()):
    """The token: greedy, by two levels of Gumbel noise, or walked down the order."""
    order, x = run(logits, stages, prompt, output)
    kind, seed = stages[-1].name, getattr(stages[-1], "seed", None)
    if kind == "greedy":
        return order[0]
    if kind == "categorical":
        _, e, mass = row(order, x)
        target, before = uniform(seed, step, 0, 0) * mass, 0.0
        chosen = order[0]
        for token in order:
            if before >= target:
                break
            chosen = token
            before += e[token]
        return chosen
    groups = {}
    for token in order:
        groups.setdefault(token // 256, []).append(token)
    scores = {}
    for group, tokens in groups.items():
        top, _, mass = row(tokens, x)
        scores[group] = top + math.log(mass) + gumbel(seed, step, 1, group)
    winner = min(groups, key=lambda group: (-scores[group], group))
    return min(groups[winner], key=lambda token: (-(x[token] + gumbel(seed, step, 0, token)), token))
