"""Pipelines that run as one kernel: their survivors and tokens are the reference's, and which pipelines these are."""

from __future__ import annotations

import ctypes
import threading

import edges
import numpy as np
import pytest

from nucleate.backends import reference
from nucleate.backends.cpu.special import rows as special_rows
from nucleate.backends.cpu.staged import fuse, room
from nucleate.backends.cpu.staged.facts import facts_of
from nucleate.backends.cpu.staged.lines import form
from nucleate.backends.cpu.staged.space import IDS, LONGEST, ODD
from nucleate.backends.cpu.staged.straight import straight
from nucleate.core.maths import absolute, exp, log, where
from nucleate.core.stage import Draw, Prefix, Scale, param
from nucleate.params import SamplingParams
from nucleate.sampler import Sampler
from nucleate.stages import (
    Categorical,
    DynamicTemperature,
    Epsilon,
    Eta,
    Greedy,
    Gumbel,
    LogitBias,
    Logprobs,
    MinP,
    Mirostat,
    PLess,
    Temperature,
    TopA,
    TopH,
    TopK,
    TopNSigma,
    TopP,
    Typical,
    Xtc,
)

SIZES = (513, 700, 1024, 2049, 5000, 20_000)


class Around(Prefix):
    """The nearest to a score, which may be above the top."""

    at: float = param("", default=-2.0, public=False)
    steep: float = param("", default=1.0, public=False)
    part: float = param("", default=0.5, public=False)

    def order(self, x, row):
        return absolute((x - self.at) * self.steep)

    def weight(self, x, row):
        return exp(x - row.top)

    def target(self, row):
        return self.part * row.mass


class Stretched(Scale):
    """A line of which a part depends on the row."""

    by: float = param("", default=1.0, public=False)

    def apply(self, x, row):
        return (x - row.mean) * self.by + log(row.n)


def drawn_stage(numbers):
    part = float(numbers.choice([numbers.uniform(0.01, 1.0), 0.5, 0.9, 0.95]))
    k = int(numbers.choice([numbers.integers(2, 400), numbers.integers(2, 9000)]))
    makers = (
        lambda: Temperature(float(numbers.uniform(0.1, 3.0))),
        lambda: DynamicTemperature(low=float(numbers.uniform(0.3, 1.0)), high=float(numbers.uniform(1.0, 2.0))),
        lambda: Stretched(float(numbers.uniform(0.5, 2.0))),
        lambda: Typical(part),
        lambda: Typical(part),
        lambda: Around(float(numbers.uniform(-8.0, 3.0)), float(10.0 ** numbers.uniform(-3, 3)), part),
        lambda: TopP(part),
        lambda: TopK(k, with_ties=bool(numbers.integers(2))),
        lambda: TopH(part),
        lambda: MinP(float(numbers.uniform(0.0, 0.3))),
        lambda: Eta(float(10.0 ** numbers.uniform(-5, -1))),
        lambda: Epsilon(float(10.0 ** numbers.uniform(-5, -2))),
        lambda: TopNSigma(float(numbers.uniform(0.5, 3.0))),
        lambda: TopA(float(numbers.uniform(0.0, 0.5))),
    )
    return makers[numbers.integers(len(makers))]()


def poisoned(size):
    """The room of this thread, with nothing in it that anybody may rely on."""
    work = room.room(size)
    for array in (work.rows, work.w, work.v, work.keys, work.weights, work.masses, work.weights_G, work.sums):
        array[:] = np.nan
    work.rows[:, 1] = 0.3
    return work


def run(logits, stages, seed, step):
    """The token, and the tokens that were left; None for those that the kernel leaves to others."""
    work = poisoned(len(logits))
    token = straight(work, logits, facts_of(stages), seed, step)
    if token == ODD:
        return None
    left = int(work.rows[LONGEST, 7])
    ids = (ctypes.c_int64 * max(left, 1)).from_address(int(work._control[IDS]))
    return token, sorted(ids[:left]) if left else np.flatnonzero(logits > -np.inf).tolist()


def test_random_pipelines_are_those_of_the_reference() -> None:
    numbers, ran, found = np.random.default_rng(0), 0, []
    for seed in range(1200):
        logits = edges.row(numbers, int(numbers.choice(SIZES)), str(numbers.choice(edges.KINDS)))
        stages = (*(drawn_stage(numbers) for _ in range(numbers.integers(1, 5))), Gumbel())
        assert facts_of(stages).straight
        got = run(logits, stages, seed, seed % 7)
        if got is None:
            continue
        ran += 1
        with np.errstate(all="ignore"):
            expected = (
                reference.run(logits, stages, seed, seed % 7).token,
                sorted(reference.survivors(logits, stages).ids_N.tolist()),
            )
        if got != expected:
            found.append((seed, stages, len(logits), got[0], expected[0], len(got[1]), len(expected[1])))
    assert ran > 1000
    assert not found, found


