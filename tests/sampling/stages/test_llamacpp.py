"""llama.cpp's own numbers. Where it differs by design, the reason is next to the vector, and our result is tested."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import nucleate as nc
from nucleate.sampling import reference
from nucleate.sampling.history import History
from nucleate.sampling.stage import Stage
from nucleate.sampling.stages import (
    Dry,
    Frequency,
    Gumbel,
    MinP,
    Presence,
    Repetition,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    Typical,
    Xtc,
)

FACTS = json.loads((Path(__file__).parents[2] / "data" / "llamacpp.json").read_text("utf-8"))
HISTORIES = ("penalties", "dry")
SINGLE = [vector for vector in FACTS["vectors"] if vector["sampler"] not in ("queue", "xtc", *HISTORIES)]
XTC = [vector for vector in FACTS["vectors"] if vector["sampler"] == "xtc"]
DRY = [vector for vector in FACTS["vectors"] if vector["sampler"] == "dry"]
PENALTIES = [vector for vector in FACTS["vectors"] if vector["sampler"] == "penalties"]
QUEUES = [vector for vector in FACTS["vectors"] if vector["sampler"] == "queue"]


def min_p(p: float) -> Stage:
    """llama.cpp accepts min_p above 1 and keeps the best token. Ours is relative to the best token, so at most 1."""
    if p > 1:
        with pytest.raises(nc.ParameterError, match=r"min_p must be a number >= 0 and <= 1, got 1\.05"):
            MinP(p)
    return MinP(min(p, 1.0))


STAGES = {
    "temp": lambda step: Temperature(step["temp"]),
    "temp_ext": lambda step: Temperature(step["temp"]),  # with delta 0 it is the plain sampler
    "top_k": lambda step: TopK(step["k"]),
    "top_n_sigma": lambda step: TopNSigma(step["n"]),
    "top_p": lambda step: TopP(step["p"]),
    "min_p": lambda step: min_p(step["p"]),
    "typical": lambda step: Typical(step["p"]),
}
FIELDS = {  # the parameters of SamplingParams
    "temp": lambda step: {"temperature": step["temp"]},
    "temp_ext": lambda step: {"temperature": step["temp"]},
    "top_k": lambda step: {"top_k": step["k"]},
    "top_n_sigma": lambda step: {"top_n_sigma": step["n"]},
    "top_p": lambda step: {"top_p": step["p"] or 5e-324},
    "min_p": lambda step: {"min_p": min(step["p"], 1.0)},
    "typical": lambda step: {"typical_p": step["p"]},
}


def test_every_vector_is_tested():
    counts = Counter(vector["sampler"] for vector in FACTS["vectors"])
    assert counts == {
        "queue": 24,
        "min_p": 9,
        "penalties": 6,
        "top_k": 4,
        "top_p": 4,
        "temp": 2,
        "temp_ext": 2,
        "top_n_sigma": 3,
        "typical": 2,
        "xtc": 4,
        "dry": 5,
    }


@pytest.mark.parametrize("vector", SINGLE, ids=lambda v: f"{v['sampler']}-{next(iter(v['params'].values()))}")
def test_single_samplers(vector):
    assert vector["then_softmax"] == (vector["sampler"] != "typical")
    assert not vector["params"].get("delta")
    logits = np.log(np.array([vector["probs_in"]], np.float32))
    expected = np.array(vector["probs_out"])
    expected /= expected.sum()  # where they ran no softmax, the numbers are those before the truncation
    chain = (STAGES[vector["sampler"]](vector["params"]),)
    for params in (chain, nc.SamplingParams(order="llama.cpp", **FIELDS[vector["sampler"]](vector["params"]))):
        p = nc.probabilities(logits, params)[0]
        # Among equal inputs, all or none survive; in ascending order the probabilities identify the tokens.
        assert sorted(p) == pytest.approx([0.0] * (len(p) - len(expected)) + sorted(expected), abs=vector["tol"])
        order = range(len(p)) if vector["sampler"] != "typical" else np.flatnonzero(p)
        assert (np.argsort(p[order], kind="stable") == np.argsort(logits[0][order], kind="stable")).all()


@pytest.mark.parametrize("vector", XTC, ids=lambda v: str(v["params"]["threshold"]))
def test_xtc(vector):
    params = vector["params"]
    logits = np.log(np.array(vector["probs_in"], np.float32))
    fields = {"xtc_probability": params["probability"], "xtc_threshold": params["threshold"]}
    preset = nc.SamplingParams(order="llama.cpp", **fields)
    # the inputs descend, so the first ones are removed
    num_removed = len(vector["probs_in"]) - len(vector["probs_out"])
    assert vector["probs_out"] == vector["probs_in"][num_removed:]
    for stages in ((Xtc(params["probability"], params["threshold"]), Gumbel(0)), preset.build_pipeline()):
        # Their random number comes from a Mersenne Twister, ours from Philox: both outcomes are tested.
        assert reference.survivors(logits, stages, u=0.98).ids_N.tolist() == list(range(num_removed, len(logits)))
        assert reference.survivors(logits, stages, u=0.991).ids_N.tolist() == list(range(len(logits)))
        p = nc.probabilities(logits[None], stages)[0]
        survivors = np.array([0.0] * num_removed + vector["probs_out"])
        mixed = 0.99 * survivors / survivors.sum() + 0.01 * np.array(vector["probs_in"])
        assert p == pytest.approx(mixed, abs=vector["tol"])


@pytest.mark.parametrize("vector", DRY, ids=lambda v: f"{v['params']['history']}-{v['params']['multiplier']}")
def test_dry(vector):
    params, size = vector["params"], len(vector["probs_in"])
    logits = np.log(np.array([vector["probs_in"]], np.float32))
    names = {"multiplier": "multiplier", "base": "base", "allowed_length": "allowed_length", "last_n": "penalty_last_n"}
    values = {attribute: params[their_name] for attribute, their_name in names.items()} | {
        "breakers": params["seq_breakers"]
    }
    fields = {Dry.parameters[attribute].name: value for attribute, value in values.items()}
    history = params["history"]
    for stages in ((Dry(**values), Gumbel(0)), nc.SamplingParams(order="llama.cpp", **fields)):
        for cut in range(len(history) + 1):  # the split into prompt and output makes no difference
            p = nc.probabilities(logits, stages, prompt_ids=[history[:cut]], output_ids=[history[cut:]])[0]
            assert p == pytest.approx(vector["probs_out"], abs=vector["tol"])
    if params["seq_breakers"]:  # without breakers the last two tokens are a repeat, so they have an effect
        free = Dry(**{**values, "breakers": ()})
        assert nc.probabilities(logits, (free,), prompt_ids=[history])[0] != pytest.approx(1 / size, abs=vector["tol"])


def parts(kind: type[Stage], value: float, last_n: int) -> list[Stage]:
    """Split a large penalty into stages: llama.cpp accepts any, ours end at 2 as OpenAI's do, and penalties add up."""
    if value > 2:
        with pytest.raises(nc.ParameterError, match="must be a number >= -2 and <= 2, got 5"):
            kind(value)
    return [kind(min(2.0, value - 2 * i), last_n) for i in range(3) if value > 2 * i]


