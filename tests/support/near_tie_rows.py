"""Rows on which a decision of the reference is nearly tied, made on purpose: which group wins, which token, where a cut
ends. ``case(index)`` gives always the same one; its gap is log-uniform from 1e-14 to 1e-5, on either side of the tie.

Scores are float32 and so far apart that no two of them are that close by chance. What makes the tie is a parameter,
which is float64: the temperature for a race, p or m for a cut. Where a cut is tied, the step is one at which the token
in question decides the draw, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from nucleate.sampling import noise
from nucleate.sampling.backends import reference
from nucleate.sampling.history import History
from nucleate.sampling.maths import SLACK
from nucleate.sampling.stage import Draw, Pipeline
from nucleate.sampling.stages.selection.gumbel import Gumbel
from nucleate.sampling.stages.temperature.temperature import Temperature
from nucleate.sampling.stages.truncation.min_p import MinP
from nucleate.sampling.stages.truncation.top_k import TopK
from nucleate.sampling.stages.truncation.top_n_sigma import TopNSigma
from nucleate.sampling.stages.truncation.top_p import TopP
from nucleate.sampling.stages.truncation.typical import Typical

STEPS = 256
"""Steps tried to find one whose token depends on a threshold."""


class Case(NamedTuple):
    """A near tie."""

    kind: str  #: one of KINDS
    logits: np.ndarray  #: float32 [V]
    stages: Pipeline  #: ends in a Gumbel with the seed
    seed: int
    step: int
    gap: float  #: as wanted; ``measured`` says what it is


class Standing(NamedTuple):
    """The noisy scores of a reference draw: of the groups, and of the tokens of the winning group."""

    groups: np.ndarray
    group_scores: np.ndarray
    group: int
    tokens: np.ndarray
    token_scores: np.ndarray
    token: int


def case(index: int) -> Case:
    """The near tie with an index."""
    kind = KINDS[index % len(KINDS)]
    numbers = np.random.default_rng([index, 19])
    gap = 10.0 ** numbers.uniform(-14, -5) * numbers.choice([-1.0, 1.0])
    for _ in range(100):
        found = MAKERS[kind](numbers, gap)
        if found is not None:
            logits, stages, seed, step = found
            return Case(kind, logits, (*stages, Gumbel(seed=seed)), seed, step, gap)
    raise AssertionError(f"no near tie for {index}")


def row(numbers: np.random.Generator) -> np.ndarray:
    """Scores of some 600 to 5,000 tokens, of one in thirty rows more: peaked, flat, or between."""
    size = int(600 * (5000 / 600) ** numbers.random())
    if numbers.random() < 1 / 30:
        size = int(numbers.integers(8192, 40000))
    match numbers.integers(4):
        case 0:
            x = numbers.normal(size=size)
        case 1:
            x = numbers.normal(size=size) * 3
        case 2:
            x = numbers.gumbel(size=size) * 1.5
        case _:
            x = numbers.normal(size=size) * 2 - 8
            x[numbers.choice(size, 30, replace=False)] = numbers.normal(size=30) * 1.5 + 2
    if numbers.random() < 0.1:
        x[numbers.random(size) < 0.3] = -np.inf
    return np.float32(x)


def fresh_seed(numbers: np.random.Generator) -> int:
    return int(numbers.integers(0, 2**64, dtype=np.uint64))


def kept(logits: np.ndarray, stages: Pipeline) -> tuple[np.ndarray, np.ndarray]:
    """The surviving ids, ranked, and their relative scores."""
    ids, x, _ = reference.survivors(logits, stages)
    return ids, x - x.max()


def standing(ids: np.ndarray, x: np.ndarray, seed: int, step: int) -> Standing:
    groups, masses = reference.group_logsumexp(ids // noise.GROUP_SIZE, x)
    group_scores = masses + noise.gumbel(noise.uniform(seed, step, noise.GROUP, groups))
    group = int(groups[group_scores.argmax()])
    inside = ids // noise.GROUP_SIZE == group
    tokens = ids[inside]
    token_scores = x[inside] + noise.gumbel(noise.uniform(seed, step, noise.TOKEN, tokens))
    return Standing(groups, group_scores, group, tokens, token_scores, int(tokens[token_scores.argmax()]))


def ahead(at: Standing, by_token: bool, one: int, other: int) -> float:
    """The lead of one group, or token, over another; NaN if one is missing."""
    ids, scores = (at.tokens, at.token_scores) if by_token else (at.groups, at.group_scores)
    first, second = scores[ids == one], scores[ids == other]
    return float(first[0] - second[0]) if first.size and second.size else np.nan


def before_a_race(numbers: np.random.Generator) -> Callable[[float], Pipeline]:
    """A function from a temperature to the stages before a draw."""
    k, p, m, n = int(numbers.integers(2, 400)), numbers.uniform(0.3, 0.99), 10 ** numbers.uniform(-4, -1), 3.0
    return [
        lambda t: (Temperature(t),),
        lambda t: (Temperature(t), TopK(k)),
        lambda t: (Temperature(t), TopP(p)),
        lambda t: (Temperature(t), MinP(m)),
        lambda t: (TopP(p), Temperature(t)),
        lambda t: (TopNSigma(n), MinP(m), Temperature(t)),
        lambda t: (TopK(k), MinP(m), TopP(p), Temperature(t)),
        lambda t: (Typical(p), Temperature(t)),
    ][numbers.integers(8)]


def race(numbers: np.random.Generator, gap: float, by_token: bool) -> Any:
    """A temperature at which two groups, or two tokens of the winning group, nearly tie."""
    logits, seed, stages = row(numbers), fresh_seed(numbers), before_a_race(numbers)
    start, end = numbers.uniform(0.3, 0.8), numbers.uniform(1.0, 2.0)
    lefts = kept(logits, stages(start)), kept(logits, stages(end))
    for step in range(40):

        def at(t: float, step: int = step) -> Standing:
            return standing(*kept(logits, stages(t)), seed, step)

        low, high, a, b = start, end, *(standing(*left, seed, step) for left in lefts)
        for _ in range(5):  # towards a temperature at which one takes over from the other
            if a.token == b.token or (a.group == b.group) != by_token:
                break
            middle = (low + high) / 2
            there = at(middle)
            if (there.token if by_token else there.group) == (a.token if by_token else a.group):
                low, a = middle, there
            else:
                high, b = middle, there
        else:
            one, other = (a.token, b.token) if by_token else (a.group, b.group)

            def apart(t: float, at: Any = at, one: int = one, other: int = other) -> float:
                return ahead(at(t), by_token, one, other) - gap

            t = meet(apart, low, high, abs(gap) / 8)
            found = at(t)
            if (found.token if by_token else found.group) in (one, other) and near(
                abs(ahead(found, by_token, one, other)), gap
            ):
                return logits, stages(t), seed, step
    return None


def near(gap: float, wanted: float) -> bool:
    """Whether a gap is as requested, within float64 precision."""
    return abs(gap - abs(wanted)) <= 0.5 * abs(wanted) + 3e-14


def meet(f: Callable[[float], float], low: float, high: float, enough: float) -> float:
    """A root of a function with opposite signs at both ends (Illinois algorithm)."""
    a, b = f(low), f(high)
    for _ in range(30):
        if not a * b < 0 or low == high:
            break
        middle = (low * b - high * a) / (b - a)
        if not min(low, high) < middle < max(low, high):
            break
        c = f(middle)
        if b * c < 0:
            low, a = high, b
        else:
            a /= 2
        high, b = middle, c
        if abs(c) < max(enough, 1e-15):
            break
    return high if abs(b) <= abs(a) else low


def before_a_cut(numbers: np.random.Generator) -> Pipeline:
    """Stages before a truncation."""
    t, k, m, p = numbers.uniform(0.4, 1.6), int(numbers.integers(5, 500)), 10 ** numbers.uniform(-5, -2), 0.97
    return [
        (),
        (Temperature(t),),
        (Temperature(t), TopK(k)),
        (TopK(k),),
        (Temperature(t), MinP(m)),
        (Temperature(t), TopNSigma(4.0)),
        (TopK(k), MinP(m)),
        (Temperature(t), TopP(p)),
    ][numbers.integers(8)]


def after_a_cut(numbers: np.random.Generator) -> Pipeline:
    return [(), (), (Temperature(numbers.uniform(0.5, 1.5)),)][numbers.integers(3)]


def place_in(numbers: np.random.Generator, count: int) -> int:
    """The rank of a token, not the first: mostly near the top."""
    most = count if numbers.random() < 0.3 else min(count, 300)
    return int(2 ** numbers.uniform(0, np.log2(most))) if most > 1 else 0


def step_between(
    numbers: np.random.Generator, seed: int, x_V: np.ndarray, with_it: np.ndarray, without_it: np.ndarray
) -> int:
    """A step at which two sets of survivors give different tokens, if one is found soon."""
    steps = numbers.integers(0, 64) + np.arange(STEPS)
    winners = []
    for ids in (with_it, without_it):
        groups, masses = reference.group_logsumexp(ids // noise.GROUP_SIZE, x_V[ids])
        scores = masses + noise.gumbel(uniforms(seed, steps, noise.GROUP, groups))
        winners.append(groups[scores.argmax(axis=1)])
    for place in np.flatnonzero(winners[0] != winners[1])[:1]:
        return int(steps[place])
    moved = np.setxor1d(with_it, without_it) // noise.GROUP_SIZE
    for place in np.flatnonzero(np.isin(winners[0], moved))[:20]:
        tokens = [standing(ids, x_V[ids], seed, int(steps[place])).token for ids in (with_it, without_it)]
        if tokens[0] != tokens[1]:
            return int(steps[place])
    return int(steps[0])


def uniforms(seed: int, steps: np.ndarray, stream: int, index: np.ndarray) -> np.ndarray:
    """``noise.uniform`` of several steps below 2**32, [S, N]."""
    low, ids = np.broadcast_arrays(steps.astype(np.uint64)[:, None], index.astype(np.uint64)[None])
    words = noise.philox((ids, low, np.zeros_like(ids), np.full_like(ids, stream)), (seed & 0xFFFFFFFF, seed >> 32))
    r = (words[0] << np.uint64(32)) | words[1]
    return np.minimum((r.astype(np.float64) + 0.5) * 2.0**-64, 1.0 - 2.0**-53)


def full(size: int, ids: np.ndarray, x: np.ndarray) -> np.ndarray:
    x_V = np.full(size, -np.inf)
    x_V[ids] = x
    return x_V


def top_p(numbers: np.random.Generator, gap: float) -> Any:
    """Top-p whose target equals a cumulative sum, except for the gap."""
    logits, seed, first = row(numbers), fresh_seed(numbers), before_a_cut(numbers)
    ids, x = kept(logits, first)
    place = place_in(numbers, len(ids))
    weights = np.exp(x)
    p = reference.exclusive_cumsum(weights)[place] * (1.0 + gap) / (weights.sum() * (1.0 - SLACK))
    if place == 0 or not 0.0 < p < 1.0:
        return None
    step = step_between(numbers, seed, full(len(logits), ids, x), ids[: place + 1], ids[:place])
    return logits, (*first, TopP(float(p)), *after_a_cut(numbers)), seed, step


def min_p(numbers: np.random.Generator, gap: float) -> Any:
    """Min-p whose threshold equals a score, except for the gap."""
    logits, seed, first = row(numbers), fresh_seed(numbers), before_a_cut(numbers)
    ids, x = kept(logits, first)
    place = place_in(numbers, len(ids))
    m = np.exp(x[place] - gap + SLACK)
    if not (x[place] > -30.0 and 0.0 < m < 1.0):
        return None
    place = np.count_nonzero(x > x[place])  # of equal ones all are in question
    if place == 0:
        return None
    last = np.count_nonzero(x >= x[place])
    step = step_between(numbers, seed, full(len(logits), ids, x), ids[:last], ids[:place])
    return logits, (*first, MinP(float(m)), *after_a_cut(numbers)), seed, step


def typical_mass(numbers: np.random.Generator, gap: float) -> Any:
    """As for top-p, in the order of typical."""
    logits, seed, first = row(numbers), fresh_seed(numbers), before_a_cut(numbers)
    ids, x = kept(logits, first)
    stats = reference.statistics(x)
    order = np.argsort(Typical(0.5).order(x, stats), kind="stable")
    weights = np.exp(x[order])
    place = place_in(numbers, len(ids))
    p = reference.exclusive_cumsum(weights)[place] * (1.0 + gap) / (weights.sum() * (1.0 - SLACK))
    if place == 0 or not 0.0 < p < 1.0:
        return None
    x_V = full(len(logits), ids, x)
    step = step_between(numbers, seed, x_V, ids[order[: place + 1]], ids[order[:place]])
    return logits, (*first, Typical(float(p)), *after_a_cut(numbers)), seed, step


def typical_distance(numbers: np.random.Generator, gap: float) -> Any:
    """Two tokens nearly equally far from the entropy, on both sides, with the cutoff between them."""
    logits, seed, t = row(numbers), fresh_seed(numbers), numbers.uniform(0.6, 1.6)
    ids, x = kept(logits, (Temperature(t),))
    order = np.argsort(Typical(0.5).order(x, reference.statistics(x)), kind="stable")
    centre = signed(x)
    swaps = np.flatnonzero(centre[order[:-1]] * centre[order[1:]] < 0)
    if not swaps.size:
        return None
    i, j = order[place := swaps[place_in(numbers, len(swaps))]], order[place + 1]

    def apart(t: float) -> float:
        d = signed(kept(logits, (Temperature(t),))[1])
        return float(abs(d[i]) - abs(d[j])) - gap

    ends = [t * (1 + way * far) for far in (1e-4, 1e-3, 1e-2, 1e-1) for way in (-1, 1)]
    end = next((end for end in ends if apart(end) * apart(t) < 0), None)
    if end is None:
        return None
    t = meet(apart, t, end, abs(gap) / 8)
    ids, x = kept(logits, (Temperature(t),))
    order = np.argsort(Typical(0.5).order(x, reference.statistics(x)), kind="stable")
    place = int(min(np.flatnonzero((order == i) | (order == j))))
    if {int(order[place]), int(order[min(place + 1, len(order) - 1)])} != {int(i), int(j)}:
        return None
    weights = np.exp(x[order])
    p = (reference.exclusive_cumsum(weights)[place] + weights[place] / 2) / weights.sum()
    others, x_V = ids[order[:place]], full(len(logits), ids, x)
    step = step_between(numbers, seed, x_V, np.append(others, ids[i]), np.append(others, ids[j]))
    return logits, (Temperature(float(t)), Typical(float(p))), seed, step


def signed(x: np.ndarray) -> np.ndarray:
    """How much rarer than a typical token."""
    stats = reference.statistics(x)
    return np.log(stats.mass) - x - stats.entropy


def top_k(numbers: np.random.Generator, _gap: float) -> Any:
    """The k-th and the next token have equal or adjacent float32 scores."""
    logits, seed, first = row(numbers), fresh_seed(numbers), before_a_cut(numbers)
    ids, x = kept(logits, first)
    place = place_in(numbers, len(ids) - 1)
    if place == 0:
        return None
    one, other = ids[place], ids[place + 1]
    logits[other] = logits[one]
    for _ in range(int(numbers.integers(3))):
        logits[other] = np.nextafter(logits[other], np.float32(numbers.choice([-np.inf, np.inf])))
    ids, x = kept(logits, first)
    where = np.flatnonzero((ids == one) | (ids == other))
    if len(where) < 2:
        return None
    k = int(where[0]) + 1
    step = step_between(numbers, seed, full(len(logits), ids, x), ids[:k], np.append(ids[: k - 1], ids[k]))
    return logits, (*first, TopK(k), *after_a_cut(numbers)) if k > 1 else (*first, TopK(2)), seed, step


MAKERS: dict[str, Callable[[np.random.Generator, float], Any]] = {
    "group": lambda numbers, gap: race(numbers, gap, by_token=False),
    "token": lambda numbers, gap: race(numbers, gap, by_token=True),
    "top_p": top_p,
    "min_p": min_p,
    "typical mass": typical_mass,
    "typical distance": typical_distance,
    "top_k": top_k,
}
KINDS = tuple(MAKERS)


def measured(one: Case) -> dict[str, float]:
    """The distance of each decision of the reference from a tie, by kind."""
    gaps: dict[str, float] = dict.fromkeys(KINDS, np.inf)
    before = reference.all_tokens(one.logits)
    for stage, after in zip(
        one.stages, reference.apply_stages(before, len(one.logits), one.stages, History(), 1.0), strict=True
    ):
        below, stats = reference.relative_scores(before)
        if isinstance(stage, Draw):
            at = standing(before.ids_N, below, one.seed, one.step)
            for kind, scores in (("group", at.group_scores), ("token", at.token_scores)):
                best = np.sort(scores)[-2:]
                gaps[kind] = best[-1] - best[0] if len(best) > 1 else np.inf
        elif isinstance(stage, MinP):
            gaps["min_p"] = min(gaps["min_p"], smallest(below[1:] - stage.floor(stats)))
        elif isinstance(stage, TopK) and stage.k < len(below):
            gaps["top_k"] = float(below[stage.k - 1] - below[stage.k])
        elif isinstance(stage, TopP | Typical):
            keys = stage.order(below, stats)
            order = np.argsort(keys, kind="stable")
            sums = reference.exclusive_cumsum(stage.weight(below[order], stats))
            mass = smallest(sums[1:] / stage.target(stats) - 1.0)
            if isinstance(stage, TopP):
                gaps["top_p"] = min(gaps["top_p"], mass)
            else:
                gaps["typical mass"] = mass
                last = len(after.ids_N)
                gaps["typical distance"] = float(np.diff(keys[order[last - 1 : last + 1]]).sum())
        before = after
    return gaps


def smallest(numbers: np.ndarray) -> float:
    return float(np.abs(numbers).min()) if numbers.size else np.inf
