"""Rows on which a decision of the reference is nearly tied: the winning group, the winning token, or a truncation.
``case(index)`` is deterministic; its gap is log-uniform from 1e-14 to 1e-5, on either side of the tie.

Scores are float32 and never that close by chance. A float64 parameter makes the tie: the temperature for sampling, p or
m for truncation. For a tied truncation, the step is one at which the token in question changes the result, if any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from nucleate.sampling import noise, reference
from nucleate.sampling.history import History
from nucleate.sampling.maths import SLACK
from nucleate.sampling.stage import Draw, Pipeline
from nucleate.sampling.stages.selection import Gumbel
from nucleate.sampling.stages.temperature import Temperature
from nucleate.sampling.stages.truncation.min_p import MinP
from nucleate.sampling.stages.truncation.top_k import TopK
from nucleate.sampling.stages.truncation.top_n_sigma import TopNSigma
from nucleate.sampling.stages.truncation.top_p import TopP
from nucleate.sampling.stages.truncation.typical import Typical

STEPS = 256
"""Number of steps searched for one whose token depends on the threshold."""


class Case(NamedTuple):
    """A near tie."""

    kind: str  #: one of KINDS
    logits: np.ndarray  #: float32 [V]
    stages: Pipeline  #: ends in a Gumbel with the seed
    seed: int
    step: int
    gap: float  #: the requested gap; ``measured`` returns the real one


class DrawState(NamedTuple):
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
    rng = np.random.default_rng([index, 19])
    gap = 10.0 ** rng.uniform(-14, -5) * rng.choice([-1.0, 1.0])
    for _ in range(100):
        result = MAKERS[kind](rng, gap)
        if result is not None:
            logits, stages, seed, step = result
            return Case(kind, logits, (*stages, Gumbel(seed=seed)), seed, step, gap)
    raise AssertionError(f"no near tie for {index}")


def row(rng: np.random.Generator) -> np.ndarray:
    """Scores of 600 to 5,000 tokens (more in one of thirty rows), from peaked to flat."""
    size = int(600 * (5000 / 600) ** rng.random())
    if rng.random() < 1 / 30:
        size = int(rng.integers(8192, 40000))
    match rng.integers(4):
        case 0:
            x = rng.normal(size=size)
        case 1:
            x = rng.normal(size=size) * 3
        case 2:
            x = rng.gumbel(size=size) * 1.5
        case _:
            x = rng.normal(size=size) * 2 - 8
            x[rng.choice(size, 30, replace=False)] = rng.normal(size=30) * 1.5 + 2
    if rng.random() < 0.1:
        x[rng.random(size) < 0.3] = -np.inf
    return np.float32(x)


def fresh_seed(rng: np.random.Generator) -> int:
    return int(rng.integers(0, 2**64, dtype=np.uint64))


def survivors(logits: np.ndarray, stages: Pipeline) -> tuple[np.ndarray, np.ndarray]:
    """The surviving ids, ranked, and their relative scores."""
    ids, x, _ = reference.survivors(logits, stages)
    return ids, x - x.max()


def draw_state(ids: np.ndarray, x: np.ndarray, seed: int, step: int) -> DrawState:
    groups, masses = reference.group_logsumexp(ids // noise.GROUP_SIZE, x)
    group_scores = masses + noise.gumbel(noise.uniform(seed, step, noise.GROUP, groups))
    group = int(groups[group_scores.argmax()])
    inside = ids // noise.GROUP_SIZE == group
    tokens = ids[inside]
    token_scores = x[inside] + noise.gumbel(noise.uniform(seed, step, noise.TOKEN, tokens))
    return DrawState(groups, group_scores, group, tokens, token_scores, int(tokens[token_scores.argmax()]))


def lead(at: DrawState, by_token: bool, one: int, other: int) -> float:
    """The lead of one group, or token, over another; NaN if one is missing."""
    ids, scores = (at.tokens, at.token_scores) if by_token else (at.groups, at.group_scores)
    first, second = scores[ids == one], scores[ids == other]
    return float(first[0] - second[0]) if first.size and second.size else np.nan


def stages_before_draw(rng: np.random.Generator) -> Callable[[float], Pipeline]:
    """A function from a temperature to the stages before sampling."""
    k, p, m, n = int(rng.integers(2, 400)), rng.uniform(0.3, 0.99), 10 ** rng.uniform(-4, -1), 3.0
    return [
        lambda t: (Temperature(t),),
        lambda t: (Temperature(t), TopK(k)),
        lambda t: (Temperature(t), TopP(p)),
        lambda t: (Temperature(t), MinP(m)),
        lambda t: (TopP(p), Temperature(t)),
        lambda t: (TopNSigma(n), MinP(m), Temperature(t)),
        lambda t: (TopK(k), MinP(m), TopP(p), Temperature(t)),
        lambda t: (Typical(p), Temperature(t)),
    ][rng.integers(8)]


def race(rng: np.random.Generator, gap: float, by_token: bool) -> Any:
    """A temperature at which two groups, or two tokens of the winning group, nearly tie."""
    logits, seed, stages = row(rng), fresh_seed(rng), stages_before_draw(rng)
    start, end = rng.uniform(0.3, 0.8), rng.uniform(1.0, 2.0)
    survivors_at_ends = survivors(logits, stages(start)), survivors(logits, stages(end))
    for step in range(40):

        def at(t: float, step: int = step) -> DrawState:
            return draw_state(*survivors(logits, stages(t)), seed, step)

        low, high, a, b = start, end, *(draw_state(*left, seed, step) for left in survivors_at_ends)
        for _ in range(5):  # bisect for the temperature at which the winner changes
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

            def difference_at(t: float, at: Any = at, one: int = one, other: int = other) -> float:
                return lead(at(t), by_token, one, other) - gap

            t = meet(difference_at, low, high, abs(gap) / 8)
            result = at(t)
            if (result.token if by_token else result.group) in (one, other) and near(
                abs(lead(result, by_token, one, other)), gap
            ):
                return logits, stages(t), seed, step
    return None


def near(gap: float, expected: float) -> bool:
    """Whether a gap is as requested, within float64 precision."""
    return abs(gap - abs(expected)) <= 0.5 * abs(expected) + 3e-14


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


def stages_before_truncation(rng: np.random.Generator) -> Pipeline:
    """Stages before a truncation."""
    t, k, m, p = rng.uniform(0.4, 1.6), int(rng.integers(5, 500)), 10 ** rng.uniform(-5, -2), 0.97
    return [
        (),
        (Temperature(t),),
        (Temperature(t), TopK(k)),
        (TopK(k),),
        (Temperature(t), MinP(m)),
        (Temperature(t), TopNSigma(4.0)),
        (TopK(k), MinP(m)),
        (Temperature(t), TopP(p)),
    ][rng.integers(8)]


def stages_after_truncation(rng: np.random.Generator) -> Pipeline:
    return [(), (), (Temperature(rng.uniform(0.5, 1.5)),)][rng.integers(3)]


def random_rank(rng: np.random.Generator, count: int) -> int:
    """The rank of a token, not the first: mostly near the top."""
    most = count if rng.random() < 0.3 else min(count, 300)
    return int(2 ** rng.uniform(0, np.log2(most))) if most > 1 else 0


def step_between(
    rng: np.random.Generator, seed: int, x_V: np.ndarray, with_it: np.ndarray, without_it: np.ndarray
) -> int:
    """A step at which two sets of survivors give different tokens, if one is found soon."""
    steps = rng.integers(0, 64) + np.arange(STEPS)
    winners = []
    for ids in (with_it, without_it):
        groups, masses = reference.group_logsumexp(ids // noise.GROUP_SIZE, x_V[ids])
        scores = masses + noise.gumbel(uniforms(seed, steps, noise.GROUP, groups))
        winners.append(groups[scores.argmax(axis=1)])
    for rank in np.flatnonzero(winners[0] != winners[1])[:1]:
        return int(steps[rank])
    moved = np.setxor1d(with_it, without_it) // noise.GROUP_SIZE
    for rank in np.flatnonzero(np.isin(winners[0], moved))[:20]:
        tokens = [draw_state(ids, x_V[ids], seed, int(steps[rank])).token for ids in (with_it, without_it)]
        if tokens[0] != tokens[1]:
            return int(steps[rank])
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


def mass(rng: np.random.Generator, gap: float, kind: type[TopP | Typical]) -> Any:
    """Top-p or typical sampling whose target equals a cumulative sum, except for the gap."""
    logits, seed, first = row(rng), fresh_seed(rng), stages_before_truncation(rng)
    ids, x = survivors(logits, first)
    order = np.argsort(kind(0.5).order(x, reference.statistics(x)), kind="stable")
    weights = np.exp(x[order])
    rank = random_rank(rng, len(ids))
    p = reference.exclusive_cumsum(weights)[rank] * (1.0 + gap) / (weights.sum() * (1.0 - SLACK))
    if rank == 0 or not 0.0 < p < 1.0:
        return None
    x_V = full(len(logits), ids, x)
    step = step_between(rng, seed, x_V, ids[order[: rank + 1]], ids[order[:rank]])
    return logits, (*first, kind(float(p)), *stages_after_truncation(rng)), seed, step


def min_p(rng: np.random.Generator, gap: float) -> Any:
    """Min-p whose threshold equals a score, except for the gap."""
    logits, seed, first = row(rng), fresh_seed(rng), stages_before_truncation(rng)
    ids, x = survivors(logits, first)
    rank = random_rank(rng, len(ids))
    m = np.exp(x[rank] - gap + SLACK)
    if not (x[rank] > -30.0 and 0.0 < m < 1.0):
        return None
    rank = np.count_nonzero(x > x[rank])  # all equal tokens are affected
    if rank == 0:
        return None
    last = np.count_nonzero(x >= x[rank])
    step = step_between(rng, seed, full(len(logits), ids, x), ids[:last], ids[:rank])
    return logits, (*first, MinP(float(m)), *stages_after_truncation(rng)), seed, step


def typical_distance(rng: np.random.Generator, gap: float) -> Any:
    """Two tokens nearly equally far from the entropy, on both sides, with the cutoff between them."""
    logits, seed, t = row(rng), fresh_seed(rng), rng.uniform(0.6, 1.6)
    ids, x = survivors(logits, (Temperature(t),))
    order = np.argsort(Typical(0.5).order(x, reference.statistics(x)), kind="stable")
    centre = signed(x)
    swaps = np.flatnonzero(centre[order[:-1]] * centre[order[1:]] < 0)
    if not swaps.size:
        return None
    i, j = order[rank := swaps[random_rank(rng, len(swaps))]], order[rank + 1]

    def difference_at(t: float) -> float:
        d = signed(survivors(logits, (Temperature(t),))[1])
        return float(abs(d[i]) - abs(d[j])) - gap

    ends = [t * (1 + way * far) for far in (1e-4, 1e-3, 1e-2, 1e-1) for way in (-1, 1)]
    end = next((end for end in ends if difference_at(end) * difference_at(t) < 0), None)
    if end is None:
        return None
    t = meet(difference_at, t, end, abs(gap) / 8)
    ids, x = survivors(logits, (Temperature(t),))
    order = np.argsort(Typical(0.5).order(x, reference.statistics(x)), kind="stable")
    rank = int(min(np.flatnonzero((order == i) | (order == j))))
    if {int(order[rank]), int(order[min(rank + 1, len(order) - 1)])} != {int(i), int(j)}:
        return None
    weights = np.exp(x[order])
    p = (reference.exclusive_cumsum(weights)[rank] + weights[rank] / 2) / weights.sum()
    others, x_V = ids[order[:rank]], full(len(logits), ids, x)
    step = step_between(rng, seed, x_V, np.append(others, ids[i]), np.append(others, ids[j]))
    return logits, (Temperature(float(t)), Typical(float(p))), seed, step


def signed(x: np.ndarray) -> np.ndarray:
    """The signed distance of each token's surprisal from the entropy."""
    stats = reference.statistics(x)
    return np.log(stats.mass) - x - stats.entropy


