"""The composed CPU path equals the reference for any pipeline: tokens, reports, the state of stages, and errors."""

from __future__ import annotations

import math
import threading
from collections import Counter

import numpy as np
import pipeline_cases as cases
import pytest
import tiers
from custom_stages import DRAWS, OWN, Foreign, Softer
from edge_rows import KINDS, NEAR, row
from pipeline_cases import OTHERS, case

from nucleate.sampling import reference, rules
from nucleate.sampling.cpu import candidate_list, edited_row, full_row, fused_runner, row_kernels
from nucleate.sampling.cpu import evaluation as composed
from nucleate.sampling.cpu.edited_row import thread_workspace
from nucleate.sampling.history import History
from nucleate.sampling.maths import absolute, exp, log, where
from nucleate.sampling.sampler import Sampler
from nucleate.sampling.stage import Prefix, Scale, Shift, Tap, param
from nucleate.sampling.stages import (
    AdaptiveP,
    Categorical,
    DynamicTemperature,
    Epsilon,
    Eta,
    Gumbel,
    LogitBias,
    Logprobs,
    Mask,
    MinP,
    Mirostat,
    PLess,
    Quadratic,
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
from nucleate.sampling_params import SamplingParams

PIPELINES, FEWER = tiers.count(500, 2500), tiers.count(30, 100)
SMALL, LARGE = cases.SIZES, (2049, 3000, 5000, 20_000)
SOME = np.random.default_rng(0).normal(size=5000).astype(np.float32) * 3


def outcome(run, logits, stages, history=History(), step=0, seed=None):
    """The token, logprobs and stages of a backend, or its error."""
    own = getattr(stages[-1], "seed", None) if seed is None else seed
    return result_or_error(run, logits, stages, 7 if own is None else own, step, history)


def watched(stages, size):
    """Add a Tap before the draw, if there is none, that reports every surviving token."""
    return stages if any(isinstance(stage, Tap) for stage in stages) else (*stages[:-1], Logprobs(size), stages[-1])


def near(a, b, part=1e-9):
    return a == b or abs(a - b) <= part * max(1.0, abs(a), abs(b))


def difference(one, other):
    """The difference of two outcomes, or None."""
    if isinstance(one, str) or isinstance(other, str):
        return "" if one is other or one == other else f"error: {one} != {other}"
    if one.token != other.token:
        return f"token: {one.token} != {other.token}"
    if (one.logprobs is None) != (other.logprobs is None):
        return "one has no report"
    reports = [[r.chosen, *r.top, *r.requested] if r else [] for r in (one.logprobs, other.logprobs)]
    if [(t.token_id, t.rank) for t in reports[0]] != [(t.token_id, t.rank) for t in reports[1]]:
        return "tokens reported"
    part = NEAR if isinstance(next(s for s in one.stages if not s.neutral), Tap) else 1e-9  # of the unmodified row
    if not all(near(a.logprob, b.logprob, part) for a, b in zip(*reports, strict=True)):
        return "logprobs"
    for a, b in zip(one.stages, other.stages, strict=True):
        pairs = [(getattr(a, name), getattr(b, name)) for name in a.parameters]
        if not all(u == v or (isinstance(u, float) and near(u, v)) for u, v in pairs):
            return f"moved: {a} != {b}"
    return ""


def both(logits, stages, history=History(), step=0, seed=None):
    return difference(*(outcome(run, logits, stages, history, step, seed) for run in (reference.run, composed.run)))


@pytest.mark.parametrize(("sizes", "count"), [(SMALL, PIPELINES), (LARGE, FEWER)], ids=["small", "large"])
@pytest.mark.fast_cases(0)
def test_random_pipelines_equal_the_reference(monkeypatch, sizes, count) -> None:
    monkeypatch.setattr(cases, "SIZES", sizes)
    statistics, found, ran = Counter(), {}, reference.run

    def spied(*arguments):
        statistics["raised"] += 1  # unless the token returns
        result = ran(*arguments)
        statistics.update(odd=1, raised=-1)
        return result

    for seed in range(count):
        logits, stages, history, step = case(seed, most=6)
        stages = watched(stages, len(logits))
        expected = outcome(ran, logits, stages, history, step)
        with monkeypatch.context() as patched:
            patched.setattr(reference, "run", spied)
            got = outcome(composed.run, logits, stages, history, step)
        if why := difference(expected, got):
            found[seed] = why, stages
    assert not found, found
    assert statistics["odd"] < 2 + 0.04 * count, statistics  # the reference runs few of them, though many are extreme
    assert statistics["raised"] < 2 + 0.1 * count


@pytest.mark.parametrize(("sizes", "count"), [(SMALL, PIPELINES // 3), (LARGE, FEWER // 2)], ids=["small", "large"])
@pytest.mark.fast_cases(1)
def test_probabilities_equal_the_reference(monkeypatch, sizes, count) -> None:
    monkeypatch.setattr(cases, "SIZES", sizes)
    for seed in range(count):
        logits, stages, history, _ = case(seed, most=5)
        one, other = (result_or_error(run.probabilities, logits, stages, history) for run in (reference, composed))
        if isinstance(one, str):
            assert other == one, (seed, stages)
        else:
            np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12, equal_nan=False, err_msg=f"{seed}: {stages}")
    assert composed.survivors(SOME, ()).ids_N.tolist() == np.argsort(-SOME, kind="stable").tolist()


def result_or_error(run, *arguments):
    """The result of a function, or its error."""
    try:
        return run(*arguments)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(("size", "count"), [(1000, 12), (5000, 2)])
def test_every_stage_alone_and_after_a_truncation(monkeypatch, name, size, count) -> None:
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
    (Temperature(0.2), Temperature(3.0), MinP(0.3), TopP(0.5, of_full_mass=True)),
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


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 256, 257, 1000, 10_000])
def test_every_kind_of_row(kind, size) -> None:
    rng = np.random.default_rng(size)
    for stages in PIPELINES:
        logits = row(rng, size, kind)
        assert both(logits, (*stages, Gumbel(3))) == "", stages
        assert both(logits, (*stages, Categorical(3))) == "", stages
        assert both(logits, (Logprobs(7, (0, size - 1)), *stages, Gumbel(3))) == "", stages
        assert both(logits, (*stages, Logprobs(min(size, 1000)), Gumbel(3)), step=2**40) == "", stages


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("position", [0, 700, 4999])
def test_errors_of_invalid_rows_equal_the_reference(bad, position) -> None:
    logits = SOME.copy()
    logits[position] = bad
    for stages in ((TopK(5),), (Temperature(0.7), MinP(0.1)), (Mirostat(3.0),), (Suppress((1,)), TopK(5))):
        expected_outcome = outcome(composed.run, logits, (*stages, Gumbel(1)))
        assert expected_outcome == f"RowError: {'+inf' if bad == np.inf else 'NaN'} at token {position}"
    assert outcome(composed.run, np.full(5000, -np.inf, np.float32), (TopK(5), Gumbel(1))).endswith(
        "every token is at -inf"
    )
    over = (LogitBias({3: 1.7e308}), LogitBias({3: 1.7e308}), Suppress((3,)), Gumbel(1))
    assert (
        outcome(composed.run, SOME, over)
        == outcome(reference.run, SOME, over)
        == "RowError: +inf at token 3 after logit_bias"
    )
    after = (TopK(2), Suppress(tuple(range(5000))), Gumbel(1))
    assert outcome(composed.run, SOME, after) == "RowError: every token is at -inf after suppress"
    outside = (Temperature(0.5), Suppress((5000,)), Gumbel(1))
    assert both(SOME, outside) == ""
    assert "the vocabulary ends at 4999" in outcome(composed.run, SOME, outside)


# Custom stages.


class Louder(Shift):
    touches = "output"

    def apply(self, x, token):
        return x * 1.1 + token.output_count


@pytest.mark.parametrize("draw", [Gumbel(1), *DRAWS], ids=repr)
@pytest.mark.fast_cases(0)
def test_custom_stages(draw) -> None:
    rng = np.random.default_rng(4)
    history = History((1, 2, 3), (4, 5, 5))
    for size in (5, 600, 3000):
        for stage in (*OWN, Louder()):
            for stages in ((stage,), (Temperature(0.9), stage, TopP(0.9)), (stage, stage)):
                logits = (rng.normal(size=size) * 3).astype(np.float32)
                step = int(rng.integers(9))
                assert both(logits, watched((*stages, draw), size), history, step, 5) == "", (size, stages)


def test_the_inputs_of_a_rule() -> None:
    assert rules.rule_inputs(TopP(0.9), "target").row == {"mass"}
    assert rules.rule_inputs(TopP(0.9, of_full_mass=True), "target").row == {"full_mass"}
    assert rules.rule_inputs(TopP(0.9, of_full_mass=True), "target").attributes == ("p", "of_full_mass")
    assert rules.rule_inputs(TopK(3), "weight") == rules.RuleInputs(frozenset(), (), is_one=True, form=rules.CONSTANT)
    assert rules.rule_inputs(DynamicTemperature(0.5, 1.5), "apply").row == {"top", "entropy", "n"}
    assert rules.rule_inputs(Softer(on=True), "apply").row == {"top"}
    assert rules.rule_inputs(Softer(), "apply").row == {"var"}
    assert rules.rule_inputs(Foreign(), "apply") == rules.UNKNOWN_INPUTS
    assert rules.rules_of_stage(TopP(0.9))["weight"].is_softmax_weight
    assert [*rules.rules_of_stage(TopP(0.9))] == ["weight", "target"]
    assert [*rules.rules_of_stage(Typical(0.9))] == ["weight", "target", "order"]


class Around(Prefix):
    """Order by distance to a score, which may be above the maximum."""

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
    """A rule with a part that depends on the row."""

    by: float = param("", default=1.0, public=False)

    def apply(self, x, row):
        return (x - row.mean) * self.by + log(row.n)


def drawn_stage(rng):
    part = float(rng.choice([rng.uniform(0.01, 1.0), 0.5, 0.9, 0.95]))
    k = int(rng.choice([rng.integers(2, 400), rng.integers(2, 9000)]))
    makers = (
        lambda: Temperature(float(rng.uniform(0.1, 3.0))),
        lambda: DynamicTemperature(low=float(rng.uniform(0.3, 1.0)), high=float(rng.uniform(1.0, 2.0))),
        lambda: Stretched(float(rng.uniform(0.5, 2.0))),
        lambda: Typical(part),
        lambda: Typical(part),
        lambda: Around(float(rng.uniform(-8.0, 3.0)), float(10.0 ** rng.uniform(-3, 3)), part),
        lambda: TopP(part),
        lambda: TopK(k, with_ties=bool(rng.integers(2))),
        lambda: TopH(part),
        lambda: MinP(float(rng.uniform(0.0, 0.3))),
        lambda: Eta(float(10.0 ** rng.uniform(-5, -1))),
        lambda: Epsilon(float(10.0 ** rng.uniform(-5, -2))),
        lambda: TopNSigma(float(rng.uniform(0.5, 3.0))),
        lambda: TopA(float(rng.uniform(0.0, 0.5))),
    )
    return makers[rng.integers(len(makers))]()


@pytest.mark.slow
def test_random_pipelines_on_rows_of_every_kind() -> None:
    rng, found = np.random.default_rng(0), []
    for seed in range(600):
        logits = row(rng, int(rng.choice((513, 700, 1024, 2049, 5000, 20_000))), str(rng.choice(KINDS)))
        stages = (*(drawn_stage(rng) for _ in range(rng.integers(1, 5))), Gumbel())
        if why := both(logits, stages, step=seed % 7, seed=seed):
            found.append((seed, stages, len(logits), why))
    assert not found, found


class Weighed(Prefix):
    """Weights that are given explicitly."""

    low: float = param("", default=0.0, public=False)

    def weight(self, x, row):
        return exp(x - row.top) - self.low

    def target(self, row):
        return 0.5


def test_a_negative_weight_far_down_is_detected(monkeypatch) -> None:
    x = np.linspace(0.0, -40.0, 5000).astype(np.float32)
    monkeypatch.setattr(Weighed, "target", lambda self, row: 30.0)
    for low in (0.0, 1e-3, 0.1):
        stages = (Weighed(low), Gumbel(1))
        assert composed.survivors(x, stages).ids_N.tolist() == reference.survivors(x, stages).ids_N.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [256, 1000, 10_000])
