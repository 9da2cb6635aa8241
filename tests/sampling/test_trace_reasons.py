"""removal_reasons: one sentence per removed token, whose numbers are true; checked by a plain walk over the tokens."""

from __future__ import annotations

import math
import re
from functools import cache

import numpy as np
import pytest
from custom_stages import DRAWS, OWN
from traced_rows import case

import nucleate as nc
from nucleate.sampling import noise, reference
from nucleate.sampling.stage import (
    Draw,
    Floor,
    Prefix,
    Shift,
    Transform,
    min_keep_of,
    min_keep_parameter,
    param,
    shape_of,
)
from nucleate.sampling.stages import (
    BadWords,
    Categorical,
    Epsilon,
    Greedy,
    Gumbel,
    MinP,
    Mirostat,
    Suppress,
    Temperature,
    TopH,
    TopK,
    TopP,
    Typical,
    Xtc,
)
from nucleate.sampling.trace import Trace, TraceStep
from nucleate.sampling.trace_reasons import removal_reasons, told_apart

P = np.log([0.4, 0.3, 0.2, 0.1])
NUMBER = r"(-?(?:\d[\d.]*(?:e[+-]?\d+)?|inf))"


def reasons(step: TraceStep, trace: Trace | None = None) -> dict[int, str]:
    """The reasons of all tokens of the vocabulary."""
    return removal_reasons(step.change, range(len(step.scores)), None if trace is None else trace.draw)


def ranking(step: TraceStep) -> list[int]:
    """The tokens in rank order, from the scores alone; a monotone scale may have made some equal."""
    scores = step.scores
    return sorted(np.flatnonzero(scores > -np.inf).tolist(), key=lambda token: (-scores[token], token))


@cache
def ordered(stage: Prefix, before: TraceStep) -> tuple[list[int], list[float], float]:
    """The tokens in the order of a prefix, their weights one by one, and its target."""
    tokens = before.most_likely(10**9)
    x = before.scores[tokens]
    relative, row = reference.relative_scores(before.change.after.kept, stage.sorted_count)
    assert relative.tolist() == (x - x.max()).tolist()
    with np.errstate(all="ignore"):
        values = stage.order(relative, row), stage.weight(relative, row), stage.target(row)
        keys, weights, target = map(np.asarray, values)
    order = sorted(range(len(tokens)), key=lambda place: (keys[place], place))
    return [tokens[i] for i in order], [float(weights[i]) for i in order], float(target)


def check_floor(reason: str, token: int, before: TraceStep, after: TraceStep) -> None:
    kept = after.scores > -np.inf
    if found := re.fullmatch(f"probability {NUMBER} is below {NUMBER}", reason):
        p, least = map(float, found.groups())
        assert p == pytest.approx(before.probabilities[token], rel=5e-3)
        assert p < least
        if np.count_nonzero(kept) > min_keep_of(after.stage):
            assert least <= before.probabilities[kept].min() * 1.005
    else:
        found = re.fullmatch(f"score {NUMBER} is below {NUMBER}, relative to the highest", reason)
        x, least = map(float, found.groups())
        assert x == pytest.approx(before.scores[token] - before.scores.max(), rel=5e-3)
        assert x < least


