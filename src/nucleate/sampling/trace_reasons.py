"""What a stage changed in a row, and why, in words, with the numbers that decided; also why it removed single tokens.

Numbers are computed when they are first read, and once. Does not depend on how a trace is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling import noise, reference
from nucleate.sampling.reference import Floats, Ids, Intervals, Selection, Survivors
from nucleate.sampling.stage import (
    Ceiling,
    Draw,
    Floor,
    Prefix,
    RowStats,
    Scale,
    Shift,
    Stage,
    Transform,
    min_keep_of,
    shape_of,
)

SAME_PROBABILITY = 1e-8
"""Weights that differ less than this from the probabilities are these."""


class Distribution:
    """The N surviving tokens of a row of V, in rank order, and their probabilities."""

    def __init__(self, kept: Survivors, size: int) -> None:
        self.kept, self.size = kept, size

    @cached_property
    def _relative(self) -> tuple[Floats, RowStats]:
        with np.errstate(all="ignore"):
            return reference.relative_scores(self.kept)

    def rule_inputs(self, stage: Stage) -> tuple[Floats, RowStats]:
        """What the rules of a stage receive: scores [N] relative to the highest, and their statistics."""
        below_N, row = self._relative
        return below_N, row._replace(sorted_scores=reference.padded(below_N, stage.sorted_count))

    @cached_property
    def probabilities(self) -> Floats:
        """Probabilities [N]."""
        below_N, row = self._relative
        return np.asarray(np.exp(below_N) / row.mass)

    @cached_property
    def logprobs(self) -> Floats:
        """Log-probabilities [N]; finite also where a probability is rounded to 0."""
        below_N, row = self._relative
        return np.asarray(np.maximum(below_N, np.finfo(np.float64).min) - np.log(row.mass))

    @property
    def entropy(self) -> float:
        """In nats."""
        return max(0.0, float(self._relative[1].entropy))  # rounding may make it negative

    @cached_property
    def ranks(self) -> NDArray[np.int32]:
        """The place [V] of each token in the ranking, from 0; -1 for tokens that do not survive."""
        rank_V = np.full(self.size, -1, np.int32)
        rank_V[self.kept.ids_N] = np.arange(len(self.kept.ids_N), dtype=np.int32)
        return rank_V

    def spread(self, values_N: Floats, other: float) -> Floats:
        """Values of the surviving tokens as an array [V], with another value for all other tokens."""
        values_V = np.full(self.size, other)
        values_V[self.kept.ids_N] = values_N
        return values_V


Measure = Literal["tokens", "probability", "probability of all tokens", "weight"]


class PrefixSums(NamedTuple):
    """The sums of a Prefix, token by token in its own order."""

    order_N: Ids  #: indices into the ranking
    weight_N: Floats
    reached_N: Floats  #: compared with the target: before a token, or with it, see ``Prefix.inclusive``
    target: float
    measure: Measure  #: what the weights are
    unit: float  #: what to divide weights by: shares of the whole, or a number of tokens


def prefix_sums(stage: Prefix, before: Distribution) -> PrefixSums:
    """The sums of a stage over the tokens before it."""
    below_N, row = before.rule_inputs(stage)
    order_N, weight_N, reached_N = reference.prefix_sums(stage, below_N, row)
    target, total, first = float(stage.target(row)), float(weight_N.sum()), float(weight_N[0])
    measure: Measure = "weight"
    if np.ptp(weight_N) == 0 and (weight_N == stage.weight(below_N[order_N] - 1.0, row)).all():
        measure, total = "tokens", first or 1.0  # independent of the score
    elif not total > 0:
        total = 1.0
    elif target != float(stage.target(row._replace(full_mass=row.mass))):
        measure, total = "probability of all tokens", total * float(row.full_mass / row.mass)
    elif np.abs(weight_N / total - before.probabilities[order_N]).max() < SAME_PROBABILITY:
        measure = "probability"
    return PrefixSums(order_N, weight_N, reached_N, target, measure, total)


@dataclass(frozen=True, eq=False)
class StageChange:
    """The effect of a stage. Arrays [N] are of the tokens before it, in rank order before it."""

    stage: Stage | None  #: None for the logits
    before: Distribution
    after: Distribution
    u: float = 1.0  #: the random number of XTC

    @cached_property
    def scores(self) -> Floats:
        """Scores after the stage; -inf for the tokens that it removed."""
        if self.after is self.before or np.array_equal(self.before.kept.ids_N, self.after.kept.ids_N):
            return self.after.kept.x_N
        return self.after.spread(self.after.kept.x_N, -np.inf)[self.before.kept.ids_N]

    @cached_property
    def is_removed(self) -> NDArray[np.bool_]:
        """The tokens that it removed."""
        return np.asarray(self.scores == -np.inf)

    @cached_property
    def is_touched(self) -> NDArray[np.bool_]:
        """The surviving tokens whose score it changed."""
        return np.asarray((self.scores != self.before.kept.x_N) & ~self.is_removed)

    @cached_property
    def removed_probability(self) -> float:
        """The probability, before the stage, of the tokens that it removed."""
        return float(self.before.probabilities[self.is_removed].sum())

    @cached_property
    def kl(self) -> float:
        """The Kullback-Leibler divergence of the distribution after it from the one before it, in nats."""
        if self.after is self.before:
            return 0.0
        log_after_N = self.after.logprobs
        if self.scores is not self.after.kept.x_N:  # fewer tokens, or in another order
            log_after_N = self.after.spread(log_after_N, -np.inf)[self.before.kept.ids_N]
        p_N = np.exp(log_after_N)
        possible_N = p_N > 0
        ratio_N = log_after_N[possible_N] - self.before.logprobs[possible_N]
        return max(0.0, float((p_N[possible_N] * ratio_N).sum()))  # rounding may make it negative

    @cached_property
    def prefix(self) -> PrefixSums:
        """The sums of its stage, a Prefix."""
        return prefix_sums(self.stage, self.before)  # type: ignore[arg-type]


def why(stage: Stage, change: StageChange) -> str:
    """The reason for the effect of a stage that is not a draw."""
    if stage.greedy:
        return "greedy: keeps only the first of the ranking"
    if stage.neutral:
        return "neutral: no effect"
    with np.errstate(all="ignore"):
        return _WHY[shape_of(stage)](stage, change)


def why_selected(stage: Draw, change: StageChange, token: int) -> str:
    """How the draw selected its token."""
    how = {"none": "highest score", "each": "highest score with noise", "one": "inverse CDF"}
    rank = int(change.before.ranks[token])
    count, p = len(change.before.kept.ids_N), change.before.probabilities[rank]
    return f"{how[stage.uniforms]}: rank {rank + 1} of {count}, probability {p:.4g}"


def _shift(stage: Shift, change: StageChange) -> str:
    subject = _SUBJECTS["seen" if stage.touches == "output" and stage.window is not None else stage.touches]
    window = "" if stage.window is None or stage.window < 0 else f", the last {stage.window}"
    touched_N, parts = change.is_touched, []
    if touched_N.any():
        moved = change.scores[touched_N] - change.before.kept.x_N[touched_N]
        low, high = f"{moved.min():+.4g}", f"{moved.max():+.4g}"
        parts.append(f"{len(moved)} changed by {low if low == high else f'{low} to {high}'}")
    if change.is_removed.any():
        parts.append(f"{np.count_nonzero(change.is_removed)} banned")
    return f"{subject}{window}: {', '.join(parts) or 'none changed'}"


_SUBJECTS = {
    "seen": "prompt and output tokens",
    "output": "output tokens",
    "listed": "listed tokens",
    "unlisted": "unlisted tokens",
    "masked": "masked tokens",
    "all": "all tokens",
}


def _scale(stage: Scale, change: StageChange) -> str:
    kept, left = change.before.kept, change.after.kept
    before, after = (float(there.x_N[0] - there.x_N[-1]) for there in (kept, left))
    moved = "" if kept.ids_N[0] == left.ids_N[0] else "; another token ranks first"
    return f"score range {before:.4g} -> {after:.4g}{moved}"


def _floor(stage: Floor, change: StageChange) -> str:
    below_N, row = change.before.rule_inputs(stage)
    cut = float(stage.floor(row))
    condition = f"probability >= {np.exp(cut - row.top) / row.mass:.3g}"
    above = np.count_nonzero(below_N >= cut)
    if not above:
        return f"{condition}: no token, keeps {first_tokens(stage)}"
    extra = f"; keeps {first_tokens(stage)}" if above < change.after.kept.ids_N.size else ""
    return f"{condition}, {np.exp(cut - row.top):.3g} of the highest{extra}"


def first_tokens(stage: Stage) -> str:
    """The tokens that a truncation keeps in any case."""
    least = min_keep_of(stage)
    return "the first" if least == 1 else f"the first {least}"


def _prefix(stage: Prefix, change: StageChange) -> str:
    sums, stays_N = change.prefix, ~change.is_removed
    chance, least = float(change.before.probabilities[stays_N].sum()), "" if stage.inclusive else "at most "
    target = sums.target / sums.unit
    if sums.measure == "tokens":
        return f"target {least}{target:.6g} tokens, kept probability {chance:.4g}"
    reached = float(sums.weight_N[stays_N[sums.order_N]].sum()) / sums.unit
    share = {"probability": "", "weight": " of the weight"}.get(sums.measure, " of all tokens")
    own = ", in its own ranking" if has_own_order(stage) else ""
    probability = f", kept probability {chance:.4g}" if share else ""
    return f"target {least}{target:.4g}{share}, reached {reached:.4g}{probability}{own}"


def has_own_order(stage: Prefix) -> bool:
    """Whether a stage ranks tokens otherwise than by score."""
    return type(stage).order is not Prefix.order


def _transform(stage: Transform, change: StageChange) -> str:
    moved_V = change.after.spread(change.after.probabilities, 0.0) - change.before.spread(
        change.before.probabilities, 0.0
    )
    return f"probabilities moved by {np.abs(moved_V).sum() / 2:.3g} in total"


def _ceiling(stage: Ceiling, change: StageChange) -> str:
    u = change.u
    if u >= stage.act_probability:
        return f"random number {u:.4f} >= {stage.act_probability:g}: inactive in this step"
    below_N, row = change.before.rule_inputs(stage)
    cut = float(stage.ceiling(row))
    above, event = int((below_N >= cut).sum()), f"random number {u:.4f} < {stage.act_probability:g}"
    least = f"probability >= {np.exp(cut - row.top) / row.mass:.3g}"
    if above > 1 and not change.is_removed.any():
        return f"{event}: {above} with {least}, all kept as exempt tokens or by min_keep"
    return f"{event}: {above} with {least}{', keeps the last of them' if above else ''}"


_WHY: Mapping[str, Callable[[Any, StageChange], str]] = {
    "Shift": _shift,
    "Scale": _scale,
    "Floor": _floor,
    "Prefix": _prefix,
    "Ceiling": _ceiling,
    "Transform": _transform,
    "Tap": lambda *_: "reports logprobs of this distribution",
}


Ranks = NDArray[np.int64]


def removal_reasons(change: StageChange, token_ids: Iterable[int], draw: Selection | None = None) -> dict[int, str]:
    """Why a stage removed tokens: {token id: reason}, for those of ``token_ids`` that it removed.

    draw: the numbers of a Draw, see ``Trace.draw``; without them the reason is only that it selected another token.
    """
    ids_K = np.fromiter(dict.fromkeys(token_ids), np.int64)
    ranks_K: Ranks = change.before.ranks[ids_K].astype(np.int64)
    removed_K = (ranks_K >= 0) & change.is_removed[ranks_K]
    ids_K, ranks_K = ids_K[removed_K], ranks_K[removed_K]
    if change.stage is None or not len(ids_K):
        return {}
    with np.errstate(all="ignore"):
        sentences = _sentences(change.stage, change, ids_K, ranks_K, draw)
        return dict(zip(ids_K.tolist(), sentences, strict=True))


def _sentences(
    stage: Stage, change: StageChange, ids_K: Ranks, ranks_K: Ranks, draw: Selection | None
) -> Iterator[str] | list[str]:
    shape = shape_of(stage)
    if shape == "Draw":
        return [_not_selected(int(token), draw) for token in ids_K]
    if stage.greedy:
        return [f"rank {rank + 1}: greedy keeps only the first" for rank in ranks_K]
    return _REASONS[shape](stage, change, ranks_K)


def _shift_reasons(stage: Shift, change: StageChange, ranks_K: Ranks) -> list[str]:
    which = {
        "seen": ", as a token of the prompt or output",
        "output": ", as a token of the output",
        "unlisted": ", which allows only the tokens in its list",
    }.get(stage.touches, "")
    sentence = "not allowed by the mask of this step" if stage.touches == "masked" else f"banned by {stage.name}{which}"
    return [sentence] * len(ranks_K)


def _floor_reasons(stage: Floor, change: StageChange, ranks_K: Ranks) -> Iterator[str]:
    below_N, row = change.before.rule_inputs(stage)
    cut = float(stage.floor(row))
    if np.isnan(cut):
        yield from [f"the threshold of {stage.name} is not a number"] * len(ranks_K)
        return
    least = np.exp(cut - row.top) / row.mass
    for below, p in zip(below_N[ranks_K], change.before.probabilities[ranks_K], strict=True):
        if p < least < np.inf:
            yield "probability {} is below {}".format(*told_apart(p, least))
        else:  # too small or too large for a probability
            yield "score {} is below {}, relative to the highest".format(*told_apart(below - row.top, cut - row.top))


def _prefix_reasons(stage: Prefix, change: StageChange, ranks_K: Ranks) -> Iterator[str]:
    sums, where = change.prefix, " in its ranking" if has_own_order(stage) else ""
    place_N = np.empty(len(sums.order_N), np.int64)  # in the order of the stage
    place_N[sums.order_N] = np.arange(len(sums.order_N))
    which, verb = ("before it", "reaches") if stage.inclusive else ("with it", "exceeds")
    target = sums.target / sums.unit
    for place in place_N[ranks_K]:
        if not np.isfinite(target):
            yield f"rank {place + 1}{where}: {stage.name} keeps only {first_tokens(stage)}"
        elif sums.measure == "tokens":
            yield f"rank {place + 1}{where} is beyond {stage.name} {told_apart(target, place + 1, 6)[0]}"
        else:
            reached, limit = told_apart(sums.reached_N[place] / sums.unit, target, 4, strict=not stage.inclusive)
            yield f"cumulative {sums.measure} {reached} {which}{where} {verb} {stage.name} {limit}"


def _ceiling_reasons(stage: Ceiling, change: StageChange, ranks_K: Ranks) -> Iterator[str]:
    _, row = change.before.rule_inputs(stage)
    least = np.exp(float(stage.ceiling(row)) - row.top) / row.mass
    for p in change.before.probabilities[ranks_K]:
        yield f"probability {p:.3g} >= {least:.3g}, and not the last such token"


def _made_impossible(stage: Stage, change: StageChange, ranks_K: Ranks) -> list[str]:
    return [f"{stage.name} sets its score to -inf"] * len(ranks_K)


_REASONS: Mapping[str, Callable[[Any, StageChange, Ranks], Iterator[str] | list[str]]] = {
    "Shift": _shift_reasons,
    "Scale": _made_impossible,
    "Floor": _floor_reasons,
    "Prefix": _prefix_reasons,
    "Ceiling": _ceiling_reasons,
    "Transform": _made_impossible,
}


def _not_selected(token: int, draw: Selection | None) -> str:
    """Why a draw selected another token."""
    if draw is None:
        return "another token was selected"
    contest, name, candidate = draw.tokens, "total", token
    if isinstance(contest, Intervals):
        return "the random number is not in its interval"
    if draw.groups is not None and token // noise.GROUP_SIZE != draw.groups.winner:
        contest, name, candidate = draw.groups, "total of its group", token // noise.GROUP_SIZE
    won, own = contest.total_of(contest.winner), contest.total_of(candidate)
    if own == won:
        return f"{name} {own:.4g} equals the highest, and the lower id is selected"
    return "{} {} is below {}".format(name, *told_apart(own, won, 4))


def told_apart(one: float, other: float, digits: int = 3, *, strict: bool = True) -> tuple[str, str]:
    """Two numbers with so many significant digits, or as many more as it takes to show that they differ."""
    for count in range(digits, 18 if strict else digits + 1):
        shown = f"{one:.{count}g}", f"{other:.{count}g}"
        if float(shown[0]) != float(shown[1]):
            break
    return shown
