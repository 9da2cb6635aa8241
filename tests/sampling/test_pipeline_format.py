"""Pipelines as stages, JSON and text, alone and in SamplingParams."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.pipeline_format import MAX_STAGES, pipeline_to_json, read_pipeline
from nucleate.sampling.stages import (
    STAGES,
    Categorical,
    Greedy,
    Gumbel,
    LogitBias,
    Logprobs,
    MinP,
    MinTokens,
    Temperature,
    TopK,
    TopP,
    Xtc,
)
from nucleate.sampling.watermark_key import WatermarkKey

STAGE_LISTS = st.lists(
    st.one_of(
        st.floats(0.1, 3).map(Temperature),
        st.integers(0, 50).map(TopK),
        st.floats(0.1, 1).map(TopP),
        st.builds(Xtc, st.floats(0, 1), st.floats(0, 0.5)),
        st.dictionaries(st.integers(0, 99), st.floats(-9, 9), max_size=3).map(LogitBias),
    ),
    min_size=1,
    max_size=6,
)
DRAWS = st.sampled_from([(), (Gumbel(),), (Greedy(),), (Categorical(),), (Gumbel(7),)])


def text_of(stages: tuple[Any, ...]) -> str:
    return " | ".join(
        f"{one['stage']}({', '.join(f'{name}={value!r}' for name, value in one.items() if name != 'stage')})"
        for one in pipeline_to_json(stages)
    )


@pytest.mark.slow
@settings(max_examples=tiers.count(100, 1000))
@given(stages=STAGE_LISTS, draw=DRAWS)
def test_stages_json_and_text_are_equal(stages: list[Any], draw: tuple[Any, ...]) -> None:
    pipeline = (*stages, *draw)
    assert read_pipeline(json.loads(json.dumps(pipeline_to_json(pipeline)))) == pipeline
    assert read_pipeline(text_of(pipeline)) == pipeline == read_pipeline(pipeline)
    params = nc.SamplingParams(pipeline=pipeline, max_tokens=3)
    for copied in (
        nc.SamplingParams.from_json(params.to_json()),
        pickle.loads(pickle.dumps(params)),
        nc.SamplingParams(pipeline=text_of(pipeline), max_tokens=3),
    ):
        assert (copied, hash(copied)) == (params, hash(params))
    logits = np.random.default_rng(len(stages)).normal(size=(1, 100)).astype(np.float32) * 3
    own = pipeline if draw else (*pipeline, Gumbel())
    assert np.array_equal(nc.probabilities(logits, nc.SamplingParams(pipeline=pipeline)), nc.probabilities(logits, own))


def test_text() -> None:
    expected = (Temperature(0.8), TopP(0.9), Gumbel())
    for text in (
        "temperature(0.8) | top_p(0.9) | gumbel",
        "temperature(t=0.8)|top_p(p=0.9)|gumbel()",
        " temperature(temperature=0.8) | top_p(top_p=.9) |\n gumbel ",
    ):
        assert read_pipeline(text) == expected
    assert read_pipeline("logit_bias({5: -1.5}) | xtc(0.5, threshold=0.2)") == (LogitBias({5: -1.5}), Xtc(0.5, 0.2))
    assert read_pipeline("top_k(5)") == (TopK(5),)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("temperature(", "is not of the form"),
        ("temperature(0.8) top_p(0.9)", "is not of the form"),
        ("temperature|" * 3000 + "gumbel", "is not of the form|has 3001 stages"),  # depends on the version of Python
        ("(" * 5000, "is not of the form"),
        ("temperature(0.8) | tpo_p(0.9)", r"pipeline\[1\] unknown stage 'tpo_p'; did you mean top_p"),
        ("temperature(0.8, 2)", r"pipeline\[0\] temperature takes at most 1 parameters, got 2"),
        ("temperature(open('x'))", "temperature has a parameter that is not a literal value"),
        ("temperature(0.8, t=1)", "temperature has t twice"),
        ("nc.temperature(0.8)", "must be the name of a stage"),
        ("top_k(5) & gumbel", "must be the name of a stage"),
        ("top_p(2)", r"pipeline\[0\] top_p: top_p must be a number >= 0 and <= 1, got 2"),
        ("gumbel | temperature(1)", r"pipeline\[0\] gumbel is a draw, which must be the last stage"),
        ("top_k(5) | " * MAX_STAGES + "gumbel", f"has {MAX_STAGES + 1} stages; at most {MAX_STAGES}"),
        ("", "is not of the form"),
        ([], "pipeline has no stage"),
        ([3], r"pipeline\[0\] must be a stage, or an object with the name of a stage, got 3"),
        ([{"t": 1}], r"pipeline\[0\] must be a stage"),
        ([{"stage": "temperature"}, {"stage": "top_k", "kk": 1}], r"pipeline\[1\] unknown parameter of top_k 'kk'"),
        ([{"stage": "temperature", "t": 1, "temperature": 2}], "temperature has t twice"),
        ([{"stage": "temperature", "t": "1"}], "temperature: temperature must be a number"),
        ([{"stage": "mask"}], "mask comes with each step"),
        ([Logprobs(1), Logprobs(2)], "more than one Tap"),
        (5, "pipeline must be a tuple of stages, a list of objects"),
        ({"stage": "top_k"}, "pipeline must be a tuple of stages, a list of objects"),
    ],
)
def test_invalid_pipelines(value: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        nc.SamplingParams(pipeline=value)
    assert caught.value.field == "pipeline"
    assert len(str(caught.value)) < 500


def test_a_pipeline_replaces_the_fields_of_stages() -> None:
    pipeline = (TopP(0.9), MinP(0.1))
    for name, value in {"temperature": 0.5, "top_k": 3, "order": "vllm", "draw": "greedy", "bad_words": ["a"]}.items():
        with pytest.raises(ParameterError, match=f"{name} cannot be set with pipeline") as caught:
            nc.SamplingParams(pipeline=pipeline, **{name: value})
        assert caught.value.field == name
    with pytest.raises(ParameterError, match="set only one"):
        nc.SamplingParams(pipeline=(Logprobs(2), TopK(3)), logprobs=1)


def test_other_fields_combine_with_a_pipeline() -> None:
    params = nc.SamplingParams(pipeline=(Temperature(0.5),), min_tokens=2, seed=5, logprobs=3, stop=["x"], max_tokens=9)
    assert params.build_pipeline((7,)) == (Logprobs(3), MinTokens(2, (7,)), Temperature(0.5), Gumbel(5))
    assert nc.SamplingParams(pipeline=(MinTokens(3),)).build_pipeline((7, 8))[0] == MinTokens(3, (7, 8))
    processed = params.replace(logprobs_mode="processed").build_pipeline((7,))
    assert isinstance(processed[-2], Logprobs)


def test_the_seed_of_the_draw() -> None:
    params = nc.SamplingParams(pipeline=(TopK(5), Categorical(9)))
    assert params.seed == 9
    assert params.build_pipeline()[-1] == Categorical(9)
    assert params.replace(seed=4).build_pipeline()[-1] == Categorical(4)
    assert nc.SamplingParams(pipeline=(TopK(5), Categorical()), seed=9) == params
    with pytest.raises(ParameterError, match="seed is 3, but the pipeline has 9: set only one"):
        nc.SamplingParams(pipeline=(TopK(5), Gumbel(9)), seed=3)
    assert nc.SamplingParams(pipeline=(TopK(5), Greedy()), seed=3).build_pipeline()[-1] == Greedy()


def test_defaults_that_contradict_a_pipeline_are_dropped() -> None:
    defaults = nc.SamplingParams(temperature=0.7, top_k=5, max_tokens=9)
    assert defaults.override(pipeline="top_p(.5)") == nc.SamplingParams(pipeline=(TopP(0.5),), max_tokens=9)
    piped = nc.SamplingParams(pipeline=(TopP(0.5),), max_tokens=9)
    assert piped.override(temperature=0.3) == nc.SamplingParams(temperature=0.3, max_tokens=9)
    assert piped.override(max_tokens=5).pipeline == (TopP(0.5),)


def test_every_stage_can_be_named() -> None:
    key = {"key": WatermarkKey(b"a key of the tests")}
    examples = {"logprobs": {"n": 2}, "mask": None, "kgw": key, "synthid": key, "gumbel_watermark": key}
    for name, kind in STAGES.items():
        values = examples.get(name, {})
        if values is not None:
            assert read_pipeline([{"stage": name, **values}]) == (kind(**values),)
