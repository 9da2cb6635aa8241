"""What lets the compiled path look at few tokens: rules as lines and on intervals, bounds, and the row as it lies."""

from __future__ import annotations

import math

import numpy as np
import pytest
from edges import KINDS, row

from nucleate.backends import reference
from nucleate.backends.cpu import squeeze
from nucleate.backends.cpu.compile import jit
from nucleate.backends.cpu.staged import facts, fuse, raw, summary
from nucleate.backends.cpu.staged.bounds import never_negative
from nucleate.backends.cpu.staged.lines import line
from nucleate.core.maths import exp, maximum, where
from nucleate.core.stage import Prefix, Scale, param
from nucleate.stages import (
    AdaptiveP,
    DynamicTemperature,
    Epsilon,
    Eta,
    Gumbel,
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

ROW = reference.statistics(np.random.default_rng(2).normal(size=50) * 3)._replace(top=np.float64(0.0))


class Crooked(Scale):
    """A line for scores above -3 only."""

    def apply(self, x, row):
        return maximum(x, -3.0)


class Chosen(Scale):
    on: bool = param("", neutral=False, public=False)

    def apply(self, x, row):
        return where(self.on, -(-x * 3.0 + row.mean) / 0.5, row.var * x)


class Weighed(Prefix):
    """Weights that are what they are told to be."""

    low: float = param("", default=0.0, public=False)

    def weight(self, x, row):
        return exp(x - row.top) - self.low

    def target(self, row):
        return 0.5


def test_a_line_says_what_the_rule_says() -> None:
    x = -(10.0 ** np.random.default_rng(3).uniform(-5, 5, 100))
    for stage, rule in (
        (Temperature(0.7), "apply"),
        (Temperature(1e300), "apply"),
        (DynamicTemperature(0.3, 1.7), "apply"),
        (Chosen(on=True), "apply"),
        (Chosen(), "apply"),
        (Typical(0.9), "order"),
        (TopP(0.9), "order"),
    ):
        found = line(stage, rule, ROW)
        assert found is not None, stage
        said = found.slope * x + found.offset
        assert getattr(stage, rule)(x, ROW) == pytest.approx(abs(said) if found.bent else said, rel=1e-12), stage


@pytest.mark.parametrize(
    ("stage", "rule"),
    [
        (AdaptiveP(0.3), "apply"),
        (Crooked(), "apply"),
        (TopP(0.9), "weight"),
        (TopK(5), "weight"),
        (Temperature(5e-324), "apply"),
    ],
    ids=repr,
)
def test_what_is_no_line_is_not_taken_for_one(stage, rule) -> None:
    assert line(stage, rule, ROW) is None


def test_weights_that_may_be_negative_are_known() -> None:
    for stage in (TopP(0.9), Typical(0.9), TopH(0.5), Weighed(), Weighed(-1.0)):
        assert never_negative(stage, "weight"), stage
    for stage in (Weighed(1e-9), Weighed(2.0)):
        assert not never_negative(stage, "weight"), stage
    assert not never_negative(Typical(0.9), "order")  # an absolute value, which is not looked into
    assert not never_negative(Temperature(0.5), "apply")


def test_a_negative_weight_far_down_is_not_overlooked(monkeypatch) -> None:
    x = np.linspace(0.0, -40.0, 5000).astype(np.float32)
    monkeypatch.setattr(Weighed, "target", lambda self, row: 30.0)
    for low in (0.0, 1e-3, 0.1):
        stages = (Weighed(low), Gumbel(1))
        assert fuse.survivors(x, stages).ids_N.tolist() == reference.survivors(x, stages).ids_N.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [256, 1000, 10_000])
