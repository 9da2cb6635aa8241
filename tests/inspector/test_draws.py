"""draw_counts: the tokens of ``sample`` with the same seeds; and draws_view: counts beside the exact distribution."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from custom_stages import DRAWS, OWN
from traced_rows import batch, case

import nucleate as nc
from nucleate.inspector.draws import MAX_DRAWS, DrawCounts, chi_square, draw_counts, draws_view
from nucleate.sampling import reference
from nucleate.sampling.stages import (
    AdaptiveP,
    Categorical,
    Greedy,
    Gumbel,
    GumbelWatermark,
    Logprobs,
    MinP,
    Mirostat,
    MirostatV1,
    Suppress,
    Temperature,
    TopK,
    TopP,
    Xtc,
)

KEY = nc.watermark.WatermarkKey(b"z" * 16)
LAST = 2**64 - 1


def sampled(logits: Any, stages: Any, seeds: list[int], mask: Any = None, **words: Any) -> list[int]:
    """The token of each seed, by ``sample``."""
    draw = stages[-1]
    if draw in DRAWS:  # ``sample`` would use random seeds
        return [reference.draw(np.asarray(logits), stages, seed, words.get("step", 0)) for seed in seeds]
    own = [draw if isinstance(draw, Greedy) else dataclasses.replace(draw, seed=seed) for seed in seeds]
    rows, step = np.tile(logits, (len(seeds), 1)), words.pop("step", 0)
    masks = None if mask is None else np.tile(mask, (len(seeds), 1))
    lists = {name: ids * len(seeds) for name, ids in batch(words).items()}
    return nc.sample(rows, [(*stages[:-1], one) for one in own], step=step, mask=masks, **lists).tolist()


def check(logits: Any, stages: Any, count: int = 40, first_seed: int = 0, **words: Any) -> DrawCounts:
    """Compare counts with ``sample`` and with ``probabilities``."""
    result = draw_counts(logits, stages, count=count, first_seed=first_seed, seconds=60, **words)
    seeds = [(first_seed + i) % 2**64 for i in range(count)]
    assert (
        result.counts_V.tolist() == np.bincount(sampled(logits, stages, seeds, **words), minlength=len(logits)).tolist()
    )
    assert (result.requested, result.drawn, result.first_seed) == (count, count, first_seed)
    lists = {name: [words[name]] for name in ("prompt_ids", "output_ids", "mask") if words.get(name) is not None}
    if "mask" in lists:
        lists["mask"] = np.array(lists["mask"])
    assert result.probabilities_V == pytest.approx(nc.probabilities(np.array([logits]), stages, **lists)[0], rel=1e-9)
    return result


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("start", range(0, 120, 40))
def test_counts_are_those_of_sample(start: int) -> None:
    failed = 0
    for seed in range(start, start + 40):
        logits, stages, words, step, mask = case(seed)
        if nc.trace(logits, stages, step=step, mask=mask, **words).error is not None:
            failed += 1
            with pytest.raises(ValueError, match="every token is at -inf"):
                draw_counts(logits, stages, count=3, step=step, mask=mask, **words)
            continue
        check(logits, stages, count=25, first_seed=seed * 1000, step=step, mask=mask, **words)
    assert failed < 20


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 1000, 5000])
@pytest.mark.parametrize("draw", [Gumbel(), Categorical(), Greedy()], ids=repr)
def test_counts_of_vocabularies_of_all_sizes(size: int, draw: nc.Stage) -> None:
    random = np.random.default_rng(size)
    check(random.normal(size=size) * 4, (Temperature(1.3), TopP(0.95), draw), count=60, step=7)
    check(np.round(random.normal(size=size)), (draw,), count=30)


@pytest.mark.parametrize(
    "stages",
    [
        (Xtc(0.5, 0.05), Gumbel()),
        (Xtc(0.3, 0.05), Xtc(0.6, 0.02), Gumbel()),
        (Xtc(0.5, 0.05), Categorical()),
        (Xtc(1.0, 0.05), Gumbel()),
        (Mirostat(3.0, mu=4.2), Gumbel()),
        (MirostatV1(3.0, mu=5.0), Gumbel()),
        (AdaptiveP(0.2, mean=0.3), Categorical()),
        (Logprobs(3), MinP(0.1), Gumbel()),
        (TopK(1), Gumbel()),
        *((stage, Gumbel()) for stage in OWN),
        *((TopK(300), draw) for draw in DRAWS),
    ],
    ids=repr,
)
def test_counts_of_single_stages(stages: tuple[nc.Stage, ...]) -> None:
    check(np.round(np.random.default_rng(1).normal(size=600) * 8) / 4, stages, count=50, first_seed=17)


@pytest.mark.parametrize("first", [0, LAST, LAST - 5, 2**63 - 3, 2**32 - 3])
def test_seeds_continue_at_zero_after_the_last_one(first: int) -> None:
    check(np.linspace(0, 2, 300), (Xtc(0.5, 0.002), Gumbel()), count=12, first_seed=first, step=LAST)


@pytest.mark.slow
def test_more_draws_than_a_block_are_those_of_their_seeds() -> None:
    logits = np.random.default_rng(2).normal(size=300)
    whole = draw_counts(logits, (Gumbel(),), count=700, seconds=60).counts_V
    parts = [draw_counts(logits, (Gumbel(),), count=350, first_seed=350 * i, seconds=60).counts_V for i in range(2)]
    assert (whole == sum(parts)).all()
    check(logits, (Gumbel(),), count=700)


def test_the_seed_of_the_parameters_is_not_used() -> None:
    logits = np.random.default_rng(2).normal(size=300)
    one, other = (draw_counts(logits, nc.SamplingParams(seed=seed, top_k=40), count=50) for seed in (1, None))
    assert (one.counts_V == other.counts_V).all()


def test_a_companion_is_combined_first() -> None:
    logits, companion = np.random.default_rng(0).normal(size=(2, 300))
    params = nc.SamplingParams(guidance_scale=3.0, top_k=30)
    counts_V = draw_counts(logits, params, companion=companion, count=30).counts_V
    all_params = [params.override(seed=seed) for seed in range(30)]
    tokens = nc.sample(np.tile(logits, (30, 1)), all_params, companion=np.tile(companion, (30, 1)))
    assert counts_V.tolist() == np.bincount(tokens, minlength=300).tolist()


@pytest.mark.parametrize("output", [[], [1, 2], [1, 2, 3, 4, 5], [7, 7, 7, 7, 7, 7, 7, 7]])
def test_a_keyed_draw_is_counted_but_not_compared(output: list[int]) -> None:
    logits = np.random.default_rng(0).normal(size=600)
    for stages in ((GumbelWatermark(key=KEY),), (Xtc(0.5, 0.001), GumbelWatermark(key=KEY))):
        result = check(logits, stages, count=20, output_ids=output)
        view = draws_view(result, str)
        assert (view["chi_square"], view["degrees_of_freedom"]) == (None, None)
    if output == [1, 2, 3, 4, 5]:
        assert np.count_nonzero(draw_counts(logits, (GumbelWatermark(key=KEY),), output_ids=output).counts_V) == 1


@pytest.mark.parametrize(
    ("logits", "stages", "error"),
    [
        ([0.0, np.nan], (), "NaN at token 1"),
        ([0.0, np.inf], (), r"\+inf at token 1"),
        ([-np.inf] * 2, (), "every token is at -inf"),
        ([0.0, 1.0], (Suppress((0, 1)), Gumbel()), "every token is at -inf after suppress"),
    ],
)
def test_a_row_that_cannot_be_sampled_raises(logits: list[float], stages: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        draw_counts(logits, stages)


def test_draws_end_when_the_time_is_over() -> None:
    result = draw_counts(np.zeros(50_000), (Gumbel(),), count=MAX_DRAWS, seconds=0.0)
    assert 0 < result.drawn < MAX_DRAWS == result.requested
    assert result.counts_V.sum() == result.drawn
    view = draws_view(result, str)
    assert (view["count"], view["drawn"]) == (MAX_DRAWS, result.drawn)


# ---- the view


def strict(view: dict[str, Any]) -> dict[str, Any]:
    assert json.loads(json.dumps(view, allow_nan=False)) == view
    return view


@pytest.mark.parametrize("stages", [(Gumbel(),), (TopP(0.9), Xtc(0.5, 0.1), Categorical()), (Greedy(),)], ids=repr)
def test_the_view_lists_tokens_by_probability_and_the_rest(stages: tuple[nc.Stage, ...]) -> None:
    logits = np.random.default_rng(0).normal(size=400) * 2
    result = draw_counts(logits, stages, count=500, first_seed=3)
    view = strict(draws_view(result, lambda token: f"<{token}>", top=10))
    p_V = nc.probabilities(logits[None], stages)[0]
    assert (view["count"], view["drawn"], view["first_seed"]) == (500, 500, 3)
    order = sorted(np.flatnonzero(p_V).tolist(), key=lambda token: (-p_V[token], token))[:10]
    assert [token["id"] for token in view["tokens"]] == order
    for token in view["tokens"]:
        assert token["probability"] == pytest.approx(p_V[token["id"]])
        assert (token["count"], token["text"]) == (result.counts_V[token["id"]], f"<{token['id']}>")
    assert view["rest"]["probability"] == pytest.approx(
        1 - sum(token["probability"] for token in view["tokens"]), abs=1e-9
    )
    assert view["rest"]["count"] == 500 - sum(token["count"] for token in view["tokens"])


def test_draws_agree_with_the_distribution() -> None:
    """Pearson's statistic is near its degrees of freedom, within five standard deviations."""
    for size, deviation in ((6, 1.0), (500, 3.0), (3000, 0.2)):
        for draw in (Gumbel(), Categorical()):
            result = draw_counts(np.random.default_rng(size).normal(size=size) * deviation, (draw,), count=4000)
            view = draws_view(result, str)
            freedom = view["degrees_of_freedom"]
            assert freedom >= 4
            assert abs(view["chi_square"] - freedom) < 5 * (2 * freedom) ** 0.5