def check_prefix(reason: str, token: int, before: TraceStep, after: TraceStep) -> None:
    stage = after.stage
    tokens, weights, target = ordered(stage, before)
    place = tokens.index(token)
    own = " in its ranking" if type(stage).order is not Prefix.order else ""
    if reason == f"rank {place + 1}{own}: {stage.name} keeps only the first":
        assert not math.isfinite(target)
    elif found := re.fullmatch(f"rank {NUMBER}{own} is beyond {stage.name} {NUMBER}", reason):
        assert float(found[1]) == place + 1 > float(found[2]) == pytest.approx(target / weights[0], rel=1e-5)
        if type(stage).order is Prefix.order and before.stage is None:
            assert ranking(before)[place] == token
    else:
        which, verb = ("before it", "reaches") if stage.inclusive else ("with it", "exceeds")
        what = "(probability|probability of all tokens|weight)"
        form = f"cumulative {what} {NUMBER} {which}{own} {verb} {stage.name} {NUMBER}"
        found = re.fullmatch(form, reason)
        reached, limit = float(found[2]), float(found[3])
        assert reached >= limit if stage.inclusive else reached > limit
        end = place if stage.inclusive else place + 1
        if found[1] == "probability":
            assert reached == pytest.approx(sum(before.probabilities[each] for each in tokens[:end]), rel=1e-3)
        sum_, unit = math.fsum(weights[:end]), math.fsum(weights)
        unit = 1.0 if unit <= 0 else unit
        if found[1] == "probability of all tokens":
            unit *= sum_ / unit / reached if reached else 1.0
        assert (reached, limit) == pytest.approx((sum_ / unit, target / unit), rel=2e-3, abs=1e-9)


def check_ceiling(reason: str, token: int, before: TraceStep, after: TraceStep) -> None:
    p, least = map(
        float, re.fullmatch(f"probability {NUMBER} >= {NUMBER}, and not the last such token", reason).groups()
    )
    assert p == pytest.approx(before.probabilities[token], rel=5e-3)
    assert p >= least
    kept_above = [
        other
        for other in before.most_likely(10**9)
        if before.probabilities[other] >= least * 0.995 and after.scores[other] > -np.inf
    ]
    assert kept_above
    assert before.most_likely(10**9).index(token) < before.most_likely(10**9).index(kept_above[-1])


def check(trace: Trace) -> int:
    """Check the reasons of a trace; return their number."""
    seen = 0
    for before, after in zip(trace.steps[:-1], trace.steps[1:], strict=True):
        found = reasons(after, trace)
        assert sorted(found) == after.removed.tolist()
        seen += len(found)
        for token, reason in found.items():
            if after.stage.greedy and not isinstance(after.stage, Greedy):
                place = before.most_likely(10**9).index(token)
                assert reason == f"rank {place + 1}: greedy keeps only the first"
                assert place > 0
                continue
            match shape_of(after.stage):
                case "Floor":
                    check_floor(reason, token, before, after)
                case "Prefix":
                    check_prefix(reason, token, before, after)
                case "Ceiling":
                    check_ceiling(reason, token, before, after)
                case "Shift":
                    assert after.stage.name in reason
                case "Draw":
                    check_draw(reason, token, trace)
                case _:
                    assert reason == f"{after.stage.name} sets its score to -inf"
    return seen


def check_draw(reason: str, token: int, trace: Trace) -> None:
    stage, kept = trace.steps[-1].stage, trace.steps[-2]
    if stage.uniforms == "one":
        assert reason == "the random number is not in its interval"
        return
    if found := re.fullmatch(
        f"(total|total of its group) {NUMBER} equals the highest, and the lower id is selected", reason
    ):
        assert token > trace.token_id
        return
    found = re.fullmatch(f"(total|total of its group) {NUMBER} is below {NUMBER}", reason)
    own, won = float(found[2]), float(found[3])
    assert own < won
    if stage.uniforms == "none" or found[1] == "total":
        x = kept.scores[[token, trace.token_id]] - kept.scores.max()
        u = [noise.uniform(trace.seed, trace.step, noise.TOKEN, np.array([i]))[0] for i in (token, trace.token_id)]
        totals = [float(stage.score(x[i], u[i] if stage.uniforms == "each" else 0.0)) for i in range(2)]
        assert (own, won) == pytest.approx(totals, rel=1e-3, abs=1e-9)


