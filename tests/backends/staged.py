"""Random rows and pipelines on a device against the reference: what differs. A script, too, see ``interpreted``."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import cases
import interpreted
import numpy as np

import nucleate as nc
from nucleate.backends import reference
from nucleate.core.maths import absolute, exp, log, minimum, sqrt, where
from nucleate.core.parameter import ParameterError
from nucleate.core.stage import Draw, Floor, Prefix, Scale, Shift, Tap, param
from nucleate.pipeline import simplify
from nucleate.rows import check_ids
from nucleate.stages import STAGES, Logprobs

NEAR = 1e-9


class Learner(Floor):
    """A state, told by a rule with a helper."""

    cut: float = param("", default=-3.0, public=False)
    seen: float = param("", default=0.0, public=False)

    def floor(self, row: Any) -> Any:
        return row.top + self.cut - self.half * self.seen

    @property
    def half(self) -> float:
        return self.cut / -2.0

    def after(self, drawn: Any) -> Any:
        return replace(self, seen=chance(drawn.before) + 0.5 * self.seen)


def chance(logprob: Any) -> Any:
    return exp(logprob)


class Tail(Draw):
    """Races the other way round, with noise of its own shape."""

    uniforms = "each"

    def score(self, x: Any, u: Any) -> Any:
        return log(u) * exp(-x / FIFTY)


FIFTY = 50.0


class Uneven(Draw):
    uniforms = "one"

    def weight(self, x: Any, row: Any) -> Any:
        return 1.0 / (1.0 + row.top - x)

    def target(self, row: Any, u: Any) -> Any:
        return u * 2.0


class Softer(Scale):
    """With a switch, and a helper; not monotone."""

    monotone = False
    on: bool = param("", neutral=False, public=False)
    n: int = param("", default=3, public=False)

    def apply(self, x: Any, row: Any) -> Any:
        return where(self.on, chance(x - row.top), abs(minimum(x, -self.n)))


class Nearest(Prefix):
    """An order, weights and a target that no stage of ours has; the first token need not be the best."""

    reaches = False
    part: float = param("", default=0.5, public=False)

    def order(self, x: Any, row: Any) -> Any:
        return absolute(x - row.mean)

    def weight(self, x: Any, row: Any) -> Any:
        return sqrt(exp(x - row.top))

    def target(self, row: Any) -> Any:
        return self.part * row.n


OWN = Learner(), Learner(-1.5, 0.3), Softer(on=True), Softer(), Nearest(), Nearest(0.1)


def own(kernels: bool) -> list[str]:
    """Stages of one's own."""
    numbers, found = np.random.default_rng(4), []
    for place, one in enumerate(OWN):
        for stages in ((one,), (STAGES["temperature"](0.9), one, STAGES["top_p"](0.9))):
            x = (numbers.normal(size=(5, 300)[place % 2]) * 3).astype(np.float32)
            draw = (Tail(), Uneven(), STAGES["gumbel"](1))[int(numbers.integers(3))]
            found += [why for why in [difference(kernels, x, (*stages, draw), 5, 3)] if why]
    return found


