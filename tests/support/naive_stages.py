"""Each stage of docs/semantics.md in plain Python: dicts, sorted, math.fsum.

A rule takes (stage, row, past) and returns the next row, or None if it changes nothing.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from itertools import accumulate

SLACK = 1e-6


class BadRowError(Exception):
    """No token can be sampled."""


class Row:
    """``order``: the surviving ids; ``x``: their scores; ``uncut``: the scores before truncation."""

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

    def at_least(self, log_chance, stage):
        """The tokens at least this likely, and the first. In logs, as probabilities underflow below 1e-323."""
        first = self.first(stage)
        return self.keep(t for t in self.order if t in first or self.log_p(t) >= log_chance - SLACK)

    def first(self, stage):
        """The tokens that a truncation keeps in any case."""
        return set(self.order[: max(1, stage.min_keep)])


def fresh(x):
    """A row in rank order: by score, then by id."""
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


def _counted(stage, past):
    """(prompt, output) as a penalty counts them."""
    if stage.last_n is None:
        return past.prompt, past.output
    both = past.prompt + past.output
    return [], both if stage.last_n == -1 else both[::-1][: stage.last_n]


def _repetition(stage, row, past):
    prompt, output = _counted(stage, past)
    seen = {*prompt, *output}
    changed = {t: (v / stage.r if v > 0 else v * stage.r) if t in seen else v for t, v in row.x.items()}
    return fresh(changed) if stage.r != 1 else None


def _encoder_repetition(stage, row, past):
    r = stage.r
    changed = {t: (v * r if v > 0 else v / r) if t in past.prompt else v for t, v in row.x.items()}
    return fresh(changed) if r != 1 else None


def _frequency(stage, row, past):
    count = Counter(_counted(stage, past)[1])
    return fresh({t: v - stage.f * count[t] for t, v in row.x.items()}) if stage.f else None


def _presence(stage, row, past):
    output = _counted(stage, past)[1]
    return fresh({t: v - stage.a if t in output else v for t, v in row.x.items()}) if stage.a else None


def _ends_with(tokens, end):
    return len(end) <= len(tokens) and tokens[len(tokens) - len(end) :] == list(end)


def _dry(stage, row, past):
    if stage.multiplier == 0:
        return None
    history, breakers = past.prompt + past.output, stage.breakers or ()
    tokens = history if stage.last_n == -1 else history[max(0, len(history) - stage.last_n) :]
    longest = {}
    for n in range(1, len(tokens)):
        if any(_ends_with(history[: len(history) - n + 1], breaker) for breaker in breakers):
            break  # the n-th token from the end ends a breaker, so no longer suffix counts
        for after in range(n, len(tokens)):
            if tokens[after - n : after] == tokens[len(tokens) - n :] and n >= stage.allowed_length:
                longest[tokens[after]] = n
    x = dict(row.x)
    for token, n in longest.items():
        if token in x and not any(_ends_with([*history, token], breaker) for breaker in breakers):
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
    """Divide scores relative to the maximum; those that overflow become -inf. The order does not change."""
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
    part = min(max(part, 1e-30), 1.0)  # rounding may leave 0..1, and 0 would be greedy
    return _divided(row, max(stage.low + (stage.high - stage.low) * part**stage.exponent, 1e-30))


def _quadratic(stage, row, past):
    """text-generation-webui's formula, with d from the highest score downwards. Scores that overflow become -inf."""
    if stage.factor == 0:
        return None
    x = {}
    for token in row.order:
        d = row.top - row.x[token]
        x[token] = -0.5 * stage.factor * d * d * (3 - stage.curve + (stage.curve - 1) * d)
    return Row([token for token in row.order if x[token] != -math.inf], x)


def _top_n_sigma(stage, row, past):
    if stage.n == 0:
        return None
    x = row.x
    try:
        mean = math.fsum(x.values()) / len(x)
        sigma = math.sqrt(math.fsum((value - mean) ** 2 for value in x.values()) / len(x))
    except OverflowError:  # scores beyond 1e154, from a temperature near 0: no score is that many deviations away
        return None
    return row.keep(t for t in row.order if t in row.first(stage) or x[t] >= row.top - stage.n * sigma - SLACK)


def _top_k(stage, row, past):
    if stage.k <= 0:
        return None
    first = row.order[: stage.k]
    equal = [t for t in row.order[stage.k :] if row.x[t] == row.x[first[-1]]]
    return row.keep(first + equal if stage.with_ties and stage.k != 1 else first)


def _until(row, order, target, stage):
    """The first tokens of an order that reach a mass, in rank order."""
    before = accumulate((row.e[token] for token in order), initial=0.0)
    first = {t for t, mass in zip(order, before, strict=False) if t == order[0] or mass < target * (1 - SLACK)}
    return row.keep(t for t in row.order if t in first or t in order[: stage.min_keep])


def _typical(stage, row, past):
    entropy = row.entropy()
    order = sorted(row.order, key=lambda token: abs(-row.log_p(token) - entropy))
    return _until(row, order, stage.p * row.mass, stage) if stage.p != 1 else None


def _top_p(stage, row, past):
    if stage.p == 1:
        return None
    try:
        whole = math.fsum(math.exp(value - row.top) for value in row.uncut)
    except OverflowError:
        whole = math.inf
    return _until(row, row.order, stage.p * (whole if stage.of_full_mass else row.mass), stage)