def top_k(rng: np.random.Generator, _gap: float) -> Any:
    """The k-th and the next token have equal or adjacent float32 scores."""
    logits, seed, first = row(rng), fresh_seed(rng), stages_before_truncation(rng)
    ids, x = survivors(logits, first)
    rank = random_rank(rng, len(ids) - 1)
    if rank == 0:
        return None
    one, other = ids[rank], ids[rank + 1]
    logits[other] = logits[one]
    for _ in range(int(rng.integers(3))):
        logits[other] = np.nextafter(logits[other], np.float32(rng.choice([-np.inf, np.inf])))
    ids, x = survivors(logits, first)
    where = np.flatnonzero((ids == one) | (ids == other))
    if len(where) < 2:
        return None
    k = int(where[0]) + 1
    step = step_between(rng, seed, full(len(logits), ids, x), ids[:k], np.append(ids[: k - 1], ids[k]))
    return logits, (*first, TopK(k), *stages_after_truncation(rng)) if k > 1 else (*first, TopK(2)), seed, step


MAKERS: dict[str, Callable[[np.random.Generator, float], Any]] = {
    "group": lambda rng, gap: race(rng, gap, by_token=False),
    "token": lambda rng, gap: race(rng, gap, by_token=True),
    "top_p": lambda rng, gap: mass(rng, gap, TopP),
    "min_p": min_p,
    "typical mass": lambda rng, gap: mass(rng, gap, Typical),
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
            at = draw_state(before.ids_N, below, one.seed, one.step)
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
            of_sums = smallest(sums[1:] / stage.target(stats) - 1.0)
            if isinstance(stage, TopP):
                gaps["top_p"] = min(gaps["top_p"], of_sums)
            else:
                gaps["typical mass"] = of_sums
                last = len(after.ids_N)
                gaps["typical distance"] = float(np.diff(keys[order[last - 1 : last + 1]]).sum())
        before = after
    return gaps


def smallest(rng: np.ndarray) -> float:
    return float(np.abs(rng).min()) if rng.size else np.inf
