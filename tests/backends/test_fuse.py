"""The compiled path for any pipeline equals the reference: tokens, what a Tap reports, stages moved on, and errors."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from pathlib import Path

import cases
import numpy as np
import pytest
from cases import OTHERS, case
from edges import KINDS, NEAR, row

from nucleate.backends import reference
from nucleate.backends.cpu import doubles
from nucleate.backends.cpu.staged import bind, fuse, shortlist, start
from nucleate.core.history import History
from nucleate.core.maths import exp, log, minimum, where
from nucleate.core.stage import Ceiling, Draw, Prefix, Scale, Shift, Tap, param
from nucleate.stages import (
    AdaptiveP,
    Categorical,
    DynamicTemperature,
    Epsilon,
    Eta,
    Gumbel,
    LogitBias,
    Logprobs,
    MinP,
    Mirostat,
    PLess,
    Suppress,
    Temperature,
    TopA,
    TopH,
    TopK,
    TopNSigma,
    TopP,
    Typical,
    Xtc,
)

SMALL, LARGE = cases.SIZES, (2049, 3000, 5000, 20_000)
SOME = np.random.default_rng(0).normal(size=5000).astype(np.float32) * 3


def outcome(run, logits, stages, history=History(), step=0, seed=None):
    """What a backend says: token, report, stages; or its error."""
    own = getattr(stages[-1], "seed", None) if seed is None else seed
    try:
        return run(logits, stages, 7 if own is None else own, step, history)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def watched(stages, size):
    """With a Tap before the draw, if there is none, that reports every token that is in."""
    return stages if any(isinstance(stage, Tap) for stage in stages) else (*stages[:-1], Logprobs(size), stages[-1])


def near(a, b, part=1e-9):
    return a == b or abs(a - b) <= part * max(1.0, abs(a), abs(b))


def difference(one, other):
    """In what two outcomes differ, or nothing."""
    if isinstance(one, str) or isinstance(other, str):
        return "" if one is other or one == other else f"error: {one} != {other}"
    if one.token != other.token:
        return f"token: {one.token} != {other.token}"
    if (one.logprobs is None) != (other.logprobs is None):
        return "one has no report"
    reports = [[r.chosen, *r.top, *r.asked] if r else [] for r in (one.logprobs, other.logprobs)]
    if [(t.token_id, t.rank) for t in reports[0]] != [(t.token_id, t.rank) for t in reports[1]]:
        return "tokens reported"
    part = NEAR if isinstance(next(s for s in one.stages if not s.neutral), Tap) else 1e-9  # of the row as given
    if not all(near(a.logprob, b.logprob, part) for a, b in zip(*reports, strict=True)):
        return "logprobs"
    for a, b in zip(one.stages, other.stages, strict=True):
        pairs = [(getattr(a, name), getattr(b, name)) for name in a.parameters]
        if not all(u == v or (isinstance(u, float) and near(u, v)) for u, v in pairs):
            return f"moved: {a} != {b}"
    return ""


def both(logits, stages, history=History(), step=0, seed=None):
    return difference(*(outcome(run, logits, stages, history, step, seed) for run in (reference.run, fuse.run)))


@pytest.fixture(params=[0, 512], ids=["compiled loops", "NumPy where few"])
def few(request, monkeypatch):
    monkeypatch.setattr(bind, "FEW", request.param)
    monkeypatch.setattr(shortlist, "FEW", request.param)
    monkeypatch.setattr(start, "FEW", request.param)


@pytest.mark.parametrize(("sizes", "count"), [(SMALL, 2500), (LARGE, 100)])
def test_random_pipelines_are_those_of_the_reference(few, monkeypatch, sizes, count) -> None:
    monkeypatch.setattr(cases, "SIZES", sizes)
    fell, found, ran = Counter(), {}, reference.run

    def spied(*arguments):
        fell["raised"] += 1  # unless it comes back
        result = ran(*arguments)
        fell.update(odd=1, raised=-1)
        return result

    for seed in range(count):
        logits, stages, history, step = case(seed, most=6)
        stages = watched(stages, len(logits))
        expected = outcome(ran, logits, stages, history, step)
        with monkeypatch.context() as patched:
            patched.setattr(reference, "run", spied)
            got = outcome(fuse.run, logits, stages, history, step)
        if why := difference(expected, got):
            found[seed] = why, stages
    assert fell["odd"] == 0, fell
    assert fell["raised"] < 0.1 * count
    # Two tokens equally far from adaptive-p's target, one on either side, differ in the last bit or not at all.
    assert all("AdaptiveP" in str(stages) for _, stages in found.values()), found
    assert len(found) <= 0.001 * count, found


@pytest.mark.parametrize(("sizes", "count"), [(SMALL, 800), (LARGE, 50)])
def test_survivors_and_probabilities_are_those_of_the_reference(few, monkeypatch, sizes, count) -> None:
    monkeypatch.setattr(cases, "SIZES", sizes)
    empty = 0
    for seed in range(count):
        logits, stages, history, _ = case(seed, most=5)
        for given in (stages, stages[:-1]):  # with and without a draw
            for u in (2.0**-65, 0.4, 1.0):
                expected, got = (told(run.survivors, logits, given, history, u) for run in (reference, fuse))
                if isinstance(expected, str):
                    assert got == expected
                    empty += 1
                    continue
                assert got.ids_N.tolist() == expected.ids_N.tolist(), (seed, given, u)
                atol = 1e-9 * max(1.0, np.ptp(expected.x_N))
                np.testing.assert_allclose(got.x_N, expected.x_N, rtol=1e-9, atol=atol, equal_nan=False)
                assert got.whole == pytest.approx(expected.whole, rel=1e-9)
        one, other = (told(run.probabilities, logits, stages, history) for run in (reference, fuse))
        if isinstance(one, str):
            assert other == one, (seed, stages)
        else:
            np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12, equal_nan=False, err_msg=f"{seed}: {stages}")
    assert empty < 0.2 * 6 * count
    assert fuse.survivors(SOME, ()).ids_N.tolist() == np.argsort(-SOME, kind="stable").tolist()


def told(run, *arguments):
    """What a function gives, or its error."""
    try:
        return run(*arguments)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(("size", "count"), [(1000, 12), (5000, 2)])
def test_every_stage_alone_and_after_a_cut(monkeypatch, name, size, count) -> None:
    monkeypatch.setattr(bind, "FEW", 0)
    monkeypatch.setattr(shortlist, "FEW", 0)
    monkeypatch.setattr(start, "FEW", 0)
    monkeypatch.setattr(cases, "SIZES", (size,))
    for seed in range(count):
        logits, stages, history, step = case(seed)
        stage = cases.stage(cases.random.Random(seed), name, size)
        for pipeline in ((stage, stages[-1]), (TopP(0.9), stage, stages[-1]), (stage, Temperature(0.7), stages[-1])):
            assert both(logits, watched(pipeline, size), history, step) == "", (seed, pipeline)


PIPELINES = (
    (TopK(40),),
    (Temperature(0.7), TopK(40), TopP(0.9)),
    (Temperature(0.7), TopK(3, with_ties=True)),
    (TopK(3000), Typical(0.5)),
    (MinP(0.05),),
    (MinP(1.0),),
    (Temperature(1.3), MinP(1e-9), TopA(0.2)),
    (DynamicTemperature(0.5, 1.5), MinP(0.1)),
    (Temperature(0.2), Temperature(3.0), MinP(0.3), TopP(0.5, of_whole=True)),
    (TopP(0.9),),
    (Typical(0.95), Temperature(0.8)),
    (Mirostat(3.0),),
    (Mirostat(0.0, mu=300.0), TopP(0.9)),
    (Typical(0.95),),
    (Temperature(0.8), Typical(0.3), Temperature(1.5)),
    (Temperature(1e-3), Typical(0.99)),
    (DynamicTemperature(0.5, 1.5), TopP(0.9)),
    (TopP(1 - 1e-7), TopH(0.9)),
    (TopH(0.3),),
    (TopH(0.97), MinP(0.01)),
    (Temperature(1e4), Epsilon(1e-4)),
    (Eta(1e-3), Xtc(1.0, 0.01)),
    (PLess(True),),
    (Temperature(2.0), TopNSigma(1.0), TopP(0.5)),
    (Xtc(1.0, 0.1, exempt=(0,)), AdaptiveP(0.2)),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 256, 257, 1000, 10_000])
def test_every_kind_of_row(kind, size) -> None:
    numbers = np.random.default_rng(size)
    for stages in PIPELINES:
        logits = row(numbers, size, kind)
        assert both(logits, (*stages, Gumbel(3))) == "", stages
        assert both(logits, (*stages, Categorical(3))) == "", stages
        assert both(logits, (Logprobs(7, (0, size - 1)), *stages, Gumbel(3))) == "", stages
        assert both(logits, (*stages, Logprobs(min(size, 1000)), Gumbel(3)), step=2**40) == "", stages


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 700, 4999])
def test_rows_that_cannot_be_drawn_say_the_same(bad, place) -> None:
    logits = SOME.copy()
    logits[place] = bad
    for stages in ((TopK(5),), (Temperature(0.7), MinP(0.1)), (Mirostat(3.0),), (Suppress((1,)), TopK(5))):
        said = outcome(fuse.run, logits, (*stages, Gumbel(1)))
        assert said == f"RowError: {'+inf' if bad == np.inf else 'NaN'} at token {place}"
    assert outcome(fuse.run, np.full(5000, -np.inf, np.float32), (TopK(5), Gumbel(1))).endswith(
        "every token is at -inf"
    )
    over = (LogitBias({3: 1.7e308}), LogitBias({3: 1.7e308}), Suppress((3,)), Gumbel(1))
    assert (
        outcome(fuse.run, SOME, over)
        == outcome(reference.run, SOME, over)
        == "RowError: +inf at token 3 after logit_bias"
    )
    after = (TopK(2), Suppress(tuple(range(5000))), Gumbel(1))
    assert outcome(fuse.run, SOME, after) == "RowError: every token is at -inf after suppress"
    outside = (Temperature(0.5), Suppress((5000,)), Gumbel(1))
    assert both(SOME, outside) == ""
    assert "the vocabulary ends at 4999" in outcome(fuse.run, SOME, outside)


def test_a_row_may_have_any_layout_and_is_only_read() -> None:
    stages = (Temperature(0.7), TopK(40), Gumbel(1))
    for size in (4864, 5000):
        plain = SOME[:size].copy()
        frozen = plain.copy()
        frozen.flags.writeable = False
        wide = np.zeros(2 * size, np.float32)
        wide[::2] = plain
        token = reference.run(plain, stages, 1, 0).token
        for logits in (
            plain,
            frozen,
            wide[::2],
            plain[::-1].copy()[::-1],
            plain.astype(np.float64),
            plain.astype(">f4"),
        ):
            before = logits.tobytes()
            for longer in (stages, (LogitBias({1: 1.0}), *stages), (Mirostat(9.0), Gumbel(1))):
                assert both(logits, longer, seed=1) == ""
            assert fuse.run(logits, stages, 1, 0).token == token
            assert logits.tobytes() == before


def test_threads_do_not_share_their_room() -> None:
    stages = (Typical(0.9), Temperature(0.8), Logprobs(5), Gumbel(1))
    expected = [reference.run(SOME * scale, stages, 1, 3).token for scale in (0.1, 1.0, 3.0)]
    got = {}

    def work(i, scale):
        got[i] = [fuse.run(SOME * scale, stages, 1, 3).token for _ in range(50)]

    threads = [threading.Thread(target=work, args=(i, scale)) for i, scale in enumerate((0.1, 1.0, 3.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {i: [token] * 50 for i, token in enumerate(expected)}


# Stages of one's own.

FACTOR = 0.25


def softened(x):
    return FACTOR * x


class Softer(Scale):
    """A rule with a helper, and a constant of its module."""

    on: bool = param("", neutral=False, public=False)

    def apply(self, x, row):
        return where(self.on, softened(x - row.top), row.var * x)


class Turned(Scale):
    """Not monotone, and with an integer and a number that may be none."""

    monotone = False
    n: int = param("", default=3, public=False)
    limit: float | None = param("", default=None, public=False)

    def apply(self, x, row):
        return -minimum(-x, self.n) // 1 if self.limit is None else minimum(x % self.n, self.limit)


class Middle(Prefix):
    """An order, weights and a target that no stage of ours has; the first token need not be the best."""

    reaches = False
    part: float = param("", default=0.5, public=False)

    def order(self, x, row):
        return (x - row.mean) * (x - row.mean)

    def weight(self, x, row):
        return exp(x - row.top) ** 0.5

    def target(self, row):
        return self.part * row.n


class Beheaded(Ceiling):
    @property
    def chance(self):
        return 0.5

    def ceiling(self, row):
        return row.mean + row.var**0.5


class Tail(Draw):
    """Races the other way round, with noise of its own shape."""

    uniforms = "each"

    def score(self, x, u):
        return log(u) * exp(-x / 50.0)


class Last(Draw):
    uniforms = "none"

    def score(self, x, u):
        return -x + u


class Uneven(Draw):
    uniforms = "one"

    def weight(self, x, row):
        return 1.0 / (1.0 + row.top - x)

    def target(self, row, u):
        return u * 2.0


class Odd(Prefix):
    """Weights that no cut can be told from but by a walk: the reference's business."""

    def weight(self, x, row):
        return x + 1.0

    def target(self, row):
        return 0.5