@pytest.mark.slow
def test_the_reasons_of_random_pipelines_are_true() -> None:
    seen = 0
    for seed in range(150):
        logits, stages, words, step, mask = case(seed)
        stages = tuple(stage for stage in stages if stage.name != "mask")
        trace = nc.trace(logits, stages, step=step, mask=mask, **words)
        if mask is None:
            seen += check(trace)
        else:
            masked = next(step for step in trace.steps if step.name == "mask")
            assert set(reasons(masked).values()) <= {"not allowed by the mask of this step"}
    assert seen > 2000


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("stage", [*OWN, *DRAWS], ids=repr)
def test_the_reasons_of_custom_stages_are_true(stage: nc.Stage) -> None:
    for seed in range(4):
        logits = np.round(np.random.default_rng(seed).normal(size=300) * 8) / 2
        last = stage if isinstance(stage, Draw) else Gumbel(seed)
        first = () if last is stage else (stage,)
        check(nc.trace(logits, (Temperature(0.7), *first, last)))


def test_reasons_are_true_near_a_threshold() -> None:
    """A hair's breadth below the threshold, more digits are shown."""
    seen = set()
    for gap in (1e-2, 1e-3, 1e-4, 1e-5, 2e-6):
        logits = np.array([0.0, np.log(0.5), np.log(0.5 * (1 - gap))])
        [reason] = reasons(nc.trace(logits, (MinP(0.5), Gumbel(1))).steps[1]).values()
        p, least = map(float, re.fullmatch(f"probability {NUMBER} is below {NUMBER}", reason).groups())
        assert p < least
        seen.add(reason)
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ((TopK(2),), {2: "rank 3 is beyond top_k 2", 3: "rank 4 is beyond top_k 2"}),
        (
            (TopP(0.6),),
            {
                2: "cumulative probability 0.7 before it reaches top_p 0.6",
                3: "cumulative probability 0.9 before it reaches top_p 0.6",
            },
        ),
        ((TopK(3), TopP(0.7, True)), {2: "cumulative probability of all tokens 0.7 before it reaches top_p 0.7"}),
        (
            (Typical(0.3),),
            {
                0: "cumulative probability 0.5 before it in its ranking reaches typical 0.3",
                2: "cumulative probability 0.3 before it in its ranking reaches typical 0.3",
                3: "cumulative probability 0.9 before it in its ranking reaches typical 0.3",
            },
        ),
        (
            (TopH(0.5),),
            {
                1: "cumulative weight 0.5686 with it exceeds top_h 0.5",
                2: "cumulative weight 0.8201 with it exceeds top_h 0.5",
                3: "cumulative weight 1 with it exceeds top_h 0.5",
            },
        ),
        ((MinP(0.5),), {3: "probability 0.1 is below 0.2"}),
        ((Epsilon(0.5),), {i: f"probability {p} is below 0.5" for i, p in ((1, 0.3), (2, 0.2), (3, 0.1))}),
        ((Mirostat(1, mu=2),), {2: "probability 0.2 is below 0.25", 3: "probability 0.1 is below 0.25"}),
        (
            (Xtc(1, 0.15),),
            {i: f"probability {p} >= 0.15, and not the last such token" for i, p in ((0, 0.4), (1, 0.3))},
        ),
        ((Suppress((0, 3)),), {0: "banned by suppress", 3: "banned by suppress"}),
        ((BadWords(((2,),)),), {2: "banned by bad_words"}),
        ((Temperature(0),), {i: f"rank {i + 1}: greedy keeps only the first" for i in (1, 2, 3)}),
        ((TopK(1),), {i: f"rank {i + 1}: greedy keeps only the first" for i in (1, 2, 3)}),
    ],
)
def test_a_reason_names_the_deciding_numbers(stages: tuple[nc.Stage, ...], reason: dict[int, str]) -> None:
    assert reasons(nc.trace(P, (*stages, Gumbel(1))).steps[len(stages)]) == reason


def test_allowed_tokens_and_masks_have_words_of_their_own() -> None:
    allowed = nc.SamplingParams(allowed_token_ids=(0, 1)).build_pipeline()[0]
    sentence = "banned by allowed, which allows only the tokens in its list"
    assert reasons(nc.trace(P, (allowed, Gumbel(1))).steps[1]) == {2: sentence, 3: sentence}
    step = nc.trace(P, (Gumbel(1),), mask=np.array([0b0110], np.int32)).steps[1]
    assert reasons(step) == dict.fromkeys((0, 3), "not allowed by the mask of this step")


