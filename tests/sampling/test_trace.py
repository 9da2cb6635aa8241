"""trace: its token equals sample's, its steps equal the pipeline's, and its explanations are correct."""

from __future__ import annotations

import importlib.util
import itertools
import json

import numpy as np
import pytest
from traced_rows import SIZE, active_stages, batch, case

import nucleate as nc
from nucleate.sampling import noise, reference
from nucleate.sampling.stage import Ceiling, Draw, Floor, Prefix, Scale, param
from nucleate.sampling.stages import (
    BadWords,
    Categorical,
    Epsilon,
    Frequency,
    Greedy,
    Gumbel,
    GumbelWatermark,
    LogitBias,
    Logprobs,
    MinP,
    Mirostat,
    MirostatV1,
    Presence,
    Repetition,
    Suppress,
    Temperature,
    TopH,
    TopK,
    TopP,
    Typical,
    Xtc,
)


@pytest.mark.parametrize("start", range(0, 300, 50))
@pytest.mark.fast_cases(1)
def test_token_and_error_equal_those_of_sample(start):
    failed = 0
    for seed in range(start, start + 50):
        logits, stages, words, step, mask = case(seed)
        trace = nc.trace(logits, stages, step=step, mask=mask, **words)
        rows = None if mask is None else mask[None]
        if trace.error is None:
            assert trace.token_id == nc.sample(logits[None], stages, step=step, mask=rows, **batch(words))[0]
            continue
        with pytest.raises(nc.LogitsError) as caught:
            nc.sample(logits[None], stages, step=step, mask=rows, **batch(words))
        assert (trace.token_id, trace.error) == (None, caught.value.errors[0])
        failed += 1
    assert failed < 10