@pytest.mark.parametrize("vector", PENALTIES, ids=lambda v: f"{v['params']['history']}-{v['params']['repeat']}")
def test_penalties(vector):
    params, history = vector["params"], vector["params"]["history"]
    assert params["last_n"] == len(history)
    stages = (
        Repetition(params["repeat"], params["last_n"]),
        *parts(Frequency, params["freq"], params["last_n"]),
        *parts(Presence, params["presence"], params["last_n"]),
    )
    logits = np.log(np.array([vector["probs_in"]], np.float32))
    ways = [stages]
    if params["freq"] <= 2:  # the preset has one stage of each kind; its window is 64 by default
        fields = {"order": "llama.cpp", "repetition_penalty": params["repeat"]}
        ways += [nc.SamplingParams(**fields), nc.SamplingParams(**fields, penalty_last_n=params["last_n"])]
    for way in ways:
        for cut in range(len(history) + 1):
            p = nc.probabilities(logits, way, prompt_ids=[history[:cut]], output_ids=[history[cut:]])[0]
            assert p == pytest.approx(vector["probs_out"], abs=vector["tol"])
    # tokens before the window are ignored
    early = [[4 if len(logits[0]) > 4 else 0]]
    p = nc.probabilities(logits, stages, prompt_ids=early, output_ids=[history])[0]
    assert p == pytest.approx(vector["probs_out"], abs=vector["tol"])
    # without a window two of the three count the output only
    free = tuple(type(stage)(*(getattr(stage, a) for a in list(stage.parameters)[:1])) for stage in stages)
    changed = nc.probabilities(logits, free, prompt_ids=[history])[0] != pytest.approx(vector["probs_in"], abs=1e-5)
    assert changed == (params["repeat"] != 1)


def test_the_preset_penalizes_only_the_last_64_tokens():
    logits = np.zeros(5, np.float32)
    fields = {"repetition_penalty": 2.0, "frequency_penalty": 1.0, "presence_penalty": 1.0}
    stages = nc.SamplingParams(order="llama.cpp", **fields).build_pipeline()
    history = [3] + [4] * 63
    near = reference.survivors(logits, stages, History(history[:9], history[9:]))
    assert dict(zip(near.ids_N.tolist(), near.x_N.tolist(), strict=True)) == {0: 0, 1: 0, 2: 0, 3: -2.0, 4: -64.0}
    far = reference.survivors(logits, stages, History([*history[:9], 4], history[9:]))
    assert dict(zip(far.ids_N.tolist(), far.x_N.tolist(), strict=True)) == {0: 0, 1: 0, 2: 0, 3: 0, 4: -65.0}


THEIR_ORDER = ("top_k", "top_p", "min_p")


@pytest.mark.parametrize(
    "vector", QUEUES, ids=lambda v: "-".join(f"{s['sampler']}{s.get('k', s.get('p'))}" for s in v["steps"])
)
def test_sampler_chains(vector):
    with np.errstate(divide="ignore"):
        logits = np.log(np.arange(vector["n_vocab"], dtype=np.float32))
    for count, step in enumerate(vector["steps"], 1):
        steps = vector["steps"][:count]
        names = tuple(each["sampler"] for each in steps)
        fields = {name: value for each in steps for name, value in FIELDS[each["sampler"]](each).items()}
        in_order = list(names) == sorted(names, key=THEIR_ORDER.index)
        orders = [names, "llama.cpp"] if in_order else [names]  # a custom order for the others
        ways = [(*(STAGES[each["sampler"]](each) for each in steps), Gumbel(0))]
        ways += [nc.SamplingParams(order=order, **fields).build_pipeline() for order in orders]
        for stages in ways:
            surviving_ids = reference.survivors(logits, stages).ids_N
            # llama.cpp counts token 0, at -inf, until a truncation drops it; ours never counts it
            least = max(step["min_id"], 1)
            assert surviving_ids.tolist() == list(range(step["max_id"], least - 1, -1))
            assert len(surviving_ids) == step["size"] - (step["min_id"] == 0)
