"""trace: shows the effect of every stage on one row, with the reason."""

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
from nucleate.sampling.companion import combined_rows, split_combine
from nucleate.sampling.cpu_paths import runner, survivors
from nucleate.sampling.history import History
from nucleate.sampling.inputs import LogitsInput, check_ids, history, masks, per_row
from nucleate.sampling.pipeline import Params, as_pipeline
from nucleate.sampling.presets import with_mask
from nucleate.sampling.stage import Ceiling, Floor, Pipeline, Prefix, Scale, Shift, Stage, Transform, shape_of


@dataclass(frozen=True, eq=False)
class TraceStep:
    """The effect of one stage. Arrays of token ids are in ascending order."""

    stage: Stage | None  #: None for the logits
    why: str  #: the reason, with the deciding numbers
    touched: NDArray[np.int64]  #: surviving tokens whose score it changed
    removed: NDArray[np.int64]  #: tokens that it removed
    scores: NDArray[np.float64]  #: [V] after it, -inf for removed tokens
    probabilities: NDArray[np.float64]  #: [V] after it
    entropy: float  #: of these, in nats

    @property
    def name(self) -> str:
        return "logits" if self.stage is None else self.stage.name

    @property
    def left(self) -> int:
        """Number of surviving tokens."""
        return int(np.count_nonzero(self.scores > -np.inf))

    def most_likely(self, n: int) -> list[int]:
        """The n most likely tokens, in rank order."""
        order_V = np.argsort(-self.scores, kind="stable")
        return [int(token) for token in order_V[: min(n, self.left)]]


@dataclass(frozen=True, eq=False)
class Trace:
    """The effect of every stage of a pipeline on one row. Print it, read ``steps``, or use ``to_json``."""

    steps: tuple[TraceStep, ...]  #: the logits, then one per stage
    token_id: int | None  #: the sampled token; None if no token survived
    error: str | None  #: the reason, if there is no token
    seed: int
    step: int

    def __str__(self) -> str:
        end = f"token {self.token_id}" if self.error is None else f"error: {self.error}"
        return f"{self.table()}\n{end} (seed {self.seed}, step {self.step})"

    def table(self, text: Callable[[int], str] = str) -> str:
        """One line per stage. text: formats a token id."""
        rows = [("stage", "left", "touched", "removed", "entropy", "best", "p", "why")]
        for step in self.steps:
            [best] = step.most_likely(1)
            name = step.name if step.stage is None else _cut(shown(step.stage), 34)
            counts = (f"{step.left}", f"{len(step.touched)}", f"{len(step.removed)}")
            chance = f"{step.probabilities[best]:.4f}"
            rows.append((name, *counts, f"{step.entropy:.4f}", _cut(text(best), 20), chance, step.why))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(_aligned, row, widths, "<>>>><><")) for row in rows)
        return "\n".join(line.rstrip() for line in lines)

    def to_json(self, top: int = 20) -> str:
        """The trace as JSON, with the ``top`` most likely tokens after each stage as [id, score, probability]."""
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
                "top": [[i, float(step.scores[i]), float(step.probabilities[i])] for i in step.most_likely(top)],
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
    companion: Any = None,
    backend: str = "reference",
) -> Trace:
    """Show the effect of each stage on one row: tokens changed and removed, the reason, the resulting distribution.

    logits_V: float [V]. Other arguments as in ``sample``, for one row; mask: int32 [V / 32]; companion: float [V], with
    which the logits are combined first. backend: as in ``sample``,
    but "cpu" and "auto" may be slower than the reference here. The token is the one that ``sample`` returns. All given
    stages are shown, also those that cannot change the result. ``error`` reports logits that are NaN, +inf or all -inf,
    and a stage that removes all tokens.
    """
    logits = LogitsInput(_as_batch(logits_V, "logits"))
    size, (combine, stages) = logits.shape[1], split_combine(as_pipeline(params))
    fast = compiled(backend, size)
    check_ids(stages, size)
    if combine is not None:
        others = None if companion is None else _as_batch(companion, "companion")
        logits = LogitsInput(combined_rows([combine], _as_batch(logits_V, "logits"), others))
    [at], [mask_W] = per_row(step, 1, "step"), masks(None if mask is None else _as_batch(mask, "mask"), 1, size)
    stages = stages if mask_W is None else with_mask(stages)
    prompt = history(() if prompt_ids is None else prompt_ids, size, "prompt_ids")
    output = history(() if output_ids is None else output_ids, size, "output_ids")
    seed = getattr(stages[-1], "seed", None)
    seed = noise.fresh_seed() if seed is None else seed
    why = "as given" if combine is None else f"combined by {combine!r}"
    return _trace(logits[0], stages, History(prompt, output, mask_W), seed, at, why, fast=fast)