class Seen(Shift):
    touches = "seen"

    def apply(self, x, token):
        return x - np.inf


class Even(Transform):
    """Ban odd tokens."""

    def apply(self, ids, x, history):
        return np.where(ids % 2, -np.inf, x)


class Nothing(Floor):
    value: float = param("", default=0.0)

    def floor(self, row):
        return self.value


class Goal(Prefix):
    value: float = param("", default=0.0)
    min_keep: int = min_keep_parameter()

    def weight(self, x, row):
        return np.exp(x)

    def target(self, row):
        return np.float64(self.value) / 0.0 * 0.0


@pytest.mark.parametrize(
    ("stage", "token", "reason"),
    [
        (Seen(), 2, "banned by seen, as a token of the prompt or output"),
        (Even(), 1, "even sets its score to -inf"),
        (Nothing(5.0), 1, "probability 0.3 is below 59.4"),
        (Nothing(1e4), 1, "score -0.288 is below 1e+04, relative to the highest"),
        (Goal(1.0), 1, "rank 2: goal keeps only the first"),
        (Goal(1.0, 2), 2, "rank 3: goal keeps only the first 2"),
    ],
)
def test_reasons_of_rules_that_users_may_write(stage: nc.Stage, token: int, reason: str) -> None:
    step = nc.trace(P, (stage, Gumbel(1)), prompt_ids=[2]).steps[1]
    assert reasons(step)[token] == reason


def test_a_threshold_that_is_not_a_number_keeps_the_first_and_says_so() -> None:
    class Broken(Floor):
        def floor(self, row):
            return row.top * np.nan

    step = nc.trace(P, (Broken(), Gumbel(1))).steps[1]
    assert reasons(step) == dict.fromkeys((1, 2, 3), "the threshold of broken is not a number")


def test_only_removed_tokens_have_reasons() -> None:
    trace = nc.trace([*P, -np.inf], (TopK(2), TopP(0.5), Greedy()))
    assert removal_reasons(trace.steps[0].change, range(5)) == {}
    assert list(removal_reasons(trace.steps[1].change, [3, 0, 4, 3, 2])) == [3, 2]
    assert list(removal_reasons(trace.steps[2].change, [3, 2, 1])) == [1]
    assert removal_reasons(trace.steps[1].change, []) == {}
    assert removal_reasons(trace.steps[1].change, [0]) == {}


@pytest.mark.parametrize("draw", [Gumbel(3), Categorical(3), Greedy()])
def test_a_draw_without_its_numbers_only_says_that_another_token_was_selected(draw: nc.Stage) -> None:
    trace = nc.trace(P, (draw,))
    assert set(removal_reasons(trace.steps[1].change, range(4)).values()) == {"another token was selected"}


def test_equal_totals_are_not_called_lower() -> None:
    trace = nc.trace([0.0, 2.0, 2.0, 1.0], (Greedy(),))
    assert reasons(trace.steps[1], trace) == {
        0: "total -2 is below 0",
        2: "total 0 equals the highest, and the lower id is selected",
        3: "total -1 is below 0",
    }


def test_numbers_are_told_apart_with_as_few_digits_as_possible() -> None:
    assert told_apart(0.1, 0.2) == ("0.1", "0.2")
    assert told_apart(0.12345, 0.12346) == ("0.12345", "0.12346")
    assert told_apart(1 / 3, 1 / 3 + 1e-9) == ("0.333333333", "0.333333334")
    assert told_apart(37.9999999, 38, 6) == ("37.9999999", "38")
    assert told_apart(0.5, 0.5) == ("0.5", "0.5")
    assert told_apart(1 / 3, 1 / 3 + 1e-9, strict=False) == ("0.333", "0.333")