def near(one: Any, other: Any, part: float = NEAR) -> bool:
    """Equal, but for the last digits of floats."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) <= part * max(1.0, abs(one), abs(other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(near(a, b, part) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def parameters(stages: Any) -> list[Any]:
    return [(stage.name, *(getattr(stage, name) for name in stage.parameters)) for stage in stages]


def drawing(rows: list[tuple[Any, ...]], seeds: list[int], steps: list[int]) -> Any:
    """Rows of one structure as ``run.run`` takes them."""
    import torch

    from nucleate.backends.cuda.staged import groups, run, structure

    staged = [structure.staged_of(stages) for stages in rows]
    assert not any(isinstance(one, str) for one in staged), staged
    assert len({groups.structure_of(one) for one in staged}) == 1
    group = groups.group_of(staged, torch.device("cpu"))
    words = (torch.tensor([word - 2**64 * (word >= 2**63) for word in column]) for column in (seeds, steps))
    numbers = torch.tensor([one.numbers for one in staged], dtype=torch.float64).reshape(len(staged), -1)
    return run.Drawing(group.steps, numbers, group.spared, *words)


def outcome(kernels: bool, given: Any, logits: Any, rows: int = 64) -> Any:
    """The same through tensors or a kernel, whose room is full of what an earlier call left."""
    import torch

    from nucleate.backends.cuda.staged import launch, run

    if not kernels:
        return run.run(given, logits)
    work = launch.Workspace(rows, logits.shape[1], logits.device)
    room = work.room

    def dirty(name: str, there: bool, *shape: int, dtype: Any = torch.float64) -> Any:
        new = there and name not in work._kept
        found = room(name, there, *shape, dtype=dtype)
        return found.fill_(torch.nan if dtype.is_floating_point else 99) if new else found

    work.room = dirty
    return launch.run(given, False, logits, work)


def watched(stages: Any, size: int) -> Any:
    """With a Tap before the draw, if there is none, that reports every token that is in."""
    return stages if any(isinstance(stage, Tap) for stage in stages) else (*stages[:-1], Logprobs(size), stages[-1])


def difference(kernels: bool, x: Any, stages: Any, seed: int, step: int) -> str:
    """In what a row differs from the reference: the token, what is left and its scores, the state; or nothing."""
    return _difference(kernels, x, stages, seed, step)[:500]  # pytest is slow to compare long texts


def _difference(kernels: bool, x: Any, stages: Any, seed: int, step: int) -> str:
    import torch

    from nucleate.backends.cuda.staged import structure

    stages = watched(simplify(stages), len(x))
    place = next(i for i, stage in enumerate(stages) if isinstance(stage, Tap))
    try:
        expected = reference.run(x, stages, seed, step)
    except Exception as error:  # noqa: BLE001  # compared with what the kernels say
        expected = error
    given = drawing([stages], [seed], [step])
    got = outcome(kernels, given, torch.from_numpy(x)[None])
    token = got.tokens_R.tolist()[0]
    if isinstance(expected, Exception):
        return "" if token == -1 else f"drew {token}, the reference raised {expected!r}: {stages}"
    if token != expected.token:
        return f"drew {token}, the reference {expected.token}: {stages}"
    left = reference.spans(x, stages, nc.core.history.History(), reference.coin(stages, seed, step))[place]
    told_V = got.told_RV[0].numpy()
    if np.flatnonzero(told_V > -np.inf).tolist() != sorted(left.ids_N.tolist()):
        return f"left {np.flatnonzero(told_V > -np.inf)}, the reference {sorted(left.ids_N)}: {stages}"
    if not near(told_V[left.ids_N].tolist(), left.x_N.tolist()):
        return f"other scores: {stages}"
    moved = structure.moved(stages, given.steps, got.numbers_RP.tolist()[0])
    return "" if near(parameters(moved), parameters(expected.stages)) else f"{moved}, the reference {expected.stages}"


def survey(kernels: bool, seeds: list[int], sizes: Any = cases.SIZES, most: int = 6) -> list[str]:
    """Random pipelines without Shifts: what differs, by seed."""
    found = []
    cases.SIZES, before = sizes, cases.SIZES
    for seed in seeds:
        x, stages, _, step = cases.case(seed, most=most)
        stages = tuple(stage for stage in stages if not isinstance(stage, Shift))
        own = getattr(stages[-1], "seed", None)
        if why := difference(kernels, x, stages, 7 if own is None else own, step):
            found.append(f"{seed}: {why}")
    cases.SIZES = before
    return found


def chosen(kernels: bool) -> list[str]:
    """Cases that each take a way of their own through a kernel."""
    make, numbers, found = STAGES, np.random.default_rng(8), []
    tied = np.repeat(np.float32([0.5, 2.0, -1.0, 2.0, 1.0]), 4)
    tiny = numbers.permutation(np.arange(20)).astype(np.float32) * np.float32(1e-30)  # equal at a huge temperature
    wide, zeros = (numbers.normal(size=2100) * 2).astype(np.float32), np.float32([0.0, -0.0] * 4)
    flat, k, xtc = make["temperature"](1e300), make["top_k"], make["xtc"]
    cases_ = (
        *((tied, (k(5),)), (tied, (k(6, with_ties=True),)), (tied, (k(3), k(2))), (tied, (make["top_p"](0.5),))),
        *((tiny, (flat, k(3))), (tiny, (flat, flat, k(3))), (tiny, (flat, xtc(1.0, 0.01))), (tiny, (k(9), flat, k(3)))),
        *((tied, (xtc(1.0, 0.05, (9, 11)), xtc(0.5, 0.01, (3,)))), (zeros, (k(3),)), (zeros, (make["greedy"](),))),
        *((wide, (k(1500),)), (wide, (make["typical"](0.999),)), (wide, (k(1200), make["top_h"](0.9)))),
        *((tied, (k(9), make["top_p"](0.6, of_whole=True))), (tied, (make["adaptive_p"](0.1), k(3)))),
        (np.zeros(1300, np.float32), (xtc(1.0, 1e-5),)),
        *((tied, (make["mirostat"](1.0, mu=-3.0), flat)), (tiny, (flat, make["mirostat"](1.0, mu=-3.0)))),
    )
    for place, (x, stages) in enumerate(cases_):
        draw = (make["gumbel"](1), make["categorical"](1))[place % 2]
        ends = stages if stages[-1].rank >= 99 else (*stages, draw)
        found += [why for why in [difference(kernels, x, ends, place, 5)] if why]
    return found


def every_stage(kernels: bool, seeds: list[int], sizes: Any) -> list[str]:
    """Each stage that is no Shift alone, after a cut, and before a scale, with parameters at their edges."""
    found = []
    for seed in seeds:
        for name, kind in STAGES.items():
            if issubclass(kind, Shift | Tap):
                continue
            rng = random.Random(f"{name} {seed}")
            size = rng.choice(sizes)
            one, x = cases.stage(rng, name, size), cases.row(rng, size)
            ways = [(one, cases.stage(rng, rng.choice(cases.DRAWS), size))]
            if name in cases.DRAWS:
                ways = [(one,), (STAGES["top_p"](0.8), one)]
            else:
                ways += [(STAGES["top_k"](40), one, STAGES["gumbel"](seed))]
                ways += [(one, STAGES["temperature"](0.7), STAGES["gumbel"](seed))]
            found += [why for stages in ways if (why := difference(kernels, x, stages, seed, seed))]
    return found


def pipeline(rng: random.Random, size: int) -> tuple[Any, ...]:
    """Stages of any kind, in canonical order."""
    while True:
        names = rng.sample(cases.OTHERS, rng.randrange(1, 6))
        narrow = [name for name in names if not issubclass(STAGES[name], Shift)]
        names = sorted(narrow if rng.random() < 0.6 else names, key=lambda name: STAGES[name].rank)
        stages = (*(cases.stage(rng, name, size) for name in names), cases.stage(rng, rng.choice(cases.DRAWS), size))
        try:
            check_ids(simplify(stages), size)
        except ParameterError:
            continue
        return stages


def mixed(backend: str, seed: int, size: int, steps: int, kinds: int = 4) -> list[Any]:
    """What a Sampler says of rows of many structures, and their states."""
    import torch

    rng, sampler, story = random.Random(seed), nc.Sampler(size, backend), []
    for _ in range(kinds):
        stages = pipeline(rng, size)
        for _ in range(rng.randrange(1, 3)):
            sampler.add(stages, [rng.randrange(size) for _ in range(3)], seed=rng.getrandbits(64))
    for _ in range(steps):
        x_RV = np.stack([cases.row(rng, size) for _ in sampler.rows])
        if rng.random() < 0.3:
            x_RV[rng.randrange(len(x_RV)), rng.randrange(size)] = np.nan
        mask = np.stack([np.resize(cases.mask(rng, size), -(-size // 32)) for _ in sampler.rows])
        out = sampler(torch.from_numpy(x_RV), mask=mask if rng.random() < 0.4 else None)
        story.append((out.token_ids.tolist(), sorted(out.errors.items()), told(out.logprobs)))
        row, token = rng.choice(sampler.rows), rng.randrange(size)
        if rng.random() < 0.3:
            try:
                sampler.push(row, token)
            except ParameterError:  # a state that is no number any more
                return story
        story.append([parameters(sampler.stages(row)) for row in sampler.rows])
    return story


def told(logprobs: Any) -> Any:
    """Logprobs as lists; ranks of tokens that are out are none."""
    if logprobs is None or not any(logprobs):
        return None
    return [one and [[tuple(each) for each in part] for part in ([one.chosen], one.top, one.asked)] for one in logprobs]


if __name__ == "__main__":
    interpreted.serve(globals())
