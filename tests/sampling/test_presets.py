"""Stage orders: ours, other engines' and custom ones. Presets are checked against numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from stage_examples import on

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.presets import stages_in, with_mask, without_mask
from nucleate.sampling.stages import STAGES, Greedy, Gumbel, Mask, TopK, Xtc

LOGITS = np.log([[0.4, 0.3, 0.2, 0.1]])


def surviving(logits=LOGITS, prompt=(), output=(), **params):
    """The surviving ids, and all probabilities."""
    p = nc.probabilities(logits, nc.SamplingParams(**params), prompt_ids=[prompt], output_ids=[output])[0]
    return np.flatnonzero(p).tolist(), p


# ---- defaults of the presets


@pytest.mark.parametrize("order", nc.PRESETS)
def test_a_request_without_stages_has_only_the_presets_defaults(order):
    always = {"akunu": (TopK(256),)}.get(order, ())
    assert nc.SamplingParams(order=order).build_pipeline() == (*always, Gumbel())


def test_the_window_of_llama_cpp_in_numbers():
    logits = np.zeros((1, 3))
    prompt, output = [0] * 3 + [1] * 62, [2, 2]  # the last 64: 62 times 1, twice 2
    _, p = surviving(logits, prompt, output, order="llama.cpp", frequency_penalty=0.5)
    assert p == pytest.approx(np.array([1, np.exp(-31), np.exp(-1)]) / (1 + np.exp(-31) + np.exp(-1)))
    _, p = surviving(logits, prompt, output, frequency_penalty=0.5)  # ours counts the output only
    assert p == pytest.approx(np.array([1, 1, np.exp(-1)]) / (2 + np.exp(-1)))


def test_hf_top_k_keeps_ties():
    logits = np.array([[3.0, 2.0, 2.0, 2.0, 1.0]])
    assert surviving(logits, top_k=2)[0] == [0, 1]
    assert surviving(logits, top_k=2, order="hf")[0] == [0, 1, 2, 3]
    assert surviving(logits, top_k=4, order="hf")[0] == [0, 1, 2, 3]
    assert surviving(logits, top_k=5, order="hf")[0] == [0, 1, 2, 3, 4]
    assert surviving(np.zeros((1, 5)), top_k=2, order="hf")[0] == [0, 1, 2, 3, 4]
    assert surviving(np.zeros((1, 5)), top_k=1, order="hf")[0] == [0]  # greedy: ties are not kept


@pytest.mark.parametrize("top_k", [0, -1])
def test_akunu_keeps_256_tokens_when_top_k_is_off(top_k):
    logits = np.random.default_rng(0).normal(size=(1, 1000))
    ids, _ = surviving(logits, order="akunu", top_k=top_k)
    assert ids == sorted(np.argsort(-logits[0])[:256].tolist())
    assert len(surviving(logits, order="akunu", top_k=999)[0]) == 999


@pytest.mark.parametrize(
    ("params", "expected", "expected_akunu"),
    [  # probabilities 0.4, 0.3, 0.2, 0.1
        ({"top_k": 2, "top_p": 0.5}, [0], [0, 1]),  # 0.4 / 0.7 reaches a half, 0.4 does not
        ({"top_k": 2, "top_p": 0.95}, [0, 1], [0, 1]),  # the survivors do not reach 0.95 of the total mass
        ({"top_k": 3, "min_p": 0.6, "top_p": 0.55}, [0], [0, 1]),
        ({"top_p": 0.4}, [0], [0]),
        ({"top_p": 0.41}, [0, 1], [0, 1]),
        ({"temperature": 0.5, "top_k": 2, "top_p": 0.6}, [0], [0, 1]),  # 16/30 of all, 16/25 of the two
        ({"temperature": 0.5, "top_k": 2, "top_p": 0.5}, [0], [0]),
    ],
)
def test_top_p_of_akunu_is_relative_to_all_tokens(params, expected, expected_akunu):
    assert surviving(**params)[0] == expected
    assert surviving(**params, order="akunu")[0] == expected_akunu


def test_hf_applies_top_p_before_min_p_and_typical():
    assert surviving(top_p=0.5, min_p=0.6)[0] == [0]  # min-p keeps 0.4 and 0.3: 4/7 reaches a half
    assert surviving(top_p=0.5, min_p=0.6, order="hf")[0] == [0, 1]
    typical = {"typical_p": 0.2, "top_p": 0.5}
    assert surviving(**typical)[0] == [1]  # of all four, 0.3 is nearest to the entropy
    assert surviving(**typical, order="hf")[0] == [0]  # of 4/7 and 3/7, the first


def test_llama_cpp_truncates_before_the_temperature():
    logits = np.log([[0.5, 0.3, 0.2]])
    assert surviving(logits, min_p=0.5, temperature=2.0)[0] == [0, 1, 2]  # sqrt(0.2 / 0.5) is above a half
    assert surviving(logits, min_p=0.5, temperature=2.0, order="llama.cpp")[0] == [0, 1]


@pytest.mark.slow
def test_vllm_truncates_in_another_order_with_the_same_effect():
    """Min-p depends only on the best token and bans are permanent, so neither depends on what came before it."""
    random = np.random.default_rng(1)
    penalties = dict(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, logit_bias={2: 1.0})
    bans = dict(bad_words=((4, 5),), min_tokens=4, stop_token_ids=(9,), suppress_token_ids=(6,))
    fields = dict(penalties | bans, allowed_token_ids=range(10), temperature=0.8, min_p=0.02)
    for _ in range(50):
        logits = (random.normal(size=(3, 12)) * 3).round(1)
        some = {name: fields[name] for name in random.permutation([*fields])[:7].tolist()}
        top_k, top_p = int(random.integers(2, 9)), float(random.uniform(0.1, 1))
        params = nc.SamplingParams(**some, top_k=top_k, top_p=top_p)
        args = dict(prompt_ids=random.integers(0, 12, (3, 9)), output_ids=random.integers(0, 12, (3, 9)))
        expected = nc.probabilities(logits, params, **args)
        assert (expected == nc.probabilities(logits, params.replace(order="vllm"), **args)).all()


# ---- custom orders


def test_stages_run_in_the_requested_order():
    params = dict(temperature=2.0, top_p=0.65, top_k=2)
    for order in (
        ("top_p", "temperature", "top_k"),
        ("top_k", "top_p", "temperature"),
        ["temperature", "top_p", "top_k"],
    ):
        made = nc.SamplingParams(**params, order=order).build_pipeline()
        assert [stage.name for stage in made] == [*order, "gumbel"]
    logits = np.log([[0.64, 0.25, 0.11]])
    assert surviving(logits, **params, order=["top_p", "temperature", "top_k"])[0] == [0, 1]
    assert surviving(logits, temperature=2.0, top_p=0.6, order=["top_p", "temperature"])[0] == [0]
    # 8/16.3 and 5/16.3
    assert surviving(logits, temperature=2.0, top_p=0.6, order=["temperature", "top_p"])[0] == [0, 1]


def test_unrequested_stages_of_an_order_are_skipped():
    assert nc.SamplingParams(order=["top_k", "dry", "min_p"], min_p=0.5).build_pipeline()[0].name == "min_p"
    assert nc.SamplingParams(order=[]).build_pipeline() == (Gumbel(),)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("vlm", "order must be one of canonical, vllm, hf, llama.cpp, akunu or a list of stage names, got 'vlm'"),
        ("top_k", "order must be one of canonical"),
        ("", "order must be one of canonical"),
        (["topk"], "unknown stage in order 'topk'; did you mean top_k"),
        (["top_k", "hf"], "unknown stage in order 'hf'"),
        (["x" * 5000], "unknown stage in order 'xxxx"),
        (["top_k", "min_p", "top_k"], "order has top_k twice"),
        (["top_k", "gumbel"], "order does not name gumbel: the draw is last, logprobs_mode places logprobs, and"),
        (["greedy"], "order does not name greedy"),
        (["top_k", "guidance"], "order does not name guidance: it is always first"),
        (["top_k", "mask"], "order does not name mask"),
        (["logprobs", "top_k"], "order does not name logprobs"),
        ([5], "order must be one of"),
        (["top_k", ""], "order must be one of"),
        ({"top_k": 1}, "order must be one of"),
    ],
)
def test_an_invalid_order_is_an_error_that_names_it(order, words):
    with pytest.raises(ParameterError, match=words) as caught:
        nc.SamplingParams(order=order)
    assert caught.value.field == "order"
    assert len(str(caught.value)) < 700


def test_a_stage_that_is_not_in_the_order_is_rejected_everywhere():
    with pytest.raises(ParameterError, match=r"order \('top_k',\) does not include temperature") as caught:
        nc.SamplingParams(order=["top_k"], temperature=0.5)
    assert caught.value.field == "order"
    with pytest.raises(ParameterError, match="does not include min_p"):
        nc.SamplingParams(order=["top_k"]).replace(min_p=0.5)
    with pytest.raises(ParameterError, match="does not include top_a"):
        nc.SamplingParams(top_a=0.5).replace(order="vllm")
    assert nc.SamplingParams(order="vllm", dry_base=2.0).build_pipeline() == (Gumbel(),)  # it requests no penalty


# ---- draws


def test_greedy_ignores_xtc():
    params = nc.SamplingParams(draw="greedy", xtc_probability=0.5, xtc_threshold=0.1)
    assert {int(nc.sample(LOGITS, params)[0]) for _ in range(30)} == {0}
    assert params.build_pipeline() == (Greedy(),)
    assert Xtc(0.5) in params.replace(draw="gumbel").build_pipeline()


# ---- the mask


def test_a_mask_precedes_stages_that_depend_on_the_row():
    assert with_mask((TopK(2), Gumbel())) == (Mask(), TopK(2), Gumbel())
    for order in nc.PRESETS:
        stages = (*(on(STAGES[name])[0] for name in stages_in(order)), Gumbel())
        masked = with_mask(stages)
        place = masked.index(Mask())
        assert without_mask(masked) == stages
        assert with_mask(masked) == masked
        assert all(stage.touches for stage in masked[:place])
        assert not hasattr(masked[place + 1], "touches")