def _min_p(stage, row, past):
    if stage.m == 0:
        return None
    return row.keep(t for t in row.order if t in row.first(stage) or row.x[t] - row.top >= math.log(stage.m) - SLACK)


def _top_a(stage, row, past):
    return row.at_least(math.log(stage.a) - 2 * math.log(row.mass), stage) if stage.a else None


def _epsilon(stage, row, past):
    return row.at_least(math.log(stage.e), stage) if stage.e else None


def _eta(stage, row, past):
    return row.at_least(min(math.log(stage.e), math.log(stage.e) / 2 - row.entropy()), stage) if stage.e else None


def _p_less(stage, row, past):
    square = math.fsum((e / row.mass) ** 2 for e in row.e.values())
    return row.at_least(math.log(square), stage) if stage.on else None


def _top_h(stage, row, past):
    if stage.a is None:
        return None
    shares = (-math.exp(row.log_p(token)) * row.log_p(token) if row.e[token] else 0.0 for token in row.order)
    most = stage.a * row.entropy() * (1 + SLACK)
    pairs = zip(row.order, accumulate(shares), strict=True)
    return row.keep(t for t, share in pairs if t in row.first(stage) or share <= most)


def _mirostat(stage, row, past):
    if stage.tau == 0:
        return None
    return row.keep(t for t in row.order if t in row.first(stage) or -row.log_p(t) / math.log(2) <= stage.mu)


def _mirostat_v1(stage, row, past):
    """llama.cpp's formula, in logs; the limit where its denominator is 0."""
    if stage.tau == 0:
        return None
    top, log_n = row.order[:100], math.log(max(len(row.order), 2))
    steps = [(math.log((i + 2) / (i + 1)), row.x[top[i]] - row.x[top[i + 1]]) for i in range(len(top) - 1)]
    s = sum(t * b for t, b in steps) / max(math.fsum(t * t for t, _ in steps), 1e-30)
    s = min(max(s, 1e-30), 1e30)
    e = (s - 1) * log_n
    ratio = 1.0 if abs(e) < 1e-8 else e / -math.expm1(-e)  # e is at least -log n
    log_k = (stage.mu * math.log(2) + math.log(ratio / log_n)) / s
    k = len(row.order) if log_k > 50 else math.exp(log_k) * (1 + SLACK)
    return row.keep(row.order[: int(max(1, stage.min_keep, min(k, len(row.order))))])


def _xtc(stage, row, past):
    if stage.probability == 0 or past.u >= stage.probability:
        return None
    least = math.log(stage.threshold) - SLACK if stage.threshold else -math.inf
    above = [token for token in row.order if row.log_p(token) >= least]
    dropped = set(above[:-1]) - set(stage.exempt)
    if len(row.order) - len(dropped) < stage.min_keep:
        return None
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


_gumbel = _categorical = _gumbel_watermark = _logprobs


def context(past, n):
    """The last n output tokens, and whether an earlier output token followed the same; None if there are fewer."""
    output = [int(token) for token in past.output]
    if len(output) < n:
        return None, False
    before = [output[end - n : end] for end in range(n, len(output) + 1)]
    return before[-1], before[-1] in before[:-1]


def noise(stage, past, seed, step):
    """The seed and step of a draw's random numbers."""
    if stage.name != "gumbel_watermark":
        return seed, step
    tokens, repeated = context(past, stage.context)
    return (seed, step) if tokens is None or repeated else stage.key.numbers("gumbel noise", tokens)


def _kgw(stage, row, past):
    tokens, _ = context(past, stage.context)
    if tokens is None or not stage.delta:
        return None
    return fresh({t: _float32(x + stage.delta * _is_green(stage, tokens, t)) for t, x in row.x.items()})


def _is_green(stage, tokens, token):
    most = round(stage.gamma * 2**32)
    if not stage.self_hash:
        return token_word(*stage.key.numbers("kgw green", tokens), token) < most
    pairs = [stage.key.numbers("kgw self", [anchor]) for anchor in tokens]
    words = [(token_word(*pair, token, 7) // 2, token_word(*pair, token) < most) for pair in pairs]
    return min(words)[1]


def _float32(x):
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.inf


def _synthid(stage, row, past):
    tokens, repeated = context(past, stage.context)
    if tokens is None or repeated or not stage.layers:
        return None
    numbers = stage.key.numbers("synthid", tokens)
    words = {token: token_word(*numbers, token) for token in row.order}
    p = {token: row.e[token] / row.mass for token in row.order}
    for layer in range(stage.layers):
        share = math.fsum(p[token] for token in p if words[token] >> layer & 1)
        p = {token: value * (1 + (words[token] >> layer & 1) - share) for token, value in p.items()}
    after = {token: math.log(value) if value > 0 else -math.inf for token, value in p.items()}
    return None if after == {token: x - row.top for token, x in row.x.items()} else fresh(after)


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


def token_word(seed, step, token, stream=6):
    """The 32 bits of a token for watermarks."""
    group = token // 256
    block = group // 4 * 256 + token % 256
    return philox((block, step % 2**32, step >> 32, stream), (seed % 2**32, seed >> 32))[group % 4]
