"""Any pipeline, compiled: one template per shape, filled with the rules of the stages. Equal to ``reference.run``.

Refuses to know any stage. Rules of the row (a cut, a target, a chance) are called as they are, on its statistics; rules
of each score are compiled into one loop, by stage type, where the scores are many, and are NumPy's where they are few
or where the compiler does not understand them. So nothing is compiled per pipeline, and little per stage: the rest
(statistics, cuts, the search for a prefix, noise) is in ``templates``, once for all. What no rule asks for is not
computed. What is odd (a row that cannot be drawn, weights below 0, a score that is NaN) is left to the reference: it
says what is wrong, or what is meant.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.backends import reference
from nucleate.backends.cpu import templates
from nucleate.backends.cpu.bind import give_up, loop, reads, reads_whole, sums_to_mass
from nucleate.backends.cpu.room import Floats, Ids, Kept, Odd, Room, room
from nucleate.backends.cpu.simd import GROUP
from nucleate.backends.cpu.start import check, dense, edit, remembers, start
from nucleate.backends.cpu.templates import ALL, LOWEST, MASS, WRONG
from nucleate.backends.logprobs import logprobs
from nucleate.core import noise
from nucleate.core.history import History, Past
from nucleate.core.stage import Ceiling, Draw, Drawn, Floor, Pipeline, Prefix, Scale, Shift, Stage, Tap

FEW = 512
"""Up to so many scores NumPy is as fast as a compiled loop, and needs no compiler."""


def run(logits_V: NDArray[Any], stages: Pipeline, seed: int, step: int, past: Past = History()) -> reference.Result:
    """Draw a token, report what a Tap asks for, and let the stages learn from it. As ``reference.run``."""
    try:
        with np.errstate(all="ignore"):
            return _run(logits_V, stages, seed, step, past)
    except Odd:
        return reference.run(logits_V, stages, seed, step, past)


def _run(logits_V: NDArray[Any], stages: Pipeline, seed: int, step: int, past: Past) -> reference.Result:
    work = room(len(logits_V))
    work.start()
    if not isinstance(stages[-1], Draw):
        raise Odd
    whole = [reads_whole(stage) for stage in stages]
    kept, place = start(work, logits_V, stages, past, any(whole))
    spans: dict[int, tuple[Kept, Kept]] = {}
    for i, stage in enumerate(stages[place:], place):
        told_later = remembers(stage)
        if told_later:
            work.fix(kept)
        before = kept
        if stage.greedy:
            kept = _only_first(work, kept)
        elif not stage.neutral:
            kept = _shape(work, kept, stage, past, seed, step, any(whole[i + 1 :]))
        if told_later:
            work.fix(kept)
            spans[i] = before, kept
    token = _pick(work, stages[-1], kept, seed, step)
    told, moved = None, list(stages)
    for i, (before, after) in spans.items():
        stage = stages[i]
        if isinstance(stage, Tap):
            told = logprobs(before.ids[: before.m], before.x[: before.m], token, *stage.wanted)
        if type(stage).after is not Stage.after:
            moved[i] = stage.after(Drawn(token, before.log_chance(token), after.log_chance(token)))
    return reference.Result(token, told, tuple(moved))


def _shape(work: Room, kept: Kept, stage: Any, past: Past, seed: int, step: int, whole: bool) -> Kept:
    match stage:
        case Shift():
            return _shift(work, kept, stage, past)
        case Scale():
            return _scale(work, kept, stage)
        case Draw() | Tap():
            return kept
        case Floor() | Prefix() | Ceiling():
            before = kept.uncut if whole else kept.whole or reference.Whole(np.nan, np.nan)
            if isinstance(stage, Floor):
                return _floor(work, kept, stage, before)
            if isinstance(stage, Prefix):
                return _prefix(work, kept, stage, before)
            return _ceiling(work, kept, stage, before, seed, step)
        case _:
            raise Odd


def _shift(work: Room, kept: Kept, stage: Shift, past: Past) -> Kept:
    """A Shift after a Scale or a cut: back to a row of all tokens, and on from there if it changed one."""
    before = np.full(work.size, -np.inf)
    before[kept.ids[: kept.m]] = kept.x[: kept.m]
    base = work.floats()
    base[: work.size] = before
    edit(base[: work.size], stage, past)
    if not (base[: work.size] != before).any():
        return kept
    top, low = templates.scan(base, work.size)
    check(top)
    return dense(work, base, top, low)


def _scale(work: Room, kept: Kept, stage: Scale) -> Kept:
    x = work.floats()  # another one, because only so do loops become vectors
    _values(kept, stage, "apply", x)
    top, low = templates.scan(x, kept.m)
    check(top)
    ids, base, m = kept.ids, kept.base, kept.m
    if not stage.monotone:
        base = work.floats()
        base[ids[:m]] = x[:m]
    if low == -np.inf:
        ids, _ = work.out(kept)
        m = templates.keep_above(x, kept.ids, m, 0.0, LOWEST, x, ids)
    return Kept(ids, x, base, m, top, None)


def _values(kept: Kept, stage: Stage, rule: str, out: Floats) -> None:
    """What a rule says of each score, into another array."""
    asked = reads(stage, rule)
    row = kept.statistics(asked.row)
    values = loop(stage, rule) if kept.m > FEW else None
    if values is not None and (mine := asked.numbers(stage)) is not None:
        try:
            values(kept.x, kept.m, kept.top, mine, row, out)
            return
        except Exception as error:  # noqa: BLE001  # whatever the compiler says: NumPy knows whether the rule is wrong
            give_up(stage, rule, error)
    out[: kept.m] = getattr(stage, rule)(kept.x[: kept.m] - kept.top, row)


def _only_first(work: Room, kept: Kept) -> Kept:
    whole = kept.whole or reference.Whole(np.nan, np.nan)
    return _one(work, kept, templates.first(kept.x, kept.ids, kept.base, kept.m, kept.top), whole)


def _one(work: Room, kept: Kept, place: int, whole: reference.Whole) -> Kept:
    ids, x = work.out(kept)
    ids[0], x[0] = kept.ids[place], kept.x[place]
    return Kept(ids, x, kept.base, 1, float(x[0]), whole)


def _floor(work: Room, kept: Kept, stage: Floor, whole: reference.Whole) -> Kept:
    cut = float(stage.floor(kept.statistics(reads(stage, "floor").row)))
    if not cut <= 0.0:
        return _one(work, kept, templates.first(kept.x, kept.ids, kept.base, kept.m, kept.top), whole)
    ids, x = work.out(kept)
    m = templates.keep_above(kept.x, kept.ids, kept.m, kept.top, cut, x, ids)
    return Kept(ids, x, kept.base, m, kept.top, whole)


def _prefix(work: Room, kept: Kept, stage: Prefix, whole: reference.Whole) -> Kept:
    _weights(work, kept, stage)
    goal = float(stage.target(kept.statistics(reads(stage, "target").row)))
    strict = not stage.reaches
    if not (goal >= 0.0 if strict else goal > 0.0):
        goal, strict = -np.inf, False  # only the first
    order, sign = kept.x, -1.0
    if type(stage).order is not Prefix.order:
        order, sign = work.keys, 1.0
        _values(kept, stage, "order", order)
    place = _reach(work, kept, order, sign, goal, strict)
    if place == ALL:
        return kept.with_whole(whole)
    ids, x = work.out(kept)
    m = templates.keep_until(order, sign, kept.x, kept.ids, kept.base, kept.m, place, strict, bool(stage.ties), x, ids)
    top = kept.top if sign < 0 else templates.scan(x, m)[0]
    return Kept(ids, x, kept.base, m, top, whole)


def _weights(work: Room, kept: Kept, stage: Prefix | Draw) -> None:
    """The weights of the tokens; and if they are what the mass is the sum of, that too."""
    if kept.known & MASS or not sums_to_mass(stage):
        _values(kept, stage, "weight", work.weights)
    else:
        templates.statistics_and_weights(kept.x, kept.m, kept.top, kept.row, work.weights)
        kept.known |= MASS


def _reach(work: Room, kept: Kept, order: Floats, sign: float, goal: float, strict: bool) -> int:
    three = kept.x, kept.ids, kept.base
    place = templates.reach(
        order, sign, work.weights, *three, kept.m, goal, strict, work.v, work.w, work.places, work.sums
    )
    if place == WRONG:
        raise Odd
    return int(place)


def _ceiling(work: Room, kept: Kept, stage: Ceiling, whole: reference.Whole, seed: int, step: int) -> Kept:
    if reference.coin((stage,), seed, step) >= stage.chance:
        return kept.with_whole(whole)
    cut = float(stage.ceiling(kept.statistics(reads(stage, "ceiling").row)))
    ids, x = work.out(kept)
    spared = np.array(stage.spared, np.int64)
    m = templates.drop_above(kept.x, kept.ids, kept.base, kept.m, kept.top, cut, spared, x, ids)
    return Kept(ids, x, kept.base, m, templates.scan(x, m)[0], whole)


def _pick(work: Room, stage: Any, kept: Kept, seed: int, step: int) -> int:
    """The token a Draw takes of those that are in. ``kept`` has no whole for it: it is the mass."""
    keys = np.uint64(seed), np.uint64(step)
    if stage.uniforms == "each":
        return _race_of_groups(work, stage, kept, *keys)
    if stage.uniforms == "none":
        return _race(stage, kept.ids[: kept.m], kept.x[: kept.m] - kept.top, np.zeros(kept.m))
    if stage.uniforms != "one":
        raise Odd
    alone = kept.with_whole(None)
    _weights(work, alone, stage)
    templates.uniforms(*keys, noise.TOKEN, work.every, 1, work.noise)
    goal = float(stage.target(alone.statistics(reads(stage, "target").row), work.noise[0]))
    if not goal > 0.0:
        raise Odd
    place = _reach(work, alone, alone.x, -1.0, goal, False)
    if place == ALL:  # rounding: the last one
        work.weights[: alone.m] = 1.0
        place = _reach(work, alone, alone.x, -1.0, float(alone.m), False)
    return int(alone.ids[place])


def _race_of_groups(work: Room, stage: Draw, kept: Kept, seed: Any, step: Any) -> int:
    """First the groups by their mass, then the tokens of the winner."""
    count = templates.groups(kept.x, kept.ids, kept.m, kept.top, work.starts, work.masses)
    groups_G = kept.ids[work.starts[:count]] // GROUP
    templates.uniforms(seed, step, noise.GROUP, groups_G, count, work.noise)
    winner = _race(stage, np.arange(count), work.masses[:count], work.noise[:count])
    inside = slice(work.starts[winner], work.starts[winner + 1])
    ids_N = kept.ids[inside]
    templates.uniforms(seed, step, noise.TOKEN, ids_N, len(ids_N), work.noise)
    return _race(stage, ids_N, kept.x[inside] - kept.top, work.noise[: len(ids_N)])


def _race(stage: Draw, ids_N: Ids, x_N: Floats, u_N: Floats) -> int:
    """The id with the highest score; of equal ones the lowest, as ids ascend."""
    score_N = np.asarray(stage.score(x_N, u_N))
    place = score_N.argmax()
    if score_N[place] != score_N[place]:  # NaN
        raise Odd
    return int(ids_N[place])
