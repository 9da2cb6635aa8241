"""Watermarks in LLM and Engine: the same tokens everywhere, with every other feature, and found by the detector."""

from __future__ import annotations

import re

import numpy as np
import pytest
from toy_requests import drive, tokens_of

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stages import (
    Categorical,
    Greedy,
    Gumbel,
    GumbelWatermark,
    Kgw,
    LogitBias,
    Logprobs,
    Repetition,
    SynthId,
    Temperature,
    TopP,
)
from nucleate.watermark import KINDS, WatermarkKey, detect, with_watermark

KEY = WatermarkKey(b"0123456789abcdef")
PROMPT = "Once upon a time"
REPEATS = "The dog ran to the big tree. The dog ran to the big tree. The dog ran to"
MARKS = {
    "kgw": Kgw(key=KEY),
    "kgw(context=3, self_hash=True)": Kgw(context=3, self_hash=True, key=KEY),
    "gumbel": GumbelWatermark(key=KEY),
    "synthid": SynthId(key=KEY),
}
ALL = pytest.mark.parametrize("kind", MARKS)


@pytest.fixture
def engine_of(llm):
    """Runs prompts with a watermark: token ids of the outputs of each."""

    def run(prompts, params, **options):
        engine = llm.new_engine(**options)
        given = params if isinstance(params, list) else [params] * len(prompts)
        requests = [nc.Request(llm.encode(prompt), one) for prompt, one in zip(prompts, given, strict=True)]
        found = drive(engine, requests)
        assert engine.stats.num_preemptions or "kv_cache_memory" not in options
        return [[tokens_of(events, n) for n in range(one.n)] for events, one in zip(found, given, strict=True)]

    return run


@pytest.mark.slow
@ALL
def test_outputs_carry_the_watermark(llm, engine_of, kind):
    params = nc.SamplingParams(temperature=1.0, seed=5, max_tokens=120, ignore_eos=True)
    marked, plain = (engine_of([PROMPT], params, watermark=mark)[0][0] for mark in (MARKS[kind], None))
    assert detect(marked, KEY, kind).p_value < 1e-3 < detect(plain, KEY, kind).p_value
    assert detect(marked, WatermarkKey(b"another key of 16 bytes"), kind).p_value > 1e-3


@pytest.mark.slow
@ALL
def test_the_same_tokens_in_every_batch_with_drafts_and_preemption(engine_of, kind):
    several = [
        nc.SamplingParams(temperature=0.8, seed=seed, max_tokens=30, ignore_eos=True, repetition_penalty=1 + seed / 10)
        for seed in range(3)
    ]
    mark = {"watermark": MARKS[kind]}
    alone = [engine_of([REPEATS], one, **mark)[0] for one in several]
    assert engine_of([REPEATS] * 3, several, **mark) == alone
    for method in ("ngram", "suffix"):
        drafts = nc.Speculation(method, adaptive=False)
        assert engine_of([REPEATS] * 3, several, speculative_config=drafts, **mark) == alone
    params = nc.SamplingParams(temperature=0.8, seed=0, n=3, max_tokens=30, ignore_eos=True)
    siblings = [engine_of([REPEATS], params.replace(seed=seed, n=1), **mark)[0][0] for seed in range(3)]
    assert engine_of([REPEATS], params, **mark)[0] == siblings
    assert engine_of([REPEATS] * 3, several, max_model_len=96, kv_cache_memory=450_000, **mark) == alone


@pytest.mark.slow
def test_rejection_sampling_keeps_the_watermark(engine_of):
    """A keyed draw is not replaced by rejection sampling; KGW and SynthID are part of the target distribution."""
    params = nc.SamplingParams(temperature=0.8, seed=1, max_tokens=120, ignore_eos=True)
    drafts = nc.Speculation("ngram", adaptive=False, acceptance_rule="rejection")
    for kind, mark in MARKS.items():
        ids = engine_of([REPEATS], params, watermark=mark, speculative_config=drafts)[0][0]
        assert detect(ids, KEY, kind).p_value < 1e-2
        if kind == "gumbel":
            assert ids == engine_of([REPEATS], params, watermark=mark)[0][0]


def test_drafts_do_not_change_the_tokens(engine_of):
    params = nc.SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True)
    for mark in (MARKS["kgw"], MARKS["gumbel"]):
        plain = engine_of([REPEATS], params, watermark=mark)
        assert engine_of([REPEATS], params, watermark=mark, speculative_config="ngram") == plain


@ALL
def test_structured_output_stays_valid(llm, engine_of, kind):
    params = nc.SamplingParams(seed=2, structured_outputs={"regex": "[a-z]{3,5}( [a-z]{3,5}){12}!"}, temperature=0.7)
    ids = engine_of([PROMPT], params, watermark=MARKS[kind])[0][0]
    assert re.fullmatch("[a-z]{3,5}( [a-z]{3,5}){12}!", llm.tokenizer.decode(ids))


def test_a_watermark_is_added_to_any_pipeline():
    raw, seeded = Logprobs(2), GumbelWatermark(seed=3, key=KEY)
    shifts = (LogitBias({1: 2.0}), Repetition(1.2))
    for mark, given, expected in [
        (MARKS["kgw"], (raw, *shifts, TopP(0.5), Gumbel(3)), (raw, MARKS["kgw"], *shifts, TopP(0.5), Gumbel(3))),
        (MARKS["kgw"], (Kgw(delta=100.0, key=KEY), Greedy()), (MARKS["kgw"], Greedy())),
        (MARKS["synthid"], (TopP(0.5), raw, Gumbel(3)), (TopP(0.5), MARKS["synthid"], raw, Gumbel(3))),
        (MARKS["synthid"], (raw, Gumbel(3)), (raw, MARKS["synthid"], Gumbel(3))),
        (MARKS["gumbel"], (Temperature(0.5), Gumbel(3)), (Temperature(0.5), seeded)),
        (MARKS["gumbel"], (Categorical(3),), (seeded,)),
        (MARKS["gumbel"], (Greedy(),), (Greedy(),)),
        (MARKS["synthid"], (seeded,), (MARKS["synthid"], Gumbel(3))),
        (None, (Gumbel(3),), (Gumbel(3),)),
    ]:
        assert with_watermark(given, mark) == expected


def test_only_watermarks_are_accepted(llm):
    for watermark in ("kgw", Gumbel(), Temperature(0.5)):
        with pytest.raises(ParameterError, match="watermark must be a stage of Kgw"):
            llm.new_engine(watermark=watermark)
    assert set(KINDS.values()) == {Kgw, GumbelWatermark, SynthId}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gumbel", "synthid"])
def test_one_sequence_of_choices_follows_the_distribution_of_the_model(kind):
    """Over random keys, the sampled token has the distribution without a watermark."""
    logits = np.log(np.array([[0.5, 0.25, 0.15, 0.1]], np.float32))
    counts = np.zeros(4)
    for number in range(2000):
        key = WatermarkKey(number.to_bytes(16, "little"))
        stages = (GumbelWatermark(context=1, seed=1, key=key),)
        if kind == "synthid":
            stages = SynthId(context=1, key=key), Gumbel(number)
        counts[nc.sample(logits, stages, output_ids=[[3]], backend="reference")[0]] += 1
    expected = 2000 * np.array([0.5, 0.25, 0.15, 0.1])
    assert ((counts - expected) ** 2 / expected).sum() < 21  # 1e-4 for 3 degrees of freedom