def test_the_seed_of_xtc_with_a_greedy_draw():
    """`sample`, `Sampler` and `trace` agree on the token of a seed, also where the draw itself has none."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1]), dtype=np.float32)
    found = set()
    for seed in range(20):
        params = nc.SamplingParams(pipeline="xtc(0.5, 0.15) | greedy()", seed=seed)
        [token] = nc.sample(logits[None], params)
        sampler = nc.Sampler(4)
        sampler.add(params)
        assert sampler(logits[None]).token_ids[0] == token
        assert (nc.trace(logits, params).token_id, nc.trace(logits, params).seed) == (token, seed)
        assert nc.trace(logits, params.build_pipeline(), seed=seed).token_id == token
        found.add(int(token))
    assert found == {0, 2}
    with pytest.raises(nc.ParameterError, match="seed must be an integer >= 0"):
        nc.trace(logits, (), seed=-1)


@pytest.mark.slow
def test_every_step_equals_the_pipeline_up_to_it():
    for seed in range(120):
        logits, stages, words, step, _ = case(seed)
        trace = nc.trace(logits, stages, step=step, **words)
        uniform = reference.xtc_uniform(stages, getattr(stages[-1], "seed", 0), step)
        assert [one.stage for one in trace.steps] == [None, *stages][: len(trace.steps)]
        for index, one in enumerate(trace.steps):
            done = tuple(stage for stage in active_stages(uniform, stages[:index]) if not isinstance(stage, Draw))
            if one.stage is stages[-1]:
                expected = np.eye(SIZE)[trace.token_id]
            else:
                expected = nc.probabilities(logits[None], done, **batch(words))[0]
            assert one.probabilities == pytest.approx(expected, rel=1e-12)
            assert one.left == np.count_nonzero(one.probabilities)


def test_changed_and_removed_tokens_are_the_difference_to_the_previous_step():
    for seed in range(120):
        logits, stages, words, step, mask = case(seed)
        steps = nc.trace(logits, stages, step=step, mask=mask, **words).steps
        first = steps[0]
        assert (first.stage, len(first.touched), len(first.removed)) == (None, 0, 0)
        assert first.scores.tolist() == logits.astype(np.float32).tolist()
        for old, new in itertools.pairwise(steps):
            in_before, in_after = (set(np.flatnonzero(np.isfinite(one.scores)).tolist()) for one in (old, new))
            assert new.removed.tolist() == sorted(in_before - in_after)
            changed = [i for i in sorted(in_before & in_after) if old.scores[i] != new.scores[i]]
            assert new.touched.tolist() == changed
            assert in_after <= in_before


def test_the_numbers_of_a_step_describe_its_distribution():
    for seed in range(60):
        logits, stages, words, step, mask = case(seed)
        for one in nc.trace(logits, stages, step=step, mask=mask, **words).steps:
            p = one.probabilities[one.probabilities > 0]
            assert p.sum() == pytest.approx(1)
            assert one.entropy == pytest.approx(-(p * np.log(p)).sum(), abs=1e-12)
            assert one.entropy >= 0
            order = sorted(np.flatnonzero(one.scores > -np.inf).tolist(), key=lambda i: (-one.scores[i], i))
            assert one.most_likely(5) == order[:5]
            assert one.most_likely(10**9) == order


# ---- errors


@pytest.mark.parametrize(
    ("logits", "stages", "error", "steps"),
    [
        ([0.0, np.nan], (), "NaN at token 1", 0),
        ([np.inf, 0.0], (TopK(1),), "+inf at token 0", 0),
        ([1e300, 0.0], (), "+inf at token 0", 0),  # beyond float32
        ([-np.inf, -np.inf], (), "every token is at -inf", 0),
        ([0.0, 1.0], (TopK(2), Suppress((0, 1)), TopP(0.5)), "every token is at -inf after suppress", 2),
        ([0.0, 1.0], (Temperature(0), Suppress((1,))), "every token is at -inf after suppress", 2),
        ([3e38, 0.0], (Temperature(2.0), Repetition(1e-300)), "+inf at token 0 after repetition", 2),
    ],
)
def test_a_row_without_a_token_has_an_error_and_the_steps_before_it(logits, stages, error, steps):
    trace = nc.trace(logits, stages, prompt_ids=[0])
    if steps and stages[0] == Temperature(2.0):  # the best score is at 0 by then, and nothing overflows
        assert (trace.error, len(trace.steps)) == (None, 4)
        return
    assert (trace.token_id, trace.error, len(trace.steps)) == (None, error, steps)
    assert str(trace).splitlines()[-1].startswith(f"error: {error} (seed ")
    assert json.loads(trace.to_json())["error"] == error
    with pytest.raises(nc.LogitsError, match=error.replace("+", r"\+")):
        nc.sample([logits], stages, prompt_ids=[[0]])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"logits_BV": np.zeros(0)}, r"logits must have the shape \[rows, vocabulary\], got"),
        ({"mask": np.zeros((1, 1), np.int32)}, "mask must have the shape"),
        ({"step": [0, 1]}, "step has 2 entries"),
        ({"seed": [1, 2]}, "seed has 2 entries"),
        ({"logits_BV": np.zeros((2, 4)), "seed": [1]}, "seed has 1 entries, but the logits have 2 rows"),
        ({"params": [(), (), ()]}, "params has 3 entries, but the logits have 1 rows"),
        ({"params": (Suppress((2,)),)}, "suppress_token_ids names token 2"),
    ],
)
def test_wrong_arguments_are_explained_as_by_sample(arguments, words):
    with pytest.raises(ValueError, match=words):
        nc.trace(**{"logits_BV": [0.0, 1.0], "params": (), **arguments})


# ---- accepted arguments


@pytest.mark.parametrize("kind", ["array", "list", "tensor"])
def test_rows_have_a_trace_each(kind):
    logits_BV = np.random.default_rng(5).normal(size=(3, 40)).astype(np.float32)
    params = [nc.SamplingParams(top_k=k, presence_penalty=1.0, seed=k) for k in (2, 3, 4)]
    words = {"prompt_ids": [[1], [2], [3]], "output_ids": [[4], [5], []]}
    mask, steps = np.array([[-1, -1], [7, 0], [-1, 1]], np.int32), [1, 1, 0]
    given = {"array": logits_BV, "list": logits_BV.tolist(), "tensor": logits_BV}[kind]
    if kind == "tensor":
        given = pytest.importorskip("torch").tensor(logits_BV)
    traces = nc.trace(given, params, **words, mask=mask, step=steps)
    expected = [
        nc.trace(
            logits_BV[row],
            params[row],
            prompt_ids=words["prompt_ids"][row],
            output_ids=words["output_ids"][row],
            mask=mask[row],
            step=steps[row],
        )
        for row in range(3)
    ]
    assert [str(one) for one in traces] == [str(one) for one in expected]
    assert [one.token_id for one in traces] == nc.sample(logits_BV, params, **words, mask=mask, step=steps).tolist()


def test_rows_share_one_argument_or_have_their_own():
    logits_BV = np.random.default_rng(6).normal(size=(2, 40))
    logits_BV[1, 3] = np.nan
    params = nc.SamplingParams(guidance_scale=2.0)
    traces = nc.trace(logits_BV, params, companion=-logits_BV, seed=[3, 4], step=2)
    assert [(one.seed, one.step, one.error is None) for one in traces] == [(3, 2, True), (4, 2, False)]
    assert str(traces[0]) == str(nc.trace(logits_BV[0], params, companion=-logits_BV[0], seed=3, step=2))
    assert [one.seed for one in nc.trace(logits_BV, (Gumbel(9),))] == [9, 9]
    assert nc.trace(np.zeros((0, 4)), ()) == []


def test_a_mask_may_have_extra_words_and_bits_beyond_the_vocabulary():
    mask = np.array([-1, 0b10001, -1], np.int32)
    trace = nc.trace(np.zeros(37), nc.SamplingParams(seed=1), mask=mask)
    assert trace.steps[1].name == "mask"
    assert trace.steps[1].removed.tolist() == [33, 34, 35]
    assert trace.steps[1].why == "masked tokens: 3 banned"


def test_a_generated_seed_is_returned():
    logits = np.zeros(1000)
    trace = nc.trace(logits, nc.SamplingParams(), step=3)
    assert nc.sample(logits[None], nc.SamplingParams(seed=trace.seed), step=3)[0] == trace.token_id
    assert nc.trace(logits, nc.SamplingParams()).seed != trace.seed
    assert trace.step == 3


def test_neutral_stages_are_listed_too():
    trace = nc.trace([0.0, 1.0, 2.0], (TopK(0), Temperature(0), TopP(0.9), Gumbel(1)))
    assert [one.why for one in trace.steps[1:4]] == [
        "neutral: no effect",
        "greedy: keeps only the first of the ranking",
        "target 0.9, reached 1",
    ]


# ---- explanations


class Small(Prefix):
    """A prefix whose weights are not probabilities."""

    share: float = param("part")

    def weight(self, x, row):
        return x - x.min() + 1.0

    def target(self, row):
        return self.share


class Turn(Scale):
    """Negate the scores."""

    monotone = False

    def apply(self, x, row):
        return -x


P = np.log([0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        ((LogitBias({0: 1.5, 1: -2}),), "listed tokens: 2 changed by -2 to +1.5"),
        ((LogitBias({0: 1.5, 1: 0}),), "listed tokens: 1 changed by +1.5"),
        ((Presence(0.5),), "output tokens: 2 changed by -0.5"),
        ((Presence(0.5, 3),), "prompt and output tokens, the last 3: 2 changed by -0.5"),
        ((Frequency(0.5, -1),), "prompt and output tokens: 3 changed by -1 to -0.5"),
        ((TopK(1, False), Presence(0.5, 0)), "prompt and output tokens, the last 0: none changed"),
        ((BadWords(((0,), (2, 1), (3, 3))),), "listed tokens: 2 banned"),
        ((nc.SamplingParams(allowed_token_ids=(0, 1)).build_pipeline()[0],), "unlisted tokens: 2 banned"),
        ((Temperature(0.5),), "score range 1.386 -> 2.773"),
        ((Turn(),), "score range 1.386 -> 1.386; another token ranks first"),
        ((MinP(0.5),), "probability >= 0.2, 0.5 of the highest"),
        ((Epsilon(0.25),), "probability >= 0.25, 0.625 of the highest"),
        ((Epsilon(0.5),), "probability >= 0.5: no token, keeps the first"),
        ((Epsilon(0.5, 2),), "probability >= 0.5: no token, keeps the first 2"),
        ((MinP(0.5, 2),), "probability >= 0.2, 0.5 of the highest"),
        ((MinP(0.5, 4),), "probability >= 0.2, 0.5 of the highest; keeps the first 4"),
        ((Mirostat(1, mu=2),), "probability >= 0.25, 0.625 of the highest"),
        ((TopK(3),), "target 3 tokens, kept probability 0.9"),
        ((TopK(9),), "target 9 tokens, kept probability 1"),
        ((TopP(0.6),), "target 0.6, reached 0.7"),
        ((TopK(2), TopP(0.5)), "target 0.5, reached 0.5714"),
        ((TopK(2), TopP(0.5, True)), "target 0.5 of all tokens, reached 0.7, kept probability 1"),
        ((Typical(0.3),), "target 0.3, reached 0.3, in its own ranking"),
        ((TopH(0.5),), "target at most 0.5 of the weight, reached 0.2864, kept probability 0.4"),
        ((Small(3.0),), "target 0.4179 of the weight, reached 0.6248, kept probability 0.7"),
        ((Xtc(1, 0.15, (9,)),), "3 with probability >= 0.15, keeps the last of them"),
        ((Xtc(1, 0.5),), "0 with probability >= 0.5"),
        ((Xtc(1, 0.15, (0, 1)),), "3 with probability >= 0.15, all kept as exempt tokens or by min_keep"),
        ((Xtc(1, 0.15, (), 3),), "3 with probability >= 0.15, all kept as exempt tokens or by min_keep"),
        ((Logprobs(3),), "reports logprobs of this distribution"),
    ],
)
def test_explanations_contain_the_numbers(stages, why):
    logits = np.concatenate((P, np.full(6, -np.inf)))
    trace = nc.trace(logits, (*stages, Gumbel(1)), prompt_ids=[0], output_ids=[1, 1, 2])
    explanation = trace.steps[len(stages)].why
    assert explanation == why or (explanation.startswith("random number 0.") and explanation.endswith(f" < 1: {why}"))


def test_an_inactive_ceiling_is_explained():
    explanations = {nc.trace(P, (Xtc(0.5), Gumbel(seed))).steps[1].why.split(" ", 3)[3] for seed in range(40)}
    assert explanations == {">= 0.5: inactive in this step", "< 0.5: 4 with probability >= 0.1, keeps the last of them"}


@pytest.mark.parametrize(
    ("draw", "how"),
    [(Greedy(), "highest score"), (Gumbel(2), "highest score with noise"), (Categorical(2), "inverse CDF")],
)
def test_the_draw_reports_the_probability_of_its_token(draw, how):
    trace = nc.trace(P, (TopK(3), draw))
    chance = [4 / 9, 3 / 9, 2 / 9][trace.token_id]
    assert trace.steps[-1].why.startswith(how)
    assert trace.steps[-1].why.endswith(f": rank {trace.token_id + 1} of 3, probability {chance:.4g}")


# ---- output


def test_the_table_is_aligned_and_complete():
    trace = nc.trace(P, nc.SamplingParams(temperature=0.5, top_k=3, top_p=0.6, seed=1, logit_bias={3: 1e-3}), step=2)
    assert repr(trace) == str(trace)
    assert repr(trace.steps[3]) == f"TraceStep(top_k: 3 left, {trace.steps[3].why})"
    head, *rows, end = str(trace).splitlines()
    assert head.split() == ["stage", "left", "touched", "removed", "entropy", "best", "p", "why"]
    stages = ["logits", "LogitBias({3: 0.001})", "Temperature(0.5)", "TopK(3)", "TopP(0.6)", "Gumbel(1)"]
    assert [row[: head.index("left")].strip() for row in rows] == stages
    assert end == f"token {trace.token_id} (seed 1, step 2)"
    why = head.index("why")
    assert [row[why:] for row in rows] == [one.why for one in trace.steps]
    assert all(row[why - 1] == " " for row in rows)
    left = head.index("left") + 4
    assert [int(row[:left].split()[-1]) for row in rows] == [one.left for one in trace.steps] == [4, 4, 4, 3, 2, 1]
    assert not any(row.endswith(" ") for row in [head, *rows])


def test_long_stage_names_and_explanations_do_not_break_the_table():
    trace = nc.trace(np.zeros(500), (Suppress(tuple(range(400))), Gumbel(1)))
    table = trace.table(lambda token: f"word {token} " * 20)
    assert max(map(len, table.splitlines())) < 170
    assert "Suppress((0, 1, 2" in table
    assert "word 0 word 0 wor..." in table


def test_every_pipeline_gives_valid_json():
    fail = lambda name: pytest.fail(f"{name} is no JSON")
    for seed in range(60):
        logits, stages, words, step, mask = case(seed)
        trace = nc.trace(logits, stages, step=step, mask=mask, **words)
        page = json.loads(trace.to_json(top=3), parse_constant=fail)
        assert (page["token_id"], page["error"], page["seed"], page["step"]) == (
            trace.token_id,
            trace.error,
            trace.seed,
            step,
        )
        for shown, one in zip(page["steps"], trace.steps, strict=True):
            assert (shown["stage"], shown["left"], shown["why"]) == (one.name, one.left, one.why)
            assert shown["removed_count"] == len(one.removed) >= len(shown["removed"]) <= 3
            assert shown["touched_count"] == len(one.touched)
            assert [i for i, _, _ in shown["top"]] == one.most_likely(3)
            assert [p for _, _, p in shown["top"]] == one.probabilities[one.most_likely(3)].tolist()
    assert json.loads(nc.trace([0.0, np.nan], ()).to_json())["steps"] == []
    assert json.loads(nc.trace([0.0, 0.0], ()).to_json(top=0))["steps"][0]["top"] == []


def test_no_public_name_is_also_a_module():
    """Importing the module by this name would return the module instead of the function."""
    modules = [name for name in nc.__all__ if importlib.util.find_spec(f"nucleate.{name}") is not None]
    assert modules == ["watermark"]  # the module itself is public


def test_the_arguments_are_not_modified():
    logits, words = np.zeros(8, np.float32), [1, 2]
    unchanged = logits.copy()
    nc.trace(logits, nc.SamplingParams(repetition_penalty=2.0, logit_bias={1: 5}), prompt_ids=words)
    assert (logits == unchanged).all()
    assert words == [1, 2]


# ---- the backend


@pytest.mark.parametrize("seed", range(12))
def test_a_trace_of_the_cpu_backend_equals_the_reference(seed):
    x = np.random.default_rng(seed).normal(size=400) * 3
    stages = (Presence(1.0), Temperature(0.8), TopK(50), Typical(0.9), Xtc(0.5, 0.05), Gumbel(seed))
    one = nc.trace(x, stages, output_ids=[3, 5])
    other = nc.trace(x, stages, output_ids=[3, 5], backend="cpu")
    assert other.token_id == one.token_id == nc.sample(x[None], stages, output_ids=[[3, 5]], backend="cpu")[0]
    for cpu_step, expected in zip(other.steps, one.steps, strict=True):
        assert cpu_step.stage == expected.stage
        assert cpu_step.removed.tolist() == expected.removed.tolist()
        assert cpu_step.scores == pytest.approx(expected.scores, rel=1e-6)


def test_a_trace_of_the_cpu_backend_reports_errors_and_wrong_backends():
    bad = nc.trace([1.0, float("nan")], nc.SamplingParams(seed=1), backend="cpu")
    assert (bad.token_id, bad.error) == (None, "NaN at token 1")
    none = nc.trace([1.0, 2.0], (Suppress((0, 1)), Gumbel(1)), backend="cpu")
    assert none.error == "every token is at -inf after suppress"
    with pytest.raises(ValueError, match="backend must be one of"):
        nc.trace([1.0, 2.0], (), backend="numpy")


# ---- comparison with the step before


@pytest.mark.slow
def test_removed_mass_and_divergence_are_those_of_the_distributions():
    for seed in range(150):
        logits, stages, words, step, mask = case(seed)
        steps = nc.trace(logits, stages, step=step, mask=mask, **words).steps
        assert (steps[0].removed_probability, steps[0].kl) == (0.0, 0.0)
        for old, new in itertools.pairwise(steps):
            p, q = new.probabilities, old.probabilities
            there = p > 0
            assert new.removed_probability == pytest.approx(q[new.removed].sum(), rel=1e-12, abs=0)
            assert new.kl == pytest.approx((p[there] * np.log(p[there] / q[there])).sum(), rel=1e-9, abs=1e-12)
            assert new.kl >= 0
            if isinstance(new.stage, Floor | Prefix | Ceiling | Draw):
                assert new.kl == pytest.approx(-np.log1p(-new.removed_probability), rel=1e-9, abs=1e-12)


def test_removed_mass_and_divergence_are_exact_when_they_are_tiny_or_huge():
    small = nc.trace([0.0, -60.0], (MinP(0.5), Gumbel(1))).steps[1]
    assert small.removed_probability == pytest.approx(np.exp(-60.0), rel=1e-12)
    bias = nc.trace([0.0, -1000.0], (LogitBias({1: 3000.0}), Gumbel(1))).steps[1]
    assert bias.kl == pytest.approx(1000.0)
    assert bias.probabilities.tolist() == [0.0, 1.0]
    extreme = nc.trace([3e38, -3e38, 0.0], (LogitBias({1: 1e308, 0: -1e308}), Temperature(1e-3), Gumbel(1)))
    assert all(np.isfinite([step.kl, step.removed_probability, step.entropy]).all() for step in extreme.steps)


# ---- the draw


def race(x, draw, seed, step):
    """The token of a race, and the totals: a plain walk over groups and tokens. x: {token: relative score}."""
    number = lambda stream, index: float(noise.uniform(seed, step, stream, np.array([index]))[0])
    groups = {}
    for token in sorted(x):
        groups.setdefault(token // noise.GROUP_SIZE, []).append(token)
    masses = {group: np.log(np.sum(np.exp([x[i] for i in tokens]))) for group, tokens in groups.items()}
    totals = {group: float(draw.score(mass, number(noise.GROUP, group))) for group, mass in masses.items()}
    winner = max(totals, key=lambda group: (totals[group], -group))
    scores = {token: float(draw.score(x[token], number(noise.TOKEN, token))) for token in groups[winner]}
    return max(scores, key=lambda token: (scores[token], -token)), totals, scores


@pytest.mark.parametrize("seed", range(12))
def test_the_draw_is_the_race_that_selects_the_token(seed):
    r = np.random.default_rng(seed)
    logits = np.round(r.normal(size=900) * r.choice([0.0, 1.0, 6.0]))
    trace = nc.trace(logits, (TopK(600), Gumbel(seed)), step=seed)
    kept = trace.steps[-2].scores
    x = {int(i): float(kept[i] - kept.max()) for i in np.flatnonzero(kept > -np.inf)}
    token, groups, tokens = race(x, Gumbel(seed), seed, seed)
    assert trace.token_id == trace.draw.token == trace.draw.tokens.winner == token
    assert dict(zip(trace.draw.groups.ids_N.tolist(), trace.draw.groups.total_N, strict=True)) == pytest.approx(groups)
    assert dict(zip(trace.draw.tokens.ids_N.tolist(), trace.draw.tokens.total_N, strict=True)) == pytest.approx(tokens)
    assert trace.draw.groups.winner == token // noise.GROUP_SIZE


@pytest.mark.slow
def test_the_winner_of_every_draw_is_the_sampled_token():
    for seed in range(150):
        logits, stages, words, step, mask = case(seed)
        trace = nc.trace(logits, stages, step=step, mask=mask, **words)
        if trace.error is None:
            assert trace.draw.token == trace.draw.tokens.winner == trace.token_id
            assert (trace.draw.groups is None) == (stages[-1].uniforms != "each")
    assert nc.trace([0.0, np.nan], ()).draw is None


def test_among_equal_totals_the_lowest_id_wins():
    class Same(Draw):
        uniforms = "each"

        def score(self, x, u):
            return 0.0 * u

    trace = nc.trace([-np.inf] * 300 + [0.0] * 600, (Same(),))
    assert (trace.token_id, trace.draw.groups.winner) == (300, 1)
    assert nc.trace([0.0, 1.0, 1.0], (Greedy(),)).draw.tokens.winner == 1


def test_intervals_are_cumulative_and_the_token_is_where_the_number_falls():
    for seed in range(30):
        line = nc.trace(P, (Categorical(seed),)).draw.tokens
        assert line.ids_N.tolist() == [0, 1, 2, 3]
        assert (line.before_N / line.weight_N.sum()).tolist() == pytest.approx([0, 0.4, 0.7, 0.9])
        u = float(noise.uniform(seed, 0, noise.TOKEN, np.zeros(1, int))[0])
        assert line.target / line.weight_N.sum() == pytest.approx(u)
        assert line.winner == sum(u > bound for bound in (0.4, 0.7, 0.9))


def test_a_secret_key_hides_the_draw():
    key = nc.watermark.WatermarkKey(b"x" * 16)
    trace = nc.trace(np.zeros(300), (GumbelWatermark(seed=1, key=key),), output_ids=[1, 2, 3, 4])
    assert trace.draw is None
    assert trace.token_id is not None


def test_the_target_of_mirostat_v1_is_a_number_of_tokens():
    logits = np.random.default_rng(0).normal(size=300) * 3
    [step] = nc.trace(logits, (MirostatV1(3.0), Gumbel(1))).steps[1:2]
    least = float(step.why.removeprefix("target at most ").split()[0])
    assert step.left == int(least) > 1