def test_mass_and_entropy_are_exact(kind, size) -> None:
    x = row(np.random.default_rng(size), size, kind)
    tail, masses, told = np.full(256, -np.inf, np.float32), np.empty(-(-size // 256)), np.empty(2)
    tail[: size % 256] = x[size - size % 256 :]
    for slope in (1.0, 1.25, 1e-3, 1e4):
        top = float(x.max())
        d = np.maximum((x.astype(np.float64) - top) * slope, -700.0).tolist()
        e = [math.exp(one) for one in d]
        summary.summary(x, tail, top, slope, told, masses)
        mass = math.fsum(e)
        assert told[0] == pytest.approx(mass, rel=1e-14)
        share = math.fsum(a * b for a, b in zip(e, d, strict=True)) / mass
        assert told[1] == pytest.approx(math.log(mass) - share, rel=1e-13, abs=1e-13)
        assert masses.sum() == pytest.approx(mass, rel=1e-14)


@pytest.mark.parametrize("gap", [500.0, 690.0, 699.0, 705.0, 720.0, 744.0, 760.0, 1e30])
def test_tokens_almost_too_light_for_a_float_count_as_in_the_reference(gap) -> None:
    x = np.full(700, -gap, np.float32)
    x[[3, 300]] = 0.0, -0.999 * gap
    for stage in (TopH(0.8), TopH(1.0), Typical(0.9), Eta(1e-3), DynamicTemperature(0.5, 2.0), Mirostat(gap)):
        stages = (stage, Gumbel(1))
        got, expected = (run.survivors(x, stages) for run in (fuse, reference))
        assert got.ids_N.tolist() == expected.ids_N.tolist(), stage


@jit
def taken(found, x, ids, x_out, ids_out):
    n = 0
    for i in range(found.size):
        n = squeeze.take(found[i], 16 * i, x, ids, x_out, ids_out, n)
    return n


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_what_is_taken_is_what_numpy_takes_also_in_place(share) -> None:
    numbers = np.random.default_rng(4)
    x, ids = numbers.normal(size=1600), numbers.integers(0, 10**9, 1600)
    stays = numbers.random(1600) < share
    found = np.packbits(stays.reshape(-1, 16), axis=1, bitorder="little").view(np.uint16)[:, 0].astype(np.int32)
    others = np.empty(1600), np.empty(1600, np.int64)
    assert taken(found, x, ids, *others) == stays.sum()
    for one, other in zip((x, ids), others, strict=True):
        assert other[: stays.sum()].tolist() == one[stays].tolist()
    mine = x.copy(), ids.copy()
    assert taken(found, *mine, *mine) == stays.sum()
    for one, other in zip((x, ids), mine, strict=True):
        assert other[: stays.sum()].tolist() == one[stays].tolist()


@pytest.mark.parametrize(
    "stages",
    [
        (Temperature(0.8), Typical(0.95)),
        (Typical(0.95), Temperature(0.8)),
        (Mirostat(5.0),),
        (TopP(0.95), Temperature(0.8), MinP(0.05)),
        (DynamicTemperature(0.5, 1.5),),
        (DynamicTemperature(0.5, 1.5), TopP(0.9)),
        (TopA(0.2),),
        (Epsilon(3e-4),),
        (Eta(3e-4),),
        (PLess(True),),
        (TopH(0.5),),
        (TopNSigma(1.0), Xtc(1.0, 0.1)),
        (TopK(40), AdaptiveP(0.3)),
        (Logprobs(5, (7,)), Temperature(0.8), TopK(40), Xtc(0.5)),
        (Logprobs(5), Typical(0.95)),
    ],
    ids=repr,
)
def test_nobody_lists_all_tokens_of_a_row(stages, monkeypatch) -> None:
    x = (np.random.default_rng(0).normal(size=20_000) * 2.5).astype(np.float32)
    x[:40] += np.linspace(2, 20, 40, dtype=np.float32)
    expected = reference.run(x, (*stages, Gumbel(1)), 1, 3)

    def refused(*_):
        raise AssertionError("all tokens were listed")

    monkeypatch.setattr(raw.Raw, "all", refused)
    monkeypatch.setattr(summary, "widen", refused)
    assert fuse.run(x, (*stages, Gumbel(1)), 1, 3).token == expected.token


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("far", [2.0, 5.0, 9.0, 14.0])
def test_typical_may_leave_out_the_best_and_the_worst(p, far) -> None:
    """Few likely tokens and many unlikely ones: what is typical is between them, above, or below."""
    numbers = np.random.default_rng(5)
    for share in (3, 300, 3000):
        x = numbers.normal(size=6000).astype(np.float32) * 0.3
        x[:share] += np.float32(far)
        for stages in ((Typical(p), Gumbel(1)), (Temperature(0.5), Typical(p), Gumbel(1))):
            got, expected = (run.survivors(x, stages) for run in (fuse, reference))
            assert got.ids_N.tolist() == expected.ids_N.tolist()
            assert got.whole == pytest.approx(expected.whole, rel=1e-12)


def test_asking_for_a_token_that_is_not_there_is_the_same_for_any_size() -> None:
    for size in (100, 5000):
        x = np.linspace(0.0, 3.0, size).astype(np.float32)
        stages = (Logprobs(2, (1, 2**40)), TopK(3), Gumbel(1))
        assert fuse.run(x, stages, 1, 0).logprobs.asked[1].rank is None
        assert reference.run(x, stages, 1, 0).logprobs.asked[1] == fuse.run(x, stages, 1, 0).logprobs.asked[1]


def test_facts_are_of_the_pipeline_asked_about(monkeypatch) -> None:
    monkeypatch.setattr(facts, "MOST", 4)
    for i in range(50):  # tuples come and go, and their places in memory are used again
        stages = (Temperature(0.5), Gumbel(i)) if i % 2 else (TopP(0.5, of_whole=True), Xtc(0.5), Gumbel(i))
        found = facts.facts_of(stages)
        assert found.stages is stages
        assert (found.whole, found.flips) == ((False, False) if i % 2 else (True, True))
        assert [step.shape for step in found.steps][-1] == "Draw"