def test_a_row_that_says_nothing_is_left_to_others() -> None:
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    for bad in (np.nan, np.inf):
        odd = logits.copy()
        odd[700] = bad
        assert run(odd, (Typical(0.9), Gumbel()), 1, 0) is None
    assert run(np.full(1000, -np.inf, np.float32), (Typical(0.9), Gumbel()), 1, 0) is None
    assert run(logits, (Epsilon(0.9), Gumbel()), 1, 0) is None  # only the first stays: no rule says so
    assert fuse.run(logits, (Epsilon(0.9), Gumbel()), 1, 0).token == logits.argmax()


class Lost(Draw):
    uniforms = "each"

    def score(self, x, u):
        return log(x - x - 1.0)


class Odd(Scale):
    n: int = param("", default=3, public=False)
    none: float | None = param("", default=None, public=False)

    def apply(self, x, row):
        return x * self.n


class Unsure(Scale):
    limit: float | None = param("", default=None, public=False)

    def apply(self, x, row):
        return x * (1.0 if self.limit is None else self.limit)


class Uncompiled(Scale):
    def apply(self, x, row):
        return x * float(str(2.0))


@pytest.mark.parametrize(
    "stages",
    [
        (Typical(0.9),),
        (LogitBias({1: 1.0}), Typical(0.9), Gumbel()),
        (Logprobs(2), Typical(0.9), Gumbel()),
        (Mirostat(3.0), Gumbel()),
        (Xtc(1.0, 0.1), Gumbel()),
        (TopP(0.5, of_whole=True), Gumbel()),
        (Temperature(0.0), Gumbel()),
        (Typical(0.9), Greedy()),
        (Typical(0.9), Categorical()),
        (*[Temperature(0.9)] * LONGEST, Gumbel()),
        (Odd(2**60), Gumbel()),
        (Uncompiled(), Gumbel()),
    ],
)
def test_what_the_kernel_does_not_know_is_run_step_by_step(stages) -> None:
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    facts = facts_of(stages)
    if facts.straight:
        assert straight(room.room(1000), logits, facts, 1, 0) == ODD
    if stages[-1].__class__ is not Typical:
        assert fuse.run(logits, stages, 1, 0).token == reference.run(logits, stages, 1, 0).token


def test_what_a_stage_of_ones_own_may_say() -> None:
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    for stages in ((Odd(3), Gumbel()), (Unsure(), TopP(0.5), Gumbel()), (Unsure(2.0), PLess(True), Gumbel())):
        for step in range(20):
            assert fuse.run(logits, stages, 1, step).token == reference.run(logits, stages, 1, step).token
    assert run(logits, (Lost(),), 1, 0) is None


def test_threads_share_programs_and_no_room() -> None:
    stages, got = (Typical(0.9), Temperature(0.8), Gumbel()), {}
    some = [np.random.default_rng(i).normal(0.0, 3.0, 5000).astype(np.float32) for i in range(3)]
    expected = [[reference.run(x, stages, 1, step).token for step in range(40)] for x in some]

    def work(i):
        got[i] = [[fuse.run(some[i], stages, 1, step).token for step in range(40)] for _ in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {i: [tokens] * 20 for i, tokens in enumerate(expected)}


def test_the_form_of_a_rule() -> None:
    class Either(Scale):
        flag: bool = param("", default=False, public=False)

        def apply(self, x, row):
            return where(self.flag, x * row.var, absolute(x))

    class Squared(Scale):
        def apply(self, x, row):
            return x * x

    class Branching(Scale):
        def apply(self, x, row):
            return where(row.n > 3, x, absolute(x))

    assert form(Temperature(0.5), "apply") == form(DynamicTemperature(0.5, 1.5), "apply") == "line"
    assert form(Typical(0.5), "order") == form(Around(), "order") == "bent"
    assert form(Either(True), "apply") == "line"
    assert form(Either(False), "apply") == "bent"
    assert form(Squared(), "apply") is None
    assert form(Branching(), "apply") is None
    assert form(TopP(0.5), "weight") is None


def test_each_row_is_drawn_once_by_however_many_threads(monkeypatch) -> None:
    logits = np.random.default_rng(0).normal(size=(97, 32_000)).astype(np.float32)

    def drawn(threads):
        monkeypatch.setattr(special_rows, "cores", lambda: threads)
        monkeypatch.setattr(special_rows, "WORTH_A_THREAD", 1e-9)
        sampler = Sampler(32_000, backend="cpu")
        for seed in range(97):
            sampler.add(SamplingParams(temperature=0.8, top_p=0.9, seed=seed))
        return [sampler(logits).token_ids.tolist() for _ in range(5)]

    assert drawn(1) == drawn(2) == drawn(5) == drawn(200)