@pytest.mark.fast_cases(0)
def test_sums_of_a_row_are_exact(kind, size) -> None:
    x = row(np.random.default_rng(size), size, kind)
    tail, tops, masses, sums = np.empty(256, np.float32), *(np.empty(-(-size // 256), t) for t in "fd"), np.empty(3)
    top = row_kernels.group_maxima(x, tail, tops)
    assert top == x.max()
    for slope in (1.0, 1.25, 1e-3, 1e4):
        d = np.maximum((x.astype(np.float64) - float(top)) * slope, -700.0).tolist()
        e = [math.exp(one) for one in d]
        row_kernels.group_masses(x, tail, float(top), slope, 0.0, 0.0, masses, sums)
        assert sums[0] == pytest.approx(math.fsum(e), rel=1e-13)
        share = math.fsum(a * b for a, b in zip(e, d, strict=True))
        assert sums[1] == pytest.approx(share, rel=1e-13, abs=1e-13)
        assert sums[2] == pytest.approx(math.fsum(a * a for a in e), rel=1e-13)
        assert masses.sum() == pytest.approx(math.fsum(e), rel=1e-13)
        for rest in (1e-3, 0.1, 0.7):
            least = row_kernels.threshold_by_mass(masses, rest * sums[0])
            assert math.fsum(a for a, b in zip(e, d, strict=True) if b < least) <= rest * sums[0]


@pytest.mark.parametrize("gap", [500.0, 690.0, 699.0, 705.0, 720.0, 744.0, 760.0, 1e30])
def test_nearly_underflowing_weights_count_as_in_the_reference(gap) -> None:
    x = np.full(700, -gap, np.float32)
    x[[3, 300]] = 0.0, -0.999 * gap
    for stage in (TopH(0.8), TopH(1.0), Typical(0.9), Eta(1e-3), DynamicTemperature(0.5, 2.0), Mirostat(min(gap, 1e6))):
        stages = (stage, Gumbel(1))
        got, expected = (run.survivors(x, stages) for run in (composed, reference))
        assert got.ids_N.tolist() == expected.ids_N.tolist(), stage


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
def test_no_full_sort_of_a_row_is_needed(stages, monkeypatch) -> None:
    x = (np.random.default_rng(0).normal(size=20_000) * 2.5).astype(np.float32)
    x[:40] += np.linspace(2, 20, 40, dtype=np.float32)
    expected = reference.run(x, (*stages, Gumbel(1)), 1, 3)

    def fail_if_called(*_):
        raise AssertionError("all tokens were listed")

    monkeypatch.setattr(full_row.FullRow, "ranked_list", fail_if_called)
    monkeypatch.setattr(reference, "run", fail_if_called)
    assert composed.run(x, (*stages, Gumbel(1)), 1, 3).token == expected.token


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("far", [2.0, 5.0, 9.0, 14.0])
def test_typical_may_drop_the_best_and_the_worst(p, far) -> None:
    """Few likely tokens and many unlikely ones: the typical ones are between them, above, or below."""
    rng = np.random.default_rng(5)
    for share in (3, 300, 3000):
        x = rng.normal(size=6000).astype(np.float32) * 0.3
        x[:share] += np.float32(far)
        for stages in ((Typical(p), Gumbel(1)), (Temperature(0.5), Typical(p), Gumbel(1))):
            got, expected = (run.survivors(x, stages) for run in (composed, reference))
            assert got.ids_N.tolist() == expected.ids_N.tolist()
            assert got.total == pytest.approx(expected.total, rel=1e-12)


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("size", [5000, 8192, 20_001])
@pytest.mark.parametrize("wide", [0.3, 2.5])
@pytest.mark.parametrize("digits", [None, 1])
def test_weights_of_flat_rows_are_found_in_a_histogram(size, wide, digits, monkeypatch) -> None:
    rng, used, ran = np.random.default_rng(size), [], 0
    original = edited_row.EditedRow.split_bins
    monkeypatch.setattr(edited_row.EditedRow, "split_bins", lambda *a, **k: used.append(original(*a, **k)) or used[-1])
    for part in (0.02, 0.3, 0.77, 0.97):
        x = (rng.normal(size=size) * wide).astype(np.float32)
        x = x if digits is None else np.round(x, digits)
        for stage in (TopH(part), TopP(part), Typical(part), TopH(part, min_keep=size - 3)):
            for before in ((), (Temperature(0.7),), (Epsilon(1e-9),)):
                stages, ran = (*before, stage, MinP(0.0), Gumbel(1)), ran + 1
                got, expected = (run.survivors(x, stages) for run in (composed, reference))
                assert got.ids_N.tolist() == expected.ids_N.tolist(), stage
                assert got.total == pytest.approx(expected.total, rel=1e-12)
        for step in range(8):
            ran += 1
            assert (
                composed.run(x, (Categorical(3),), 3, step).token == reference.run(x, (Categorical(3),), 3, step).token
            )
    assert len(used) > ran / 3


def test_a_requested_token_outside_the_vocabulary_has_no_rank() -> None:
    for size in (100, 5000):
        x = np.linspace(0.0, 3.0, size).astype(np.float32)
        stages = (Logprobs(2, (1, 2**40)), TopK(3), Gumbel(1))
        assert composed.run(x, stages, 1, 0).logprobs.requested[1].rank is None
        assert (
            reference.run(x, stages, 1, 0).logprobs.requested[1] == composed.run(x, stages, 1, 0).logprobs.requested[1]
        )


@pytest.mark.slow
def test_threads_share_programs_but_no_scratch_buffers() -> None:
    stages, got = (Typical(0.9), Temperature(0.8), Gumbel()), {}
    some = [np.random.default_rng(i).normal(0.0, 3.0, 5000).astype(np.float32) for i in range(3)]
    expected = [[reference.run(x, stages, 1, step).token for step in range(40)] for x in some]

    def work(i):
        got[i] = [[composed.run(some[i], stages, 1, step).token for step in range(40)] for _ in range(20)]

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

    class Fourth(Scale):
        def apply(self, x, row):
            return x * x * x * x

    class Inverse(Scale):
        def apply(self, x, row):
            return row.n / x

    class Branching(Scale):
        def apply(self, x, row):
            return where(row.n > 3, x, absolute(x))

    def form_of(stage, rule="apply"):
        return rules.rule_inputs(stage, rule).form

    assert form_of(Temperature(0.5)) == form_of(DynamicTemperature(0.5, 1.5)) == rules.LINEAR
    assert form_of(Typical(0.5), "order") == form_of(Around(), "order") == rules.ABS_LINEAR
    assert form_of(Either(True)) == rules.LINEAR
    assert form_of(Either(False)) == rules.ABS_LINEAR
    assert form_of(Squared()) == rules.QUADRATIC
    assert form_of(Quadratic(0.3)) == rules.CUBIC
    assert form_of(Fourth()) == form_of(Inverse()) == rules.OTHER
    assert form_of(Branching()) == rules.OTHER
    assert form_of(TopP(0.5), "weight") == rules.OTHER
    assert form_of(TopP(0.5), "target") == rules.CONSTANT


def test_each_row_is_sampled_once_for_any_number_of_threads(monkeypatch) -> None:
    logits = np.random.default_rng(0).normal(size=(97, 32_000)).astype(np.float32)

    def sample_rows(threads):
        monkeypatch.setattr(fused_runner, "cores", lambda: threads)
        monkeypatch.setattr(fused_runner, "SECONDS_PER_THREAD", 1e-9)
        sampler = Sampler(32_000, backend="cpu")
        for seed in range(97):
            sampler.add(SamplingParams(temperature=0.8, top_p=0.9, seed=seed))
        return [sampler(logits).token_ids.tolist() for _ in range(5)]

    assert sample_rows(1) == sample_rows(2) == sample_rows(5) == sample_rows(200)


def test_programs_belong_to_the_requested_pipeline(monkeypatch) -> None:
    monkeypatch.setattr(rules, "CACHED_PIPELINES", 4)
    for i in range(50):  # tuples are created and freed, and their addresses are reused
        stages = (Temperature(0.5), Gumbel(i)) if i % 2 else (TopP(0.5, of_full_mass=True), Xtc(0.5), Gumbel(i))
        found = rules.steps_of(stages)
        assert found.stages is stages
        assert (found.needs_total, found.has_ceiling) == ((False, False) if i % 2 else (True, True))
        assert found.steps[-1].kind.shape == "Draw"


@pytest.mark.parametrize("touches", ["unlisted", "masked"])
def test_a_rule_over_most_of_the_vocabulary(touches) -> None:
    kind = type(
        "Lower", (Shift,), {"touches": touches, "apply": lambda self, x, token: x - 1.5, "__module__": __name__}
    )
    kind.listing = lambda self, history: {7: 0.0, 9: 0.0}
    mask = np.full(-(-len(SOME) // 32), 0x0F0F0F0F, np.int32)
    assert both(SOME, (kind(), TopH(0.5), Gumbel(1)), History((1, 2), (3,), mask)) == ""


def test_edited_tokens_are_merged_by_score_and_id() -> None:
    rng = np.random.default_rng(3)
    x = np.round(rng.normal(size=3000)).astype(np.float32)  # ties everywhere
    ids = rng.permutation(3000)[:200].tolist()
    bias = {token: float(rng.choice([-1.0, 0.5, 1.0, -np.inf, 30.0])) for token in ids if token}
    for stages in ((LogitBias({k: v for k, v in bias.items() if v > -np.inf}),), (Suppress(tuple(ids)),)):
        for more in ((TopH(0.9),), (Typical(0.9),), (AdaptiveP(0.1),), (Xtc(1.0, 1e-3),), (TopK(700, with_ties=True),)):
            assert both(x, watched((*stages, *more, Gumbel(1)), 3000)) == "", (stages, more)
            got, expected = (engine.survivors(x, (*stages, *more)) for engine in (composed, reference))
            assert got.ids_N.tolist() == expected.ids_N.tolist()


def test_a_dropped_best_token_may_be_far_above_the_others() -> None:
    x = np.linspace(-3.0, 0.0, 2000).astype(np.float32)
    x[[7, 900]] = 2000.0
    for stages in (
        (Xtc(1.0, 0.1), Xtc(1.0, 0.1), TopP(0.5, of_full_mass=True)),
        (Xtc(1.0, 0.3), TopP(0.9, of_full_mass=True), TopH(0.5)),
    ):
        assert both(x, (*stages, Gumbel(2))) == ""


@pytest.mark.parametrize("words", [[-1], [~2], [~1]])
def test_a_mask_after_a_truncation_restarts_only_if_it_bans_a_token(words: list[int]) -> None:
    x = np.array([2.0, 0.0, 1.5, 1.0], np.float32)
    past, stages = History(mask=np.array(words, np.int32)), (MinP(0.3), Mask(), TopP(0.6, of_full_mass=True))
    got, expected = (engine.survivors(x, stages, past) for engine in (composed, reference))
    assert got.ids_N.tolist() == expected.ids_N.tolist()
    assert got.total == pytest.approx(expected.total)
    for seed in range(8):
        assert both(x, (*stages, Gumbel(seed)), past) == ""


@pytest.mark.parametrize("size", [2048, 2049, 4096, 20_000])
@pytest.mark.parametrize("last", [(), (TopP(0.9, of_full_mass=True),), (Temperature(2.0), TopH(0.5)), (MinP(0.5),)])
@pytest.mark.fast_cases(3)
def test_a_floor_that_keeps_all_or_nearly_all(size, last) -> None:
    rng = np.random.default_rng(size)
    x = rng.normal(size=size).astype(np.float32)
    for out in (0, 1, size // 3):
        x[rng.permutation(size)[:out]] = -np.inf
        for stage in (Epsilon(1e-12), Mirostat(60.0), Epsilon(0.3 / size), Eta(1.0 / size), MinP(1e-3)):
            assert both(x, watched((stage, *last, Gumbel(1)), 50)) == "", (out, stage)
            assert both(x, (LogitBias({3: 2.0}), stage, *last, Gumbel(1))) == "", (out, stage)


def test_scratch_buffers_are_reused() -> None:
    work = thread_workspace(5000)
    work.reset()
    first = [work.new_row(), work.new_row()]
    work.reset()
    assert [work.new_row() is one for one in first] == [True, True]
    assert thread_workspace(5000) is work
    assert candidate_list.TIE_TOLERANCE < 1e-8
