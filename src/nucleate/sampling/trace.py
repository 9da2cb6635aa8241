"""trace: what every stage did to one row, token by token, and why. Changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.readiness import compiled
from nucleate.parameters.converters import shown
from nucleate.sampling import noise
from nucleate.sampling.backends import reference
from nucleate.sampling.backends.reference import Survivors
from nucleate.sampling.cpu_paths import runner, survivors
from nucleate.sampling.history import History
from nucleate.sampling.inputs import LogitsInput, check_ids, history, masks, per_row
from nucleate.sampling.pipeline import Params, as_pipeline
from nucleate.sampling.presets import with_mask
from nucleate.sampling.stage import Ceiling, Floor, Pipeline, Prefix, Scale, Shift, Stage, Tap, shape_of


@dataclass(frozen=True, eq=False)
class TraceStep:
    """What one stage did. Arrays are in ascending order of token ids."""

    stage: Stage | None  #: None for the logits as given
    why: str  #: in words, with the numbers it went by
    touched: NDArray[np.int64]  #: the tokens whose score it changed, and that stayed
    removed: NDArray[np.int64]  #: the tokens it put out
    scores: NDArray[np.float64]  #: [V] after it, -inf where a token is out
    probabilities: NDArray[np.float64]  #: [V] after it
    entropy: float  #: of these, in nats

    @property
    def name(self) -> str:
        return "logits" if self.stage is None else self.stage.name

    @property
    def left(self) -> int:
        """How many tokens are in after it."""
        return int(np.count_nonzero(self.scores > -np.inf))

    def likeliest(self, n: int) -> list[int]:
        """The first n tokens of the order, or as many as are in."""
        order_V = np.argsort(-self.scores, kind="stable")
        return [int(token) for token in order_V[: min(n, self.left)]]


@dataclass(frozen=True, eq=False)
class Trace:
    """What every stage of a pipeline did to one row. Print it, or read ``steps``; ``to_json`` is for pages."""

    steps: tuple[TraceStep, ...]  #: the logits as given, then a step per stage
    token_id: int | None  #: the draw; None if a stage left no token
    error: str | None  #: why not
    seed: int
    step: int

    def __str__(self) -> str:
        end = f"token {self.token_id}" if self.error is None else f"error: {self.error}"
        return f"{self.table()}\n{end} (seed {self.seed}, step {self.step})"

    def table(self, text: Callable[[int], str] = str) -> str:
        """A line per stage. text: how to show a token id."""
        rows = [("stage", "left", "touched", "removed", "entropy", "best", "p", "why")]
        for step in self.steps:
            [best] = step.likeliest(1)
            name = step.name if step.stage is None else _cut(shown(step.stage), 34)
            counts = (f"{step.left}", f"{len(step.touched)}", f"{len(step.removed)}")
            chance = f"{step.probabilities[best]:.4f}"
            rows.append((name, *counts, f"{step.entropy:.4f}", _cut(text(best), 20), chance, step.why))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(_aligned, row, widths, "<>>>><><")) for row in rows)
        return "\n".join(line.rstrip() for line in lines)

    def to_json(self, top: int = 20) -> str:
        """The trace with the ``top`` likeliest tokens after each stage, as [id, score, probability]."""
        steps = [
            {
                "stage": step.name,
                "shape": "" if step.stage is None else shape_of(step.stage).lower(),
                "repr": "" if step.stage is None else repr(step.stage),
                "why": step.why,
                "left": step.left,
                "entropy": step.entropy,
                "touched": step.touched[:top].tolist(),
                "touched_count": len(step.touched),
                "removed": step.removed[:top].tolist(),
                "removed_count": len(step.removed),
                "top": [[i, float(step.scores[i]), float(step.probabilities[i])] for i in step.likeliest(top)],
            }
            for step in self.steps
        ]
        end = {"token_id": self.token_id, "error": self.error, "seed": self.seed, "step": self.step}
        return json.dumps({**end, "steps": steps}, allow_nan=False)


def trace(
    logits_V: Any,
    params: Params,
    *,
    prompt_ids: Sequence[int] | None = None,
    output_ids: Sequence[int] | None = None,
    step: int = 0,
    mask: Any = None,
    backend: str = "reference",
) -> Trace:
    """What each stage would do to one row: the tokens it touches and removes, why, and the distribution after it.

    logits_V: float [V]. Other arguments as in ``sample``, for one row; mask: int32 [V / 32]. backend: as in ``sample``,
    and "cpu" or "auto" may be slower than the reference here, as each stage is a run. The token is the one that
    ``sample`` draws. Stages are shown as asked for, also those that cannot change the draw. Logits that are NaN, +inf
    or all -inf, or a stage that leaves no token, are the ``error``.
    """
    logits = LogitsInput(_alone(logits_V, "logits"))
    size, stages = logits.shape[1], as_pipeline(params)
    fast = compiled(backend, size)
    check_ids(stages, size)
    [at], [mask_W] = per_row(step, 1, "step"), masks(None if mask is None else _alone(mask, "mask"), 1, size)
    stages = stages if mask_W is None else with_mask(stages)
    prompt = history(() if prompt_ids is None else prompt_ids, size, "prompt_ids")
    output = history(() if output_ids is None else output_ids, size, "output_ids")
    seed = getattr(stages[-1], "seed", None)
    seed = noise.fresh_seed() if seed is None else seed
    return _trace(logits[0], stages, History(prompt, output, mask_W), seed, at, fast=fast)


def _alone(row: Any, name: str) -> Any:
    """One row, NumPy or torch, as a batch."""
    array = row if hasattr(row, "detach") else np.asarray(row)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one row, a list of numbers, got the shape {list(array.shape)}")
    return array[None]


def _walk(
    kept: Survivors, logits_V: NDArray[np.float32], stages: Pipeline, past: History, u: float, *, fast: bool
) -> Iterator[Survivors]:
    """The tokens left after each stage but the draw. fast: the CPU backend runs all stages so far each time."""
    if not fast:
        yield from reference.walk(kept, len(logits_V), stages[:-1], past, u)
        return
    for count in range(1, len(stages)):
        yield survivors(fast)(logits_V, (*stages[:count], stages[-1]), past, u)


def _trace(
    logits_V: NDArray[np.float32], stages: Pipeline, past: History, seed: int, step: int, *, fast: bool
) -> Trace:
    steps: list[TraceStep] = []
    try:
        kept = reference.everything(logits_V)
        steps.append(_step(None, "as given", None, kept, len(logits_V)))
        u = reference.coin(stages, seed, step)
        for stage, left in zip(stages[:-1], _walk(kept, logits_V, stages, past, u, fast=fast), strict=True):
            steps.append(_step(stage, _why(stage, kept, left, u), kept, left, len(logits_V)))
            kept = left
        if fast:
            token = runner(fast)(logits_V, stages, seed, step, past).token
        else:
            token = reference.pick(stages[-1], kept, seed, step)
    except reference.RowError as error:
        return Trace(tuple(steps), None, str(error), seed, step)
    drawn = Survivors(np.array([token]), kept.x_N[kept.ids_N == token], kept.whole)
    steps.append(_step(stages[-1], _draw(stages[-1], kept, token), kept, drawn, len(logits_V)))
    return Trace(tuple(steps), token, None, seed, step)


def _step(stage: Stage | None, why: str, kept: Survivors | None, left: Survivors, size: int) -> TraceStep:
    before_V, after_V, p_V = np.full(size, -np.inf), np.full(size, -np.inf), np.zeros(size)
    after_V[left.ids_N] = left.x_N
    p_V[left.ids_N] = _chances(left)
    start = left if kept is None else kept
    before_V[start.ids_N] = start.x_N
    out_V = (before_V > -np.inf) & (after_V == -np.inf)
    touched_V = (before_V != after_V) & ~out_V
    entropy = max(0.0, float(reference.statistics(left.x_N).entropy))  # rounding may take it below
    return TraceStep(stage, why, np.flatnonzero(touched_V), np.flatnonzero(out_V), after_V, p_V, entropy)


def _chances(kept: Survivors) -> NDArray[np.float64]:
    e_N = np.exp(kept.x_N - kept.x_N.max())
    return np.asarray(e_N / e_N.sum())


# ---- why: what a stage went by, in words, from what was there before it and after it


def _why(stage: Stage, kept: Survivors, left: Survivors, u: float) -> str:
    if stage.greedy:
        return "greedy: only the first of the order stays"
    if stage.neutral:
        return "neutral: does nothing"
    with np.errstate(all="ignore"):
        return _WHY[shape_of(stage)](stage, kept, left, u)


def _shift(stage: Shift, kept: Survivors, left: Survivors, u: float) -> str:
    who = _WHO["seen" if stage.touches == "output" and stage.window is not None else stage.touches]
    window = "" if stage.window is None or stage.window < 0 else f", the last {stage.window} of them"
    _, before, after = np.intersect1d(kept.ids_N, left.ids_N, assume_unique=True, return_indices=True)
    changes = left.x_N[after] - kept.x_N[before]
    changes, banned = changes[changes != 0], len(kept.ids_N) - len(left.ids_N)
    said = []
    if len(changes):
        low, high = f"{changes.min():+.4g}", f"{changes.max():+.4g}"
        said.append(f"{len(changes)} changed by {low if low == high else f'{low} to {high}'}")
    if banned:
        said.append(f"{banned} banned")
    return f"{who}{window}: {', '.join(said) or 'none to change'}"


_WHO = {
    "seen": "tokens of prompt and output",
    "output": "tokens of the output",
    "listed": "listed tokens",
    "unlisted": "tokens that are not listed",
    "masked": "tokens that the mask forbids",
}


def _scale(stage: Scale, kept: Survivors, left: Survivors, u: float) -> str:
    before, after = (float(there.x_N[0] - there.x_N[-1]) for there in (kept, left))
    moved = "" if kept.ids_N[0] == left.ids_N[0] else "; another token is the best"
    return f"from the best score to the last {before:.4g}, now {after:.4g}{moved}"


def _floor(stage: Floor, kept: Survivors, left: Survivors, u: float) -> str:
    _, row = reference.seen(kept)
    cut = float(stage.floor(row))
    asked = f"probability >= {np.exp(cut - row.top) / row.mass:.3g}"
    if cut > row.top:
        return f"{asked}, which none has: the best stays"
    return f"{asked}, that is {np.exp(cut - row.top):.3g} of the best"


def _prefix(stage: Prefix, kept: Survivors, left: Survivors, u: float) -> str:
    below_N, row = reference.seen(kept)
    weight_N, stays_N = stage.weight(below_N, row), np.isin(kept.ids_N, left.ids_N)
    target, total, chance = float(stage.target(row)), float(weight_N.sum()), float(_chances(kept)[stays_N].sum())
    least = "" if stage.reaches else "at most "
    counts = np.ptp(weight_N) == 0 and (weight_N == stage.weight(below_N - 1.0, row)).all()  # whatever they score
    if counts or not total > 0:
        return f"{least}{target:.6g} asked for, probability {chance:.4g} in all"
    of_all = target != float(stage.target(row._replace(whole=row.mass)))
    total *= float(row.whole / row.mass) if of_all else 1.0
    asked, reached = f"{target / total:.4g}", f"{float(weight_N[stays_N].sum()) / total:.4g}"
    share = " of all tokens" if of_all else "" if np.allclose(weight_N / total, _chances(kept)) else " of the weight"
    own = "" if type(stage).order is Prefix.order else ", in an order of its own"
    probability = f", probability {chance:.4g} in all" if share else ""
    return f"{least}{asked}{share} asked for, {reached} {'reached' if stage.reaches else 'there'}{probability}{own}"


def _ceiling(stage: Ceiling, kept: Survivors, left: Survivors, u: float) -> str:
    if u >= stage.chance:
        return f"coin {u:.4f} >= {stage.chance:g}: not in this step"
    below_N, row = reference.seen(kept)
    cut = float(stage.ceiling(row))
    above, coin = int((below_N >= cut).sum()), f"coin {u:.4f} < {stage.chance:g}"
    least = f"probability >= {np.exp(cut - row.top) / row.mass:.3g}"
    return f"{coin}: {above} with {least}{', the last of them stays' if above else ''}"


def _tap(stage: Tap, kept: Survivors, left: Survivors, u: float) -> str:
    return "reports logprobs as of here"


def _draw(stage: Any, kept: Survivors, token: int) -> str:
    how = {"none": "the highest score", "each": "the highest score with noise", "one": "walked down the order"}
    place = int(np.flatnonzero(kept.ids_N == token)[0])
    return f"{how[stage.uniforms]}: number {place + 1} of {len(kept.ids_N)}, probability {_chances(kept)[place]:.4g}"


_WHY: Mapping[str, Callable[[Any, Survivors, Survivors, float], str]] = {
    "Shift": _shift,
    "Scale": _scale,
    "Floor": _floor,
    "Prefix": _prefix,
    "Ceiling": _ceiling,
    "Tap": _tap,
}


def _aligned(text: str, width: int, side: str) -> str:
    return f"{text:{side}{width}}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