class Louder(Shift):
    touches = "output"

    def apply(self, x, token):
        return x * 1.1 + token.output_count


class Foreign(Scale):
    """A rule that is no expression of numbers: NumPy's business."""

    def apply(self, x, row):
        return np.asarray([float(one) for one in x.tolist()]) * 0.5


OWN = (
    Softer(on=True),
    Softer(),
    Turned(),
    Turned(limit=1.5),
    Middle(),
    Middle(0.9),
    Beheaded(),
    Odd(),
    Louder(),
    Foreign(),
)


@pytest.mark.parametrize("draw", [Gumbel(1), Tail(), Last(), Uneven()], ids=repr)
def test_stages_of_ones_own(few, draw) -> None:
    numbers = np.random.default_rng(4)
    history = History((1, 2, 3), (4, 5, 5))
    for size in (5, 600, 3000):
        for stage in OWN:
            for stages in ((stage,), (Temperature(0.9), stage, TopP(0.9)), (stage, stage)):
                logits = (numbers.normal(size=size) * 3).astype(np.float32)
                step = int(numbers.integers(9))
                assert both(logits, watched((*stages, draw), size), history, step, 5) == "", (size, stages)


def test_the_worked_example_of_contributing(few, monkeypatch) -> None:
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text("utf-8")
    module = types.ModuleType("above_average")
    monkeypatch.setitem(sys.modules, "above_average", module)
    exec(re.search(r"`:\n\n```python\n(.*?)```", page, re.DOTALL)[1], module.__dict__)
    for a in (0.0, 0.5, 3.0, 500.0):
        for logits in (SOME, SOME[:100]):
            assert both(logits, watched((module.AboveAverage(a), Gumbel(1)), len(logits))) == ""