def _as_batch(row: Any, name: str) -> Any:
    """One row, NumPy or torch, as a batch."""
    array = row if hasattr(row, "detach") else np.asarray(row)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one row, a list of numbers, got the shape {list(array.shape)}")
    return array[None]


def _walk(
    kept: Survivors, logits_V: NDArray[np.float32], stages: Pipeline, past: History, u: float, *, fast: bool
) -> Iterator[Survivors]:
    """The surviving tokens after each stage except the draw. fast: use the CPU backend for each prefix of stages."""
    if not fast:
        yield from reference.apply_stages(kept, len(logits_V), stages[:-1], past, u)
        return
    for count in range(1, len(stages)):
        yield survivors(fast)(logits_V, (*stages[:count], stages[-1]), past, u)


def _trace(
    logits_V: NDArray[np.float32], stages: Pipeline, past: History, seed: int, step: int, why: str, *, fast: bool
) -> Trace:
    steps: list[TraceStep] = []
    try:
        kept = reference.all_tokens(logits_V)
        steps.append(_step(None, why, None, kept, len(logits_V)))
        u = reference.xtc_uniform(stages, seed, step)
        for stage, left in zip(stages[:-1], _walk(kept, logits_V, stages, past, u, fast=fast), strict=True):
            steps.append(_step(stage, _why(stage, kept, left, u), kept, left, len(logits_V)))
            kept = left
        if fast:
            token = runner(fast)(logits_V, stages, seed, step, past).token
        else:
            token = reference.select_token(stages[-1], kept, *reference.noise_of(stages, past, seed, step))
    except reference.RowError as error:
        return Trace(tuple(steps), None, str(error), seed, step)
    drawn = Survivors(np.array([token]), kept.x_N[kept.ids_N == token], kept.total)
    steps.append(_step(stages[-1], _draw_reason(stages[-1], kept, token), kept, drawn, len(logits_V)))
    return Trace(tuple(steps), token, None, seed, step)


def _step(stage: Stage | None, why: str, kept: Survivors | None, left: Survivors, size: int) -> TraceStep:
    before_V, after_V, p_V = np.full(size, -np.inf), np.full(size, -np.inf), np.zeros(size)
    after_V[left.ids_N] = left.x_N
    p_V[left.ids_N] = _probabilities(left)
    start = left if kept is None else kept
    before_V[start.ids_N] = start.x_N
    out_V = (before_V > -np.inf) & (after_V == -np.inf)
    touched_V = (before_V != after_V) & ~out_V
    entropy = max(0.0, float(reference.statistics(left.x_N).entropy))  # rounding may make it negative
    return TraceStep(stage, why, np.flatnonzero(touched_V), np.flatnonzero(out_V), after_V, p_V, entropy)


def _probabilities(kept: Survivors) -> NDArray[np.float64]:
    e_N = np.exp(kept.x_N - kept.x_N.max())
    return np.asarray(e_N / e_N.sum())


# ---- why: the reason, from the tokens before and after a stage


def _why(stage: Stage, kept: Survivors, left: Survivors, u: float) -> str:
    if stage.greedy:
        return "greedy: keeps only the first of the ranking"
    if stage.neutral:
        return "neutral: no effect"
    with np.errstate(all="ignore"):
        return _WHY[shape_of(stage)](stage, kept, left, u)


def _shift(stage: Shift, kept: Survivors, left: Survivors, u: float) -> str:
    subject = _SUBJECTS["seen" if stage.touches == "output" and stage.window is not None else stage.touches]
    window = "" if stage.window is None or stage.window < 0 else f", the last {stage.window}"
    _, before, after = np.intersect1d(kept.ids_N, left.ids_N, assume_unique=True, return_indices=True)
    changes = left.x_N[after] - kept.x_N[before]
    changes, banned = changes[changes != 0], len(kept.ids_N) - len(left.ids_N)
    parts = []
    if len(changes):
        low, high = f"{changes.min():+.4g}", f"{changes.max():+.4g}"
        parts.append(f"{len(changes)} changed by {low if low == high else f'{low} to {high}'}")
    if banned:
        parts.append(f"{banned} banned")
    return f"{subject}{window}: {', '.join(parts) or 'none changed'}"