def test_the_statistic_of_wrong_counts_is_large() -> None:
    p = np.array([0.5, 0.3, 0.2])
    assert chi_square(np.array([500, 300, 200]), 1000 * p) == (0.0, 2)
    statistic, freedom = chi_square(np.array([400, 400, 200]), 1000 * p)
    assert (statistic, freedom) == (pytest.approx(100**2 / 500 + 100**2 / 300), 2)


def test_every_category_expects_five_draws() -> None:
    statistic, freedom = chi_square(np.array([90, 6, 2, 1, 1]), np.array([88.0, 6.0, 3.0, 2.0, 1.0]))
    assert (statistic, freedom) == (pytest.approx(4 / 88 + 0 + 4 / 6), 2)  # 3 + 2 + 1 are pooled
    statistic, freedom = chi_square(np.array([90, 7, 3]), np.array([90.0, 7.0, 3.0]))
    assert (statistic, freedom) == (0.0, 1)  # 3 joins 7
    assert chi_square(np.array([3, 0]), np.array([2.0, 1.0])) == (0.0, 0)
    assert chi_square(np.array([3]), np.array([3.0])) == (0.0, 0)
    assert chi_square(np.array([0, 3000, 0]), np.array([0.0, 3000.0, 0.0])) == (0.0, 0)
    even = np.full(10_000, 0.1)
    counts = np.bincount(np.random.default_rng(0).integers(0, 10_000, 1000), minlength=10_000)
    statistic, freedom = chi_square(counts, even)
    assert freedom in (98, 99)
    assert 40 < statistic < 180
