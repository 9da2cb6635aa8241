"""Reference backend: defines the result of a pipeline, in NumPy float64, row by row. All backends return its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.outputs import StepLogprobs
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling import noise
from nucleate.sampling.history import History, HistoryView
from nucleate.sampling.inputs import masked_tokens
from nucleate.sampling.stage import (
    Ceiling,
    Draw,
    Floor,
    Pipeline,
    Prefix,
    RowStats,
    SampledToken,
    Scale,
    Shift,
    Stage,
    Tap,
    TokenInfo,
    Transform,
    min_keep_of,
)
from nucleate.sampling.token_logprobs import logprobs


def checked_values(stage: Shift, values: Any, size: int) -> NDArray[Any]:
    """The values of a Shift: float32 or float64 [size] or []. Raises ValueError for another shape."""
    array: NDArray[Any] = np.asarray(values)
    if array.shape not in ((), (size,)):
        raise ValueError(f"{stage.name}.values must return {size} values or one number, got {list(array.shape)}")
    return array if array.dtype == np.float32 else array.astype(np.float64)


def add_values(logits_V: NDArray[np.float32], stage: Shift, past: HistoryView, out_V: NDArray[np.float32]) -> None:
    """Add the values of a Shift to a row, rounded to float32. For float32 values, float64 would give the same."""
    value_V = checked_values(stage, past.values(stage, len(logits_V)), len(logits_V))
    with np.errstate(all="ignore"):  # the backend reports NaN and infinity
        np.add(logits_V, value_V, out=out_V, dtype=value_V.dtype, casting="same_kind")


Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


class RowError(ValueError):
    """A row of logits that cannot be sampled."""


def message_of(error: Exception) -> str:
    """The message of a row that cannot be sampled: its error, or what a user-defined stage has raised."""
    return str(error) if isinstance(error, RowError | ParameterError) else f"{type(error).__name__}: {error}"


class TotalMass(NamedTuple):
    """The tokens before the first truncation since the last Shift or Scale: maximum score, and sum of exp(x - top)."""

    top: float
    mass: float


class Survivors(NamedTuple):
    """The surviving tokens in rank order: score descending, then id ascending."""

    ids_N: Ids
    x_N: Floats
    total: TotalMass


def check_scores(ids_N: Ids, x_N: Floats, after: str = "") -> Floats:
    """The scores; raises RowError if they cannot be sampled."""
    for bad_N, name in ((np.isnan(x_N), "NaN"), (x_N == np.inf, "+inf")):
        if bad_N.any():
            raise RowError(f"{name} at token {ids_N[bad_N.argmax()]}{after}")
    if not (x_N > -np.inf).any():
        raise RowError(f"every token is at -inf{after}")
    return x_N


def ranked(ids_N: Ids, x_N: Floats) -> tuple[Ids, Floats]:
    """Sort tokens by score, stably; removes those at -inf."""
    count = np.count_nonzero(x_N > -np.inf)
    order_N = np.argsort(-x_N)[:count]  # takes a fifth of the time of a stable sort, and is one without equal scores
    sorted_N = x_N[order_N]
    if (sorted_N[1:] == sorted_N[:-1]).any():
        order_N = np.argsort(-x_N, kind="stable")[:count]
    return ids_N[order_N], x_N[order_N]


def untruncated(ids_N: Ids, x_N: Floats) -> Survivors:
    """Tokens in rank order, before any truncation."""
    return Survivors(ids_N, x_N, TotalMass(float(x_N[0]), float(np.exp(x_N - x_N[0]).sum())))


def statistics(x_N: Floats, total: TotalMass | None = None) -> RowStats:
    """The statistics of the scores of surviving tokens; none may be -inf."""
    top = x_N.max()
    d_N = np.maximum(x_N - top, np.finfo(np.float64).min)  # relative, because large scores would cancel
    e_N = np.exp(d_N)
    mass = e_N.sum()
    entropy = np.log(mass) - (e_N * d_N).sum() / mass
    total_mass = mass if total is None else max(total.mass * np.exp(total.top - top), mass)
    return RowStats(len(x_N), top, mass, (e_N * e_N).sum(), entropy, top + d_N.mean(), d_N.var(), total_mass)


class Contest(NamedTuple):
    """Candidates, tokens or groups of tokens: the highest total is selected; among equal ones, the lowest id."""

    ids_N: Ids
    x_N: Floats  #: scores, relative to that of the most likely token
    total_N: Floats  #: ``Draw.score`` of these, with noise unless the draw has none

    @property
    def winner(self) -> int:
        """The id that is selected."""
        return int(self.ids_N[self.total_N == self.total_N.max()].min())

    def total_of(self, one: int) -> float:
        """The total of a candidate."""
        return float(self.total_N[self.ids_N == one][0])


class Intervals(NamedTuple):
    """Tokens in rank order on a line: the last one whose interval begins before the target is selected."""

    ids_N: Ids
    weight_N: Floats  #: length of a token's interval
    before_N: Floats  #: where it begins: the sum of the weights before it
    target: float

    @property
    def winner(self) -> int:
        """The id that is selected."""
        return int(self.ids_N[np.flatnonzero(self.before_N < self.target)[-1]])


class Selection(NamedTuple):
    """The selection of a token. ``groups`` only with ``uniforms`` "each"; ``tokens`` are those of the winning group."""

    token: int
    tokens: Contest | Intervals
    groups: Contest | None = None


def select(stage: Any, kept: Survivors, seed: int, step: int) -> Selection:
    """Select a token among the survivors. stage: a Draw. seed, step: of its noise, see ``Draw.noise_key``."""
    if not isinstance(stage, Draw):
        raise TypeError(f"the last stage of a pipeline must be a Draw to sample, got {stage!r}")
    ids_N, x_N = kept.ids_N, kept.x_N - kept.x_N.max()  # relative, because noise vanishes in large scores
    groups: Contest | None = None
    with np.errstate(all="ignore"):
        if stage.uniforms == "one":
            row = statistics(x_N)
            u = noise.uniform(seed, step, noise.TOKEN, np.zeros(1, np.int64))[0]
            weight_N = stage.weight(x_N, row)
            intervals = Intervals(ids_N, weight_N, exclusive_cumsum(weight_N), stage.target(row, u))
            return Selection(intervals.winner, intervals)
        u_N: Floats = np.zeros(len(x_N))
        if stage.uniforms == "each":
            group_N = ids_N // noise.GROUP_SIZE
            groups_G, mass_G = group_logsumexp(group_N, x_N)
            u_G = noise.uniform(seed, step, noise.GROUP, groups_G)
            groups = Contest(groups_G, mass_G, stage.score(mass_G, u_G))
            ids_N, x_N = ids_N[group_N == groups.winner], x_N[group_N == groups.winner]
            u_N = noise.uniform(seed, step, noise.TOKEN, ids_N)
        tokens = Contest(ids_N, x_N, stage.score(x_N, u_N))
        return Selection(tokens.winner, tokens, groups)


def select_token(stage: Any, kept: Survivors, seed: int, step: int) -> int:
    """The token that a Draw selects among the survivors."""
    return select(stage, kept, seed, step).token


def highest_scoring(stage: Draw, ids_N: Ids, x_N: Floats, u_N: Floats) -> int:
    """The id with the highest score; among equal ones, the lowest id."""
    return Contest(ids_N, x_N, stage.score(x_N, u_N)).winner


def group_logsumexp(group_N: Ids, x_N: Floats) -> tuple[Ids, Floats]:
    """The groups with surviving tokens, and the log-sum-exp of their scores."""
    smallest = np.min_scalar_type(int(group_N.max()))  # of few bytes: sorted by radix, in a tenth of the time
    order_N = np.argsort(group_N.astype(smallest), kind="stable")
    size_G = np.bincount(group_N)
    groups_G = np.flatnonzero(size_G)
    size_G = size_G[groups_G]
    first_G = size_G.cumsum() - size_G
    top_G = np.maximum.reduceat(x_N[order_N], first_G)
    e_N = np.exp(x_N[order_N] - np.repeat(top_G, size_G))
    return groups_G, top_G + np.log(np.add.reduceat(e_N, first_G))


def exclusive_cumsum(weight_N: Floats) -> Floats:
    """The sum of the weights strictly before each token."""
    return np.concatenate(([0.0], np.cumsum(weight_N)[:-1]))


class RowResult(NamedTuple):
    """The result of one step of one row."""

    token: int
    logprobs: StepLogprobs | None  #: of the pipeline's Tap, if it has one
    stages: Pipeline  #: for the next step, with updated state


def run(logits_V: NDArray[Any], stages: Pipeline, seed: int, step: int, past: HistoryView = History()) -> RowResult:
    """Sample a token, report logprobs, and update stateful stages. Raises RowError."""
    per_stage = survivors_per_stage(logits_V, stages, past, xtc_uniform(stages, seed, step))
    return row_result(per_stage, stages, select_token(stages[-1], per_stage[-1], *noise_of(stages, past, seed, step)))


def survivors_per_stage(logits_V: NDArray[Any], stages: Pipeline, past: HistoryView, u: float) -> list[Survivors]:
    """The surviving tokens before the first stage, and after each stage."""
    before = all_tokens(logits_V)
    return [before, *apply_stages(before, len(logits_V), stages, past, u)]


def row_result(per_stage: list[Survivors], stages: Pipeline, token: int) -> RowResult:
    """The result for a token: logprobs and updated stages."""
    row_logprobs, updated = None, []
    for stage, before, after in zip(stages, per_stage[:-1], per_stage[1:], strict=True):
        if isinstance(stage, Tap) and not stage.neutral:
            row_logprobs = logprobs(before.ids_N, before.x_N, token, *stage.request)
        updated.append(stage)
        if type(stage).update is not Stage.update and not stage.neutral:
            updated[-1] = stage.update(SampledToken(token, token_logprob(before, token), token_logprob(after, token)))
    return RowResult(token, row_logprobs, tuple(updated))


def draw(logits_V: NDArray[Any], stages: Pipeline, seed: int, step: int, past: HistoryView = History()) -> int:
    """The token that the last stage, a Draw, selects."""
    return run(logits_V, stages, seed, step, past).token


def survivors(logits_V: NDArray[Any], stages: Pipeline, past: HistoryView = History(), u: float = 1.0) -> Survivors:
    """The tokens that survive all stages except the draw, with their final scores. u: the random number of XTC.

    Raises RowError for a NaN, a +inf, or no finite score, in the logits or after a stage.
    """
    return survivors_per_stage(logits_V, stages, past, u)[-1]


def all_tokens(logits_V: NDArray[Any]) -> Survivors:
    """All tokens of a row."""
    x_V = np.asarray(logits_V, dtype=np.float32).astype(np.float64)
    ids_V = np.arange(len(x_V))
    return untruncated(*ranked(ids_V, check_scores(ids_V, x_V)))


def apply_stages(kept: Survivors, size: int, stages: Pipeline, past: HistoryView, u: float) -> Iterator[Survivors]:
    """The surviving tokens after each stage."""
    for stage in stages:
        with np.errstate(all="ignore"):  # check_scores raises RowError on overflow
            if stage.greedy:
                kept = Survivors(kept.ids_N[:1], kept.x_N[:1], kept.total)
            elif not stage.neutral:
                kept = apply_stage(kept, size, stage, past, u)
        yield kept


def apply_shift(kept: Survivors, stage: Shift, past: HistoryView, size: int) -> Survivors:
    """Apply a Shift to the tokens it touches; removes those at -inf."""
    ids_V, x_V = np.arange(size), np.full(size, -np.inf)
    x_V[kept.ids_N] = kept.x_N
    ids_K, prompt_K, output_K = past.counts(stage.window)
    prompt_V, output_V, listed_V, is_listed_V = np.zeros((4, size))
    prompt_V[ids_K], output_V[ids_K] = prompt_K, output_K
    for token, value in past.listing(stage).items():
        if not 0 <= token < size:
            field = next((p.name for p in stage.parameters.values()), stage.name)
            raise ParameterError(field, f"{field} names token {token}, but the vocabulary ends at {size - 1}")
        listed_V[token], is_listed_V[token] = value, True
    touched_V = {
        "seen": prompt_V + output_V > 0,
        "output": output_V > 0,
        "listed": is_listed_V > 0,
        "unlisted": is_listed_V == 0,
        "masked": masked_tokens(past.mask, size),
        "all": True,
    }[stage.touches]
    value_V = checked_values(stage, past.values(stage, size), size) if stage.touches == "all" else 0.0
    shifted_V = stage.apply(x_V, TokenInfo(ids_V, prompt_V, output_V, listed_V, value_V))
    if stage.touches == "all":
        shifted_V = np.asarray(shifted_V, np.float32).astype(np.float64)
    changed_V = touched_V & (x_V > -np.inf) & (shifted_V != x_V)
    if not changed_V.any():
        return kept
    x_V = check_scores(ids_V, np.where(changed_V, shifted_V, x_V), f" after {stage.name}")
    return untruncated(*ranked(ids_V, x_V))


def apply_transform(kept: Survivors, stage: Transform, past: HistoryView) -> Survivors:
    """Apply a Transform; removes tokens at -inf."""
    relative_N = kept.x_N - kept.x_N.max()
    x_N = np.asarray(stage.apply(kept.ids_N, relative_N.copy(), past), np.float64)
    if np.array_equal(x_N, relative_N):
        return kept
    if x_N.shape != kept.x_N.shape:
        raise ValueError(f"{stage.name}.apply must return {len(kept.x_N)} scores, got {list(x_N.shape)}")
    x_N, by_id_N = check_scores(kept.ids_N, x_N, f" after {stage.name}"), np.argsort(kept.ids_N)
    return untruncated(*ranked(kept.ids_N[by_id_N], x_N[by_id_N]))


def apply_stage(kept: Survivors, size: int, stage: Any, past: HistoryView, u: float) -> Survivors:
    """Apply a stage. After a truncation, the first token, in rank order or in the stage's own order, survives."""
    if isinstance(stage, Shift):
        return apply_shift(kept, stage, past, size)
    if isinstance(stage, Transform):
        return apply_transform(kept, stage, past)
    (ids_N, x_N, total), (relative_N, row) = kept, relative_scores(kept, stage.sorted_count)
    match stage:
        case Scale():
            x_N = check_scores(ids_N, stage.apply(relative_N, row), f" after {stage.name}")
            if not stage.monotone:
                by_id_N = np.argsort(ids_N)  # ties: lowest id first
                ids_N, x_N = ids_N[by_id_N], x_N[by_id_N]
            return untruncated(*ranked(ids_N, x_N))
        case Floor():
            keep_N = relative_N >= stage.floor(row)
            keep_N[: min_keep_of(stage)] = True
        case Prefix():
            keep_N = prefix_mask(stage, relative_N, row)
            if stage.ties:
                keep_N |= x_N >= x_N[keep_N].min()
        case Ceiling():
            above_N = relative_N >= stage.ceiling(row)
            last = np.count_nonzero(above_N) - 1
            stays_N = (np.arange(len(x_N)) == last) | np.isin(ids_N, stage.exempt_ids)
            keep_N = ~above_N | (u >= stage.act_probability) | stays_N
            keep_N |= np.count_nonzero(keep_N) < min_keep_of(stage)
        case Draw() | Tap():
            return kept
        case _:
            raise TypeError(f"{stage!r} has no shape that the reference backend supports")
    return Survivors(ids_N[keep_N], x_N[keep_N], total)