def test_a_rule_that_cannot_be_compiled_is_told_once_and_runs(caplog, monkeypatch) -> None:
    monkeypatch.setattr(bind, "_loops", {})
    with caplog.at_level(logging.WARNING, "nucleate"):
        for _ in range(3):
            assert both(SOME, (Foreign(), Gumbel(1))) == ""
    told = [record.getMessage() for record in caplog.records if "is not compiled" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("Foreign.apply is not compiled (TypeError: ")


def test_what_a_rule_reads() -> None:
    assert bind.reads(TopP(0.9), "target").row == {"mass"}
    assert bind.reads(TopP(0.9, of_whole=True), "target").row == {"whole"}
    assert bind.reads(TopP(0.9, of_whole=True), "target").mine == ("p", "of_whole")
    assert bind.reads(TopK(3), "weight") == bind.Asked(frozenset(), (), True)
    assert bind.reads(DynamicTemperature(0.5, 1.5), "apply").row == {"top", "entropy", "n"}
    assert bind.reads(Softer(on=True), "apply").row == {"top"}
    assert bind.reads(Softer(), "apply").row == {"var"}
    assert bind.reads(Foreign(), "apply") == bind.EVERYTHING
    assert not bind.reads_whole(TopP(0.9))
    assert bind.reads_whole(TopP(0.9, of_whole=True))


SCRIPT = """
import sys, time, numpy as np
from nucleate.backends.cpu.staged import fuse
from nucleate.core.stage import Scale
from nucleate.stages import *
NUMBER = {number}
def helper(x):
    return x * {factor}
class Mine(Scale):
    def apply(self, x, row):
        return helper(x - row.top) + NUMBER * 0.0
logits = np.random.default_rng(0).normal(size=4096).astype(np.float32)
start = time.process_time()
drawn = [fuse.run(logits, (Mine(), Logprobs(1), Gumbel(1)), 1, 0).logprobs.top[0].logprob]
for stages in ((Typical(0.9), Temperature(0.8)), (TopH(0.5),), (TopK(2000), AdaptiveP(0.3)), (Mirostat(5.0), Xtc(1.0))):
    fuse.run(logits, (*stages, Gumbel(1)), 1, 0)
    fuse.run(logits, (*stages, Categorical(1)), 1, 0)
print(drawn[0], time.process_time() - start)
"""


def test_a_changed_rule_is_another_kernel_and_an_old_one_is_there_at_once(tmp_path) -> None:
    place, told = tmp_path / "mine.py", []
    for factor, number in ((1.0, 1), (1.0, 1), (2.0, 1), (2.0, 2)):
        place.write_text(SCRIPT.format(factor=factor, number=number))
        os.utime(place, (1, 1))  # nothing but the text tells it
        done = subprocess.run([sys.executable, place], capture_output=True, text=True, check=True, timeout=300)
        told.append([*map(float, done.stdout.split())])
    top = [
        -np.log(
            np.exp(
                factor * (small := np.random.default_rng(0).normal(size=4096).astype(np.float32)).astype(float)
                - factor * float(small.max())
            ).sum()
        )
        for factor in (1.0, 2.0)
    ]
    assert [logprob for logprob, _ in told] == pytest.approx([top[0], top[0], top[1], top[1]], rel=1e-12)
    assert min(seconds for _, seconds in told[1:]) < 1.0, told


def test_the_exponential_is_right_everywhere() -> None:
    x = np.concatenate(
        (np.linspace(-745, 709.7, 20_001), [-1e308, -800.0, -0.0, 1e-300, 710.0, 1e300, -np.inf, np.inf])
    )
    out = np.array([doubles.exp(one) for one in x])
    with np.errstate(over="ignore"):
        assert out == pytest.approx(np.exp(x), rel=1e-14, abs=5e-324)
    assert np.isnan(doubles.exp(np.nan))


@pytest.mark.parametrize(
    ("stages", "most"),
    [((Typical(0.95), Temperature(0.8)), 2000), ((Mirostat(5.0),), 1500), ((TopK(40), Typical(0.9)), 600)],
)
def test_a_whole_vocabulary_takes_well_under_a_few_milliseconds(stages, most) -> None:
    logits = (np.random.default_rng(0).normal(size=128_256) * 2.5).astype(np.float32)
    times = []
    for step in range(20):
        start = time.thread_time()
        token = fuse.run(logits, (*stages, Gumbel(1)), 1, step).token
        times.append(time.thread_time() - start)
    assert token == reference.run(logits, (*stages, Gumbel(1)), 1, step).token
    assert min(times) * 1e6 < most