_SUBJECTS = {
    "seen": "prompt and output tokens",
    "output": "output tokens",
    "listed": "listed tokens",
    "unlisted": "unlisted tokens",
    "masked": "masked tokens",
    "all": "all tokens",
}


def _scale(stage: Scale, kept: Survivors, left: Survivors, u: float) -> str:
    before, after = (float(there.x_N[0] - there.x_N[-1]) for there in (kept, left))
    moved = "" if kept.ids_N[0] == left.ids_N[0] else "; another token ranks first"
    return f"score range {before:.4g} -> {after:.4g}{moved}"


def _floor(stage: Floor, kept: Survivors, left: Survivors, u: float) -> str:
    _, row = reference.relative_scores(kept)
    cut = float(stage.floor(row))
    condition = f"probability >= {np.exp(cut - row.top) / row.mass:.3g}"
    if cut > row.top:
        return f"{condition}: no token, keeps the first"
    return f"{condition}, {np.exp(cut - row.top):.3g} of the highest"


def _prefix(stage: Prefix, kept: Survivors, left: Survivors, u: float) -> str:
    below_N, row = reference.relative_scores(kept)
    weight_N, stays_N = stage.weight(below_N, row), np.isin(kept.ids_N, left.ids_N)
    target, total, chance = float(stage.target(row)), float(weight_N.sum()), float(_probabilities(kept)[stays_N].sum())
    least = "" if stage.inclusive else "at most "
    counts = np.ptp(weight_N) == 0 and (weight_N == stage.weight(below_N - 1.0, row)).all()  # independent of the score
    if counts or not total > 0:
        return f"target {least}{target:.6g} tokens, kept probability {chance:.4g}"
    of_all = target != float(stage.target(row._replace(full_mass=row.mass)))
    total *= float(row.full_mass / row.mass) if of_all else 1.0
    condition, reached = f"{target / total:.4g}", f"{float(weight_N[stays_N].sum()) / total:.4g}"
    is_probability = np.allclose(weight_N / total, _probabilities(kept))
    share = " of all tokens" if of_all else "" if is_probability else " of the weight"
    own = "" if type(stage).order is Prefix.order else ", in its own ranking"
    probability = f", kept probability {chance:.4g}" if share else ""
    return f"target {least}{condition}{share}, reached {reached}{probability}{own}"


def _transform(stage: Transform, kept: Survivors, left: Survivors, u: float) -> str:
    p_V, after_V = np.zeros((2, max(kept.ids_N) + 1))
    p_V[kept.ids_N], after_V[left.ids_N] = _probabilities(kept), _probabilities(left)
    return f"probabilities moved by {np.abs(after_V - p_V).sum() / 2:.3g} in total"


def _ceiling(stage: Ceiling, kept: Survivors, left: Survivors, u: float) -> str:
    if u >= stage.act_probability:
        return f"random number {u:.4f} >= {stage.act_probability:g}: inactive in this step"
    below_N, row = reference.relative_scores(kept)
    cut = float(stage.ceiling(row))
    above, event = int((below_N >= cut).sum()), f"random number {u:.4f} < {stage.act_probability:g}"
    least = f"probability >= {np.exp(cut - row.top) / row.mass:.3g}"
    return f"{event}: {above} with {least}{', keeps the last of them' if above else ''}"


def _draw_reason(stage: Any, kept: Survivors, token: int) -> str:
    how = {"none": "highest score", "each": "highest score with noise", "one": "inverse CDF"}
    rank = int(np.flatnonzero(kept.ids_N == token)[0])
    p = _probabilities(kept)[rank]
    return f"{how[stage.uniforms]}: rank {rank + 1} of {len(kept.ids_N)}, probability {p:.4g}"


_WHY: Mapping[str, Callable[[Any, Survivors, Survivors, float], str]] = {
    "Shift": _shift,
    "Scale": _scale,
    "Floor": _floor,
    "Prefix": _prefix,
    "Ceiling": _ceiling,
    "Transform": _transform,
    "Tap": lambda *_: "reports logprobs of this distribution",
}


def _aligned(text: str, width: int, side: str) -> str:
    return f"{text:{side}{width}}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