def relative_scores(kept: Survivors, sorted_count: int = 0) -> tuple[Floats, RowStats]:
    """The arguments of a rule: scores relative to the maximum, and their statistics."""
    top = kept.x_N.max()
    row = statistics(kept.x_N - top, TotalMass(kept.total.top - top, kept.total.mass))
    return kept.x_N - top, row._replace(sorted_scores=padded(kept.x_N - top, sorted_count))


def padded(x_N: Floats, count: int) -> Floats:
    """The first scores, with -inf after the last one."""
    return np.concatenate((x_N[:count], np.full(max(count - len(x_N), 0), -np.inf)))


def prefix_mask(stage: Prefix, x_N: Floats, row: RowStats) -> NDArray[np.bool_]:
    """The tokens that a Prefix keeps, as a mask."""
    order_N, _, reached_N = prefix_sums(stage, x_N, row)
    kept_N = reached_N < stage.target(row) if stage.inclusive else reached_N <= stage.target(row)
    kept_N[: min_keep_of(stage)] = True
    keep_N = np.empty(len(x_N), bool)
    keep_N[order_N] = kept_N
    return keep_N


def prefix_sums(stage: Prefix, x_N: Floats, row: RowStats) -> tuple[Ids, Floats, Floats]:
    """The order of a Prefix; in this order the weights, and the sums that it compares with its target."""
    order_N = np.argsort(stage.order(x_N, row), kind="stable")
    weight_N = stage.weight(x_N[order_N], row)
    return order_N, weight_N, exclusive_cumsum(weight_N) if stage.inclusive else np.cumsum(weight_N)


