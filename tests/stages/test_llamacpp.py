"""llama.cpp's own numbers. Where it means something else, the reason is beside the vector, and ours is tested."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import nucleate as nc
from nucleate.backends import reference
from nucleate.core.stage import Stage
from nucleate.stages import Frequency, Gumbel, MinP, Presence, Repetition, Temperature, TopK, TopNSigma, TopP

FACTS = json.loads((Path(__file__).parents[1] / "data" / "llamacpp.json").read_text("utf-8"))
SINGLE = [vector for vector in FACTS["vectors"] if vector["sampler"] not in ("queue", "penalties")]
PENALTIES = [vector for vector in FACTS["vectors"] if vector["sampler"] == "penalties"]
QUEUES = [vector for vector in FACTS["vectors"] if vector["sampler"] == "queue"]


def top_p(p: float) -> Stage:
    """llama.cpp's top_p = 0 keeps one token. Ours must be above 0: zero mass is not what is meant, top_k = 1 is."""
    if p == 0:
        with pytest.raises(nc.ParameterError, match="top_p must be a number > 0 and <= 1, got 0"):
            TopP(p)
    return TopP(p or 5e-324)


def min_p(p: float) -> Stage:
    """llama.cpp takes min_p above 1 and keeps the best token then. Ours is a part of the best, so at most 1."""
    if p > 1:
        with pytest.raises(nc.ParameterError, match=r"min_p must be a number >= 0 and <= 1, got 1\.05"):
            MinP(p)
    return MinP(min(p, 1.0))


STAGES = {
    "temp": lambda step: Temperature(step["temp"]),
    "temp_ext": lambda step: Temperature(step["temp"]),  # with delta 0 it is the plain one
    "top_k": lambda step: TopK(step["k"]),
    "top_n_sigma": lambda step: TopNSigma(step["n"]),
    "top_p": lambda step: top_p(step["p"]),
    "min_p": lambda step: min_p(step["p"]),
}


def test_no_vector_is_lost():
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
    }


@pytest.mark.parametrize("vector", SINGLE, ids=lambda v: f"{v['sampler']}-{next(iter(v['params'].values()))}")
def test_one_sampler(vector):
    assert vector["then_softmax"]
    assert not vector["params"].get("delta")
    logits = np.log(np.array([vector["probs_in"]], np.float32))
    p = nc.probabilities(logits, (STAGES[vector["sampler"]](vector["params"]),))[0]
    # The inputs all differ, so in ascending order the probabilities tell the tokens; dropped ones are 0 in ours.
    expected = sorted(vector["probs_out"])
    assert sorted(p) == pytest.approx([0.0] * (len(p) - len(expected)) + expected, abs=vector["tol"])
    assert (np.argsort(p, kind="stable") == np.argsort(logits[0], kind="stable")).all()


def parts(kind: type[Stage], value: float) -> list[Stage]:
    """llama.cpp takes any penalty; ours end at 2, as OpenAI's do. Penalties add up, so several make a larger one."""
    if value > 2:
        with pytest.raises(nc.ParameterError, match="must be a number >= -2 and <= 2, got 5"):
            kind(value)
    return [kind(min(2.0, value - 2 * i)) for i in range(3) if value > 2 * i]


@pytest.mark.parametrize("vector", PENALTIES, ids=lambda v: f"{v['params']['history']}-{v['params']['repeat']}")
def test_penalties(vector):
    params = vector["params"]
    # llama.cpp counts over the last n tokens of prompt and output. Ours have no window, and two count the output only.
    assert params["last_n"] == len(params["history"])
    stages = (
        Repetition(params["repeat"]),
        *parts(Frequency, params["freq"]),
        *parts(Presence, params["presence"]),
    )
    logits = np.log(np.array([vector["probs_in"]], np.float32))
    p = nc.probabilities(logits, stages, output_ids=[params["history"]])[0]
    assert p == pytest.approx(vector["probs_out"], abs=vector["tol"])
    in_prompt = nc.probabilities(logits, stages, prompt_ids=[params["history"]])[0]
    changed = in_prompt != pytest.approx(vector["probs_in"], abs=vector["tol"])
    assert changed == (params["repeat"] != 1)


@pytest.mark.parametrize(
    "vector", QUEUES, ids=lambda v: "-".join(f"{s['sampler']}{s.get('k', s.get('p'))}" for s in v["steps"])
)
def test_queue(vector):
    with np.errstate(divide="ignore"):
        logits = np.log(np.arange(vector["n_vocab"], dtype=np.float32))
    for count, step in enumerate(vector["steps"], 1):
        stages = tuple(STAGES[each["sampler"]](each) for each in vector["steps"][:count])
        kept = reference.survivors(logits, (*stages, Gumbel(0))).ids_N
        least = max(step["min_id"], 1)  # llama.cpp counts token 0, at -inf, until a cut drops it; ours is never in
        assert kept.tolist() == list(range(step["max_id"], least - 1, -1))
        assert len(kept) == step["size"] - (step["min_id"] == 0)
