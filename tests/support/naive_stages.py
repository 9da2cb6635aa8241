"""What each stage does to a row, in plain Python from docs/semantics.md: dicts, sorted, math.fsum. Knows no shape.

A rule takes (stage, row, past) and gives the row after it, or None where it changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate

SLACK = 1e-6


class BadRowError(Exception):
    """No token can be drawn."""


class Row:
    """``order``: the ids that are in; ``x``: their scores; ``uncut``: the scores before the first cut of late."""

    def __init__(self, order, x, uncut=None):
        self.order, self.x = order, {token: x[token] for token in order}
        self.uncut = list(self.x.values()) if uncut is None else uncut
        self.top = max(self.x.values())
        self.e = {token: math.exp(value - self.top) for token, value in self.x.items()}
        self.mass = math.fsum(self.e.values())

    def log_p(self, token):
        return self.x[token] - self.top - math.log(self.mass)

    def entropy(self):
        return -math.fsum(e / self.mass * self.log_p(token) for token, e in self.e.items() if e)

    def keep(self, tokens):
        return Row(list(tokens), self.x, self.uncut)

    def at_least(self, log_chance):
        """The tokens at least this likely, and the best. In logs, because chances vanish below 1e-323."""
        best = self.order[0]
        return self.keep(t for t in self.order if t == best or self.log_p(t) >= log_chance - SLACK)


def fresh(x):
    """A row in the order of its scores, then of its ids."""
    if any(math.isnan(value) or value == math.inf for value in x.values()):
        raise BadRowError
    inside = [token for token, value in x.items() if value != -math.inf]
    if not inside:
        raise BadRowError
    return Row(sorted(inside, key=lambda token: (-x[token], token)), x)


def _ban(row, banned):
    return fresh({token: -math.inf if token in banned else value for token, value in row.x.items()})


def _logit_bias(stage, row, past):
    return fresh({t: v + stage.bias.get(t, 0.0) for t, v in row.x.items()}) if stage.bias else None


def _said(stage, past):
    """(prompt, output) as a penalty counts them."""
    if stage.last_n is None:
        return past.prompt, past.output
    both = past.prompt + past.output
    return [], both if stage.last_n == -1 else both[::-1][: stage.last_n]


def _repetition(stage, row, past):
    prompt, output = _said(stage, past)
    seen = {*prompt, *output}
    changed = {t: (v / stage.r if v > 0 else v * stage.r) if t in seen else v for t, v in row.x.items()}
    return fresh(changed) if stage.r != 1 else None


def _frequency(stage, row, past):
    count = Counter(_said(stage, past)[1])
    return fresh({t: v - stage.f * count[t] for t, v in row.x.items()}) if stage.f else None


def _presence(stage, row, past):
    output = _said(stage, past)[1]
    return fresh({t: v - stage.a if t in output else v for t, v in row.x.items()}) if stage.a else None


def _ends_with(tokens, end):
    return len(end) <= len(tokens) and tokens[len(tokens) - len(end) :] == list(end)


def _dry(stage, row, past):
    if stage.multiplier == 0:
        return None
    said, breakers = past.prompt + past.output, stage.breakers or ()
    tokens = said if stage.last_n == -1 else said[max(0, len(said) - stage.last_n) :]
    longest = {}
    for n in range(1, len(tokens)):
        if any(_ends_with(said[: len(said) - n + 1], breaker) for breaker in breakers):
            break  # the n-th token from the end ends a breaker, so no suffix has it
        for after in range(n, len(tokens)):
            if tokens[after - n : after] == tokens[len(tokens) - n :] and n >= stage.allowed_length:
                longest[tokens[after]] = n
    x = dict(row.x)
    for token, n in longest.items():
        if token in x and not any(_ends_with([*said, token], breaker) for breaker in breakers):
            penalty = math.log(stage.multiplier) + (n - stage.allowed_length) * math.log(stage.base)
            if stage.base > 1:
                penalty = min(penalty, 87 + min(0.0, math.log(stage.multiplier)))
            x[token] -= math.exp(min(penalty, 87))
    return fresh(x)


def _no_repeat_ngram(stage, row, past):
    tokens, n = past.prompt + past.output, stage.n
    if n == 0:
        return None
    had = {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)}
    return _ban(row, {gram[-1] for gram in had if _ends_with(tokens, gram[:-1])})


def _min_tokens(stage, row, past):
    return _ban(row, stage.ends if len(past.output) < stage.n else ()) if stage.n else None


def _bad_words(stage, row, past):
    return _ban(row, [w[-1] for w in stage.words if _ends_with(past.output, w[:-1])]) if stage.words else None


def _suppress(stage, row, past):
    return _ban(row, stage.ids) if stage.ids else None


def _allowed(stage, row, past):
    return None if stage.ids is None else _ban(row, row.x.keys() - set(stage.ids))


def _mask(stage, row, past):
    if past.mask is None:
        return None
    words = [int(word) % 2**32 for word in past.mask]
    return _ban(row, [token for token in row.order if not words[token // 32] >> token % 32 & 1])


def _divided(row, t):
    """From the top, so that nothing overflows but what is out then anyway. The order stays."""
    x = {}
    for token in row.order:
        try:
            x[token] = (row.x[token] - row.top) / t
        except OverflowError:
            x[token] = -math.inf
    return Row([token for token in row.order if x[token] != -math.inf], x)


def _temperature(stage, row, past):
    if stage.t == 1:
        return None
    return row.keep(row.order[:1]) if stage.t == 0 else _divided(row, stage.t)


def _dynamic_temperature(stage, row, past):
    if stage.low is None:
        return None
    if stage.high == 0:
        return row.keep(row.order[:1])
    part = row.entropy() / math.log(len(row.order)) if len(row.order) > 1 else 0.0
    part = min(max(part, 1e-30), 1.0)  # rounding may leave 0..1; and 0 would be greedy, which only high says
    return _divided(row, max(stage.low + (stage.high - stage.low) * part**stage.exponent, 1e-30))


def _top_n_sigma(stage, row, past):
    if stage.n == 0:
        return None
    x = row.x
    try:
        mean = math.fsum(x.values()) / len(x)
        sigma = math.sqrt(math.fsum((value - mean) ** 2 for value in x.values()) / len(x))
    except OverflowError:  # scores beyond 1e154, from a temperature near 0: no score is that many deviations away
        return None
    return row.keep(t for t in row.order if t == row.order[0] or x[t] >= row.top - stage.n * sigma - SLACK)


def _top_k(stage, row, past):
    if stage.k <= 0:
        return None
    first = row.order[: stage.k]
    equal = [t for t in row.order[stage.k :] if row.x[t] == row.x[first[-1]]]
    return row.keep(first + equal if stage.with_ties and stage.k != 1 else first)


def _until(row, order, target):
    """The first tokens of an order that reach a mass, in the order of the row."""
    before = accumulate((row.e[token] for token in order), initial=0.0)
    first = {t for t, mass in zip(order, before, strict=False) if t == order[0] or mass < target * (1 - SLACK)}
    return row.keep(t for t in row.order if t in first)


def _typical(stage, row, past):
    entropy = row.entropy()
    order = sorted(row.order, key=lambda token: abs(-row.log_p(token) - entropy))
    return _until(row, order, stage.p * row.mass) if stage.p != 1 else None


def _top_p(stage, row, past):
    if stage.p == 1:
        return None
    try:
        whole = math.fsum(math.exp(value - row.top) for value in row.uncut)
    except OverflowError:
        whole = math.inf
    return _until(row, row.order, stage.p * (whole if stage.of_full_mass else row.mass))


def _min_p(stage, row, past):
    if stage.m == 0:
        return None
    return row.keep(t for t in row.order if row.x[t] - row.top >= math.log(stage.m) - SLACK)


def _top_a(stage, row, past):
    return row.at_least(math.log(stage.a) - 2 * math.log(row.mass)) if stage.a else None


def _epsilon(stage, row, past):
    return row.at_least(math.log(stage.e)) if stage.e else None


def _eta(stage, row, past):
    return row.at_least(min(math.log(stage.e), math.log(stage.e) / 2 - row.entropy())) if stage.e else None


def _p_less(stage, row, past):
    return row.at_least(math.log(math.fsum((e / row.mass) ** 2 for e in row.e.values()))) if stage.on else None


def _top_h(stage, row, past):
    if stage.a is None:
        return None
    shares = (-math.exp(row.log_p(token)) * row.log_p(token) if row.e[token] else 0.0 for token in row.order)
    most = stage.a * row.entropy() * (1 + SLACK)
    return row.keep(t for t, s in zip(row.order, accumulate(shares), strict=True) if t == row.order[0] or s <= most)


def _mirostat(stage, row, past):
    if stage.tau == 0:
        return None
    return row.keep(t for t in row.order if t == row.order[0] or -row.log_p(t) / math.log(2) <= stage.mu)


def _xtc(stage, row, past):
    if stage.probability == 0 or past.u >= stage.probability:
        return None
    least = math.log(stage.threshold) - SLACK if stage.threshold else -math.inf
    above = [token for token in row.order if row.log_p(token) >= least]
    dropped = set(above[:-1]) - set(stage.exempt)
    return row.keep(token for token in row.order if token not in dropped)


def _adaptive_p(stage, row, past):
    if stage.target is None:
        return None
    aim = min(max(2 * stage.target - stage.mean, 0.0), 1.0)
    d = {token: abs(e / row.mass - aim) / 0.3 for token, e in row.e.items()}
    return fresh({token: 5 - 10 * d[token] * d[token] / (1 + d[token]) for token in row.order})


def _logprobs(stage, row, past):
    return None


def _greedy(stage, row, past):
    return row.keep(row.order[:1])


_gumbel = _categorical = _logprobs
