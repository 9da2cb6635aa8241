"""Why a stage had its effect on a row, in words, with the numbers that decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nucleate.sampling.min_keep import min_keep_of
from nucleate.sampling.stage import Ceiling, Draw, Floor, Prefix, Scale, Shift, Stage, Transform, shape_of
from nucleate.sampling.trace_change import StageChange


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
