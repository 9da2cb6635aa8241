"""trace_view: its numbers are those of the trace, it is strict JSON, and it holds no more tokens than it may."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from custom_stages import DRAWS, OWN
from traced_rows import case

import nucleate as nc
from nucleate.inspector.trace_view import FINAL, MAX_IN_DRAW, MAX_TOKENS, trace_view
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.noise import GROUP_SIZE
from nucleate.sampling.stages import (
    Categorical,
    Greedy,
    Gumbel,
    GumbelWatermark,
    LogitBias,
    MinP,
    Suppress,
    Temperature,
    TopK,
    TopP,
    Typical,
)
from nucleate.sampling.trace_reasons import removal_reasons

FIELDS = {
    *("name", "shape", "label", "why", "kept", "removed", "changed", "entropy"),
    *("removed_probability", "kl", "p", "rest", "reasons"),
}


def name(token: int) -> str:
    return f"<{token}>"


def view_of(trace: nc.Trace, **options: Any) -> dict[str, Any]:
    """The view, as a client reads it."""
    view = trace_view(trace, name, **options)
    text = json.dumps(view, allow_nan=False)
    read = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert read == view
    return read


def check(trace: nc.Trace, view: dict[str, Any]) -> None:
    """Compare a view with its trace."""
    ids = [token["id"] for token in view["tokens"]]
    assert len(ids) == len(set(ids)) <= MAX_TOKENS
    assert (view["version"], view["seed"], view["error"]) == (1, trace.seed, trace.error)
    assert view["picked"] == (None if trace.token_id is None else {"id": trace.token_id, "text": name(trace.token_id)})
    ranking = trace.steps[0].most_likely(10**9) if trace.steps else []
    ranks = {token: place + 1 for place, token in enumerate(ranking)}
    assert view["tokens"] == [{"id": i, "text": name(i), "rank": ranks.get(i)} for i in ids]
    assert [i for i in ids if i in ranks] == [i for i in ranking if i in ids]
    assert len(view["stages"]) == len(trace.steps)
    for stage, step in zip(view["stages"], trace.steps, strict=True):
        assert stage.keys() == FIELDS
        assert (stage["name"], stage["why"], stage["kept"]) == (step.name, step.why, step.left)
        assert (stage["removed"], stage["changed"]) == (len(step.removed), len(step.touched))
        assert (stage["entropy"], stage["kl"]) == (step.entropy, step.kl)
        assert stage["removed_probability"] == step.removed_probability
        alive = step.scores > -np.inf
        assert stage["p"] == [step.probabilities[i] if alive[i] else None for i in ids]
        assert stage["rest"] == pytest.approx(1.0 - sum(p or 0.0 for p in stage["p"]), abs=1e-12)
        assert stage["rest"] >= 0
        reasons = removal_reasons(step.change, ids, trace.draw)
        assert {ids[int(place)]: reason for place, reason in stage["reasons"].items()} == reasons
        assert sorted(reasons) == sorted(set(step.removed.tolist()) & set(ids))


@pytest.mark.slow
def test_the_view_has_the_numbers_of_the_trace() -> None:
    for seed in range(120):
        logits, stages, words, step, mask = case(seed)
        trace = nc.trace(logits, stages, step=step, mask=mask, **words)
        check(trace, view_of(trace, top=1 + seed % 50, include=[seed % 37, 0]))


@pytest.mark.parametrize("stage", [*OWN, *DRAWS], ids=repr)
def test_the_view_of_custom_stages(stage: nc.Stage) -> None:
    logits = np.round(np.random.default_rng(3).normal(size=700) * 8) / 2
    trace = nc.trace(logits, (Temperature(0.7), *((stage,) if stage in OWN else (TopK(9), stage))))
    check(trace, view_of(trace))


def test_the_shape_and_label_of_a_stage() -> None:
    first, second, last = view_of(nc.trace([0.0, 1.0], (TopP(0.5), Gumbel(7))))["stages"]
    assert (first["name"], first["shape"], first["label"], first["kl"]) == ("logits", "", "logits", 0.0)
    assert (second["name"], second["shape"], second["label"]) == ("top_p", "prefix", "TopP(0.5)")
    assert (last["name"], last["shape"], last["label"]) == ("gumbel", "draw", "Gumbel(7)")


# ---- the tokens


def test_the_likeliest_tokens_the_selected_one_and_the_included_ones_are_shown() -> None:
    logits = -0.001 * np.arange(2000.0)
    trace = nc.trace(logits, (Temperature(50.0), Gumbel(1)))
    ids = [token["id"] for token in view_of(trace, top=40, include=(1234, 7, 1234))["tokens"]]
    assert ids == sorted({*range(40), 1234, trace.token_id})


def test_tokens_that_a_stage_raises_are_shown_wherever_the_model_ranks_them() -> None:
    trace = nc.trace(-0.1 * np.arange(500.0), (LogitBias({400: 60.0}), Gumbel(1)))
    ids = [token["id"] for token in view_of(trace, top=20)["tokens"]]
    assert ids[-1] == 400
    assert len(ids) == 21
    trace = nc.trace(np.arange(500.0), (LogitBias(dict.fromkeys(range(100), 1000.0)), Gumbel(1)))
    assert len(view_of(trace, top=20)["tokens"]) in (20 + FINAL, 21 + FINAL)


@pytest.mark.parametrize("top", [1, 512, 10**6])
def test_no_more_than_512_tokens_are_shown(top: int) -> None:
    trace = nc.trace(np.zeros(5000), (Gumbel(1),))
    tokens = view_of(trace, top=top, include=range(4000, 4600))["tokens"]
    assert len(tokens) == MAX_TOKENS
    assert trace.token_id in [token["id"] for token in tokens]


def test_included_tokens_must_be_in_the_vocabulary() -> None:
    trace = nc.trace([0.0, 1.0], ())
    for token in (2, -1):
        with pytest.raises(ParameterError, match="token must be an integer in 0"):
            trace_view(trace, name, include=[token])


def test_a_token_that_the_logits_exclude_has_no_rank_and_no_probability() -> None:
    view = view_of(nc.trace([0.0, -np.inf, 1.0], (Gumbel(1),)), include=[1])
    assert [token["rank"] for token in view["tokens"]] == [1, 2, None]
    assert view["stages"][0]["p"][2] is None
    assert view["stages"][0]["reasons"] == {}


# ---- unusual rows


@pytest.mark.parametrize(
    ("logits", "stages"),
    [
        ([3.5], (Temperature(0.5), TopK(1), TopP(0.5), MinP(1.0))),
        ([-np.inf, 2.0, -np.inf], (Temperature(0.5), Typical(0.5), TopP(0.1))),
        ([3e38, -3e38, 0.0], (Temperature(1e-3), MinP(0.5))),
        ([3e38, -3e38, 0.0], (LogitBias({0: -1e308, 1: 1e308}), Temperature(1e-300))),
        ([1e-45, 0.0, -1e-45], (Temperature(1e30), TopP(0.5))),
        ([-3e38] * 4, (Temperature(2.0),)),
        ([0.0] * 700, (TopK(300), TopP(0.5), MinP(1.0))),
        ([5.0, 1.0, 1.0, 1.0], (MinP(0.9, 3), TopP(0.1, min_keep=2))),
        ([0.0, 80.0, -800.0], (MinP(0.5, 2), Temperature(0.01))),
    ],
)
@pytest.mark.parametrize("draw", [Gumbel(1), Categorical(1), Greedy()], ids=repr)
def test_extreme_rows_are_strict_json(logits: list[float], stages: tuple[nc.Stage, ...], draw: nc.Stage) -> None:
    trace = nc.trace(logits, (*stages, draw))
    view = view_of(trace, include=range(len(logits))[:100])
    check(trace, view)
    assert view["picked"]["id"] == nc.sample([logits], (*stages, draw))[0]


@pytest.mark.parametrize(
    ("logits", "stages", "error", "count"),
    [
        ([0.0, np.nan], (), "NaN at token 1", 0),
        ([np.inf, 0.0], (TopK(1),), "+inf at token 0", 0),
        ([-np.inf, -np.inf], (), "every token is at -inf", 0),
        ([0.0, 1.0], (TopK(2), Suppress((0, 1)), TopP(0.5)), "every token is at -inf after suppress", 2),
    ],
)
def test_an_error_comes_with_the_stages_before_it(
    logits: list[float], stages: tuple[nc.Stage, ...], error: str, count: int
) -> None:
    trace = nc.trace(logits, stages)
    view = view_of(trace, include=[1])
    check(trace, view)
    assert (view["error"], len(view["stages"]), view["picked"], view["draw"]) == (error, count, None, None)
    assert bool(view["tokens"]) == bool(count)


def test_a_mask_and_a_companion_are_part_of_the_view() -> None:
    random = np.random.default_rng(0)
    logits, companion = random.normal(size=(2, 64))
    mask = np.array([0x0F0F0F0F, 0x0F0F0F0F], np.int32)
    trace = nc.trace(logits, nc.SamplingParams(seed=1, guidance_scale=2.0), mask=mask, companion=companion)
    view = view_of(trace)
    check(trace, view)
    assert view["stages"][0]["why"].startswith("combined by Guidance(")
    assert (view["stages"][1]["name"], view["stages"][1]["removed"]) == ("mask", 32)


# ---- the draw


def test_the_race_of_groups_and_of_tokens() -> None:
    logits = np.random.default_rng(0).normal(size=40_000)
    trace = nc.trace(logits, (Gumbel(5),), step=3)
    draw = view_of(trace)["draw"]
    assert draw["kind"] == "each"
    for entries, contest in ((draw["groups"], trace.draw.groups), (draw["tokens"], trace.draw.tokens)):
        assert len(entries) == MAX_IN_DRAW
        totals = [entry["total"] for entry in entries]
        assert totals == sorted(contest.total_N.tolist(), reverse=True)[:MAX_IN_DRAW]
        assert [entry["won"] for entry in entries] == [True] + [False] * (MAX_IN_DRAW - 1)
        for entry in entries:
            assert entry["score"] + entry["noise"] == pytest.approx(entry["total"])
    group = draw["groups"][0]
    assert group["group"] == trace.token_id // GROUP_SIZE
    assert group["first_id"] <= trace.token_id <= group["last_id"] == group["first_id"] + GROUP_SIZE - 1
    assert (draw["tokens"][0]["id"], draw["tokens"][0]["text"]) == (trace.token_id, name(trace.token_id))


def test_the_last_group_ends_with_the_vocabulary() -> None:
    draw = view_of(nc.trace(np.zeros(300), (Suppress(tuple(range(260))), Gumbel(5))))["draw"]
    assert [(group["first_id"], group["last_id"]) for group in draw["groups"]] == [(256, 299)]


def test_the_interval_that_holds_the_number_is_that_of_the_token() -> None:
    for seed in range(40):
        draw = view_of(nc.trace(np.random.default_rng(seed).normal(size=300), (TopK(100), Categorical(seed))))["draw"]
        tokens = draw["tokens"]
        assert (draw["kind"], len(tokens)) == ("one", MAX_IN_DRAW)
        [won] = [token for token in tokens if token["won"]]
        assert won["low"] < draw["u"] <= won["high"]
        assert tokens[0]["low"] == 0.0
        assert all(one["high"] == pytest.approx(other["low"]) for one, other in pairwise(tokens[:-1]))


def test_a_greedy_draw_shows_scores() -> None:
    draw = view_of(nc.trace([1.0, 3.0, 3.0, 0.0], (Greedy(),)))["draw"]
    assert draw["kind"] == "none"
    assert draw["tokens"] == [
        {"id": 1, "text": "<1>", "score": 0.0, "won": True},
        {"id": 2, "text": "<2>", "score": 0.0, "won": False},
        {"id": 0, "text": "<0>", "score": -2.0, "won": False},
        {"id": 3, "text": "<3>", "score": -3.0, "won": False},
    ]


def test_a_secret_key_shows_nothing_of_the_draw() -> None:
    key = nc.watermark.WatermarkKey(b"y" * 16)
    for output in ([], [1, 2, 3, 4, 5]):
        trace = nc.trace(np.zeros(300), (GumbelWatermark(seed=1, key=key),), output_ids=output)
        view = view_of(trace)
        check(trace, view)
        assert view["draw"] == {"kind": "hidden"}
        assert {*view["stages"][1]["reasons"].values()} == {"another token was selected"}
        assert "hidden" in view["stages"][1]["label"]
