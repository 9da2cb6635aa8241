"""Any pipeline, compiled: one template per shape, filled with the rules of the stages. Equal to ``reference.run``.

Refuses to know any stage. Rules of the row (a cut, a target, a chance) are called as they are, on its statistics; rules
of each score are compiled into one loop, by stage type, where the scores are many, and are NumPy's where they are few
or where the compiler does not understand them. So nothing is compiled per pipeline, and little per stage: the rest
(statistics, cuts, the search for a prefix, noise) is compiled once for all. What no rule asks for is not
computed. What is odd (a row that cannot be drawn, weights below 0, a score that is NaN) is left to the reference: it
says what is wrong, or what is meant.

Where there is nothing but scales, cuts and a draw, all of this is one call of a kernel, see ``straight``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.backends import reference
from nucleate.backends.cpu.doubles import LOWEST
from nucleate.backends.cpu.staged import candidates, keep, summary
from nucleate.backends.cpu.staged import start as begin
from nucleate.backends.cpu.staged.facts import Step, facts_of
from nucleate.backends.cpu.staged.pick import pick
from nucleate.backends.cpu.staged.prefix import narrow, said
from nucleate.backends.cpu.staged.raw import Raw, dense, listed
from nucleate.backends.cpu.staged.room import Floats, Kept, Odd, Room, room
from nucleate.backends.cpu.staged.start import Spans, Tokens, check, edit, plain, start
from nucleate.backends.cpu.staged.straight import straight
from nucleate.backends.logprobs import logprobs
from nucleate.backends.rules import reads
from nucleate.core import noise
from nucleate.core.event import StepLogprobs
from nucleate.core.history import History, Past
from nucleate.core.stage import Ceiling, Drawn, Floor, Pipeline, Scale, Shift, Stage

FLOAT32 = np.dtype(np.float32)

UNKNOWN = reference.Whole(np.nan, np.nan)
"""What was before a cut, where nobody asks."""


def run(logits_V: NDArray[Any], stages: Pipeline, seed: int, step: int, past: Past = History()) -> reference.Result:
    """Draw a token, report what a Tap asks for, and let the stages learn from it. As ``reference.run``."""
    facts = facts_of(stages)
    if facts.straight and logits_V.dtype is FLOAT32 and len(logits_V) > begin.FEW:
        work = room(len(logits_V))
        token = straight(work, plain(work, logits_V), facts, seed, step)
        if token >= 0:
            return reference.Result(token, None, stages)
    try:
        with np.errstate(all="ignore"):
            return _run(logits_V, stages, seed, step, past)
    except Odd:
        return reference.run(logits_V, stages, seed, step, past)


def survivors(logits_V: NDArray[Any], stages: Pipeline, past: Past = History(), u: float = 1.0) -> reference.Survivors:
    """The tokens left by every stage but the draw, in the order, with their final scores. As ``reference.survivors``.

    For inspection: all of them are sorted, and ``whole`` mostly takes a second run.
    """
    try:
        with np.errstate(all="ignore"):
            facts = facts_of(stages)
            tokens, _ = _walk(logits_V, facts.steps, past, u, facts.whole)
            kept = tokens.all() if isinstance(tokens, Raw) else tokens
            order_N = np.lexsort((-kept.base[kept.ids[: kept.m]], -kept.x[: kept.m]))
            ids_N, x_N = kept.ids[order_N], kept.x[order_N]
            if not facts.whole:
                tokens, _ = _walk(logits_V, facts.steps, past, u, whole=True)
            return reference.Survivors(ids_N, x_N, tokens.uncut)
    except Odd:
        return reference.survivors(logits_V, stages, past, u)


def probabilities(logits_V: NDArray[Any], stages: Pipeline, past: Past = History()) -> Floats:
    """The distribution the draw draws from, float64 [V], over all coins. As ``reference.probabilities``."""
    return reference.probabilities(logits_V, stages, past, survivors)


def _run(logits_V: NDArray[Any], stages: Pipeline, seed: int, step: int, past: Past) -> reference.Result:
    facts = facts_of(stages)
    if facts.steps[-1].shape != "Draw":
        raise Odd
    u = _coin(seed, step) if facts.flips else 1.0
    kept, spans = _walk(logits_V, facts.steps, past, u, facts.whole)
    token = pick(room(len(logits_V)), stages[-1], kept, seed, step)
    told, moved = None, list(stages)
    for i, (before, after) in spans.items():
        stage = stages[i]
        if facts.steps[i].shape == "Tap":
            given = all(one.idle for one in facts.steps[:i])
            told = _report(before, token, stage, given=given)
        if type(stage).after is not Stage.after:
            moved[i] = stage.after(Drawn(token, before.log_chance(token), after.log_chance(token)))
    return reference.Result(token, told, tuple(moved) if spans else stages)


def _report(tokens: Tokens, chosen: int, tap: Any, *, given: bool) -> StepLogprobs:
    """What a Tap asks for. given: of the row as given, which has a kernel of its own, with sums in float32."""
    if given and isinstance(tokens, Raw) and all(0 <= one < tokens.m for one in tap.wanted[1]):
        return tokens.report(chosen, *tap.wanted)
    kept = listed(tokens)
    return logprobs(kept.ids[: kept.m], kept.x[: kept.m], chosen, *tap.wanted)


def _walk(logits_V: NDArray[Any], steps: tuple[Step, ...], past: Past, u: float, whole: bool) -> tuple[Tokens, Spans]:
    """The tokens left by all stages; and before and after those that are told of the token drawn later.

    whole: whether a stage, or the caller, asks for the mass before the cuts.
    """
    work = room(len(logits_V))
    work.start()
    kept, place, spans = start(work, logits_V, steps, past)
    for i, step in enumerate(steps[place:], place):
        if step.idle:
            continue
        if step.remembers:
            work.fix(kept)
        before = kept
        kept = _only_first(work, kept, whole) if step.greedy else _shape(work, kept, step, past, u, whole)
        if step.remembers:
            work.fix(kept)
            spans[i] = before, kept
    return kept, spans


def _coin(seed: int, step: int) -> float:
    """As ``reference.coin``, where there is one."""
    found = np.empty(1)
    candidates.uniforms(np.uint64(seed), np.uint64(step), noise.XTC, np.zeros(1, np.int64), 1, found)
    return float(found[0])


def _shape(work: Room, kept: Tokens, step: Step, past: Past, u: float, whole: bool) -> Tokens:
    stage, shape = step.stage, step.shape
    if shape == "Shift":
        return _shift(work, listed(kept), stage, past)
    if shape == "Scale":
        return (isinstance(kept, Raw) and kept.scaled(stage)) or _scale(work, listed(kept), stage)
    if shape in {"Draw", "Tap"}:
        return kept
    if shape not in {"Floor", "Prefix", "Ceiling"}:
        raise Odd
    before = kept.uncut if whole else kept.whole or UNKNOWN
    if shape == "Floor":
        return _floor(work, kept, stage, before)
    if shape == "Prefix":
        return narrow(work, kept, stage, before)
    return _ceiling(work, listed(kept), stage, before) if u < stage.chance else kept.with_whole(before)


def _shift(work: Room, kept: Kept, stage: Shift, past: Past) -> Kept:
    """A Shift after a Scale or a cut: back to a row of all tokens, and on from there if it changed one."""
    before = np.full(work.size, -np.inf)
    before[kept.ids[: kept.m]] = kept.x[: kept.m]
    base = work.floats()
    base[: work.size] = before
    edit(base[: work.size], stage, past)
    if not (base[: work.size] != before).any():
        return kept
    top, low = summary.scan(base, work.size)
    check(top)
    return dense(work, base, top, low)


def _scale(work: Room, kept: Kept, stage: Scale) -> Kept:
    x = work.floats()
    said(kept, stage, "apply", x)
    top, low = summary.scan(x, kept.m)
    check(top)
    ids, base, m = kept.ids, kept.base, kept.m
    if not stage.monotone:
        base = work.floats()
        base[ids[:m]] = x[:m]
    if low == -np.inf:
        ids, _ = work.out(kept)
        m = keep.keep_above(x, kept.ids, m, 0.0, LOWEST, x, ids)
    return Kept(ids, x, base, m, top, None)


def _only_first(work: Room, kept: Tokens, whole: bool) -> Kept:
    return _first(work, kept, kept.uncut if whole else kept.whole or UNKNOWN)


def _first(work: Room, tokens: Tokens, whole: reference.Whole) -> Kept:
    kept = tokens.from_cut(0.0) if isinstance(tokens, Raw) else tokens
    place = keep.first(kept.x, kept.ids, kept.base, kept.m, kept.top)
    ids, x = work.out(kept)
    ids[0], x[0] = kept.ids[place], kept.x[place]
    return Kept(ids, x, kept.base, 1, float(x[0]), whole)


def _floor(work: Room, kept: Tokens, stage: Floor, whole: reference.Whole) -> Tokens:
    cut = float(stage.floor(kept.statistics(reads(stage, "floor").row)))
    if not cut <= 0.0:
        return _first(work, kept, whole)
    if isinstance(kept, Raw):
        if kept.all_reach(cut):
            return kept.with_whole(whole)
        kept = kept.from_cut(cut)
    ids, x = work.out(kept)
    m = keep.keep_above(kept.x, kept.ids, kept.m, kept.top, cut, x, ids)
    return Kept(ids, x, kept.base, m, kept.top, whole)


def _ceiling(work: Room, kept: Kept, stage: Ceiling, whole: reference.Whole) -> Kept:
    cut = float(stage.ceiling(kept.statistics(reads(stage, "ceiling").row)))
    ids, x = work.out(kept)
    spared = np.array(stage.spared, np.int64)
    m = keep.drop_above(kept.x, kept.ids, kept.base, kept.m, kept.top, cut, spared, x, ids)
    return Kept(ids, x, kept.base, m, summary.scan(x, m)[0], whole)