def token_logprob(kept: Survivors, token: int) -> float:
    """The log-probability of a surviving token."""
    x = kept.x_N[kept.ids_N == token][0]
    return float(x - kept.x_N.max() - np.log(np.exp(kept.x_N - kept.x_N.max()).sum()))


def probabilities(
    logits_V: NDArray[Any], stages: Pipeline, past: HistoryView = History(), find: Callable[..., Survivors] = survivors
) -> Floats:
    """The distribution of the sampled token, float64 [V], averaged over XTC. find: the backend's ``survivors``."""
    p_V = np.zeros(len(logits_V))
    for low, high in pairwise(ceiling_bounds(stages)):
        ids_N, x_N, _ = find(logits_V, stages, past, (low + high) / 2)
        with np.errstate(all="ignore"):
            if isinstance(stages[-1], Draw) and stages[-1].uniforms == "none":
                p_V[highest_scoring(stages[-1], ids_N, x_N, np.zeros(len(x_N)))] += high - low
            else:
                e_N = np.exp(x_N - x_N[0])
                p_V[ids_N] += (high - low) * (e_N / e_N.sum())
    return p_V


def ceiling_bounds(stages: Pipeline) -> list[float]:
    """Bounds of the random number of XTC, 0 to 1, ascending: the survivors are the same for all numbers between two."""
    return sorted({0.0, 1.0, *(float(stage.act_probability) for stage in stages if isinstance(stage, Ceiling))})


def xtc_uniform(stages: Pipeline, seed: int, step: int) -> float:
    """The uniform number that all Ceilings of a step share; generated only if there is one."""
    has_ceiling = any(isinstance(stage, Ceiling) for stage in stages)
    return float(noise.uniform(seed, step, noise.XTC, np.zeros(1, np.int64))[0]) if has_ceiling else 1.0


def noise_of(stages: Pipeline, past: HistoryView, seed: int, step: int) -> tuple[int, int]:
    """The seed and step of the draw's noise, see ``Draw.noise_key``."""
    key = stages[-1].noise_key(past) if isinstance(stages[-1], Draw) else None
    return (seed, step) if key is None else key
