"""Hugging Face transformers' numbers. Where it means something else, the reason is beside it, and ours is tested."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import nucleate as nc
from nucleate.backends import reference
from nucleate.core.stage import History
from nucleate.stages import Allowed, Epsilon, LogitBias, MinP, MinTokens, Repetition, Suppress, Temperature, TopK, TopP

FACTS = json.loads((Path(__file__).parents[1] / "data" / "transformers.json").read_text("utf-8"))

NO_MIN_KEEP = "transformers keeps min_tokens_to_keep tokens whatever the cut says; ours keep the best one only"
TIES = "transformers keeps every token equal to the k-th, so more than k; ours keep exactly k, the lowest ids first"
DIFFERENT = {  # id: (why, the tokens ours keep, per row)
    "topk_1_keep3_uniform": (f"{TIES}; {NO_MIN_KEEP}", [[0]]),
    "topk_ties_at_boundary": (TIES, [[0, 1]]),
    "topp_0_keeps_one": ("of equal tokens its sort puts any first; ours the lowest id", [[3], [1]]),
    "topp_0.9_keep2": (NO_MIN_KEEP, [[7, 8, 9], [9]]),
    "epsilon_keep2": (NO_MIN_KEEP, [[7, 8, 9], [9]]),
    "minp_0.9_keep2": (NO_MIN_KEEP, [[9], [9]]),
    "legacy_topk10_topp0.6_keep4": (NO_MIN_KEEP, [[10, 26], [27]]),
}


def array(rows):
    return np.array([[float(x) for x in row] for row in rows], np.float32)


def stage(name, params, row, history):
    """Ours for one of theirs, for one row: (stage, how many tokens of the history are its prompt)."""
    match name:
        case "temperature":
            return Temperature(params["temperature"])
        case "repetition_penalty":
            return Repetition(params["repetition_penalty"])
        case "top_k":
            return TopK(params["top_k"])
        case "top_p":
            return TopP(params["top_p"] or 5e-324)  # 0 keeps one token there; ours must be above 0
        case "min_p":
            return MinP(params["min_p"])
        case "epsilon":
            return Epsilon(params["epsilon"])
        case "suppress":
            return Suppress(params["suppress_tokens"])
        case "allowed":  # theirs asks a function per row
            return Allowed(params["allowed"][row])
        case "min_new_tokens":
            return MinTokens(params["min_new_tokens"], params["eos_token_id"])
        case "sequence_bias":  # the bias of a sequence is that of its last token, once the others have just been said
            bias: dict[int, float] = {}
            for ids, value in params["sequence_bias"]:
                if history[len(history) - len(ids) + 1 :] == ids[:-1] and len(ids) <= len(history) + 1:
                    bias[ids[-1]] = bias.get(ids[-1], 0.0) + value
            return LogitBias(bias)
    raise AssertionError(name)


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def test_no_vector_is_lost():
    kinds = Counter(vector.get("stage", vector["kind"]) for vector in FACTS["vectors"])
    assert kinds == {
        "top_p": 7,
        "min_p": 6,
        "top_k": 5,
        "repetition_penalty": 5,
        "chain": 5,
        "epsilon": 3,
        "min_new_tokens": 2,
        "temperature": 1,
        "sequence_bias": 1,
        "allowed": 1,
        "suppress": 1,
    }
    assert len({vector["id"] for vector in FACTS["vectors"]}) == len(FACTS["vectors"])
    assert DIFFERENT.keys() <= {vector["id"] for vector in FACTS["vectors"]}


@pytest.mark.parametrize("vector", FACTS["vectors"], ids=lambda v: v["id"])
def test_vector(vector):
    logits, expected = array(vector["logits"]), array(vector["expected"])
    _, ours = DIFFERENT.get(vector["id"], ("", vector["kept"]))
    for row in range(len(logits)):
        history = (vector.get("history") or [[]] * len(logits))[row]
        pairs = vector.get("stages") or [[vector["stage"], vector["params"]]]
        stages = tuple(stage(name, params, row, history) for name, params in pairs)
        ignored = max(params.get("prompt_ignore_length", 0) for _, params in pairs)
        prompt = max(params.get("prompt_len", 0) for _, params in pairs)
        # prompt_ignore_length leaves tokens of the prompt out of the penalty; ours counts all, so they are not given
        seen = History(history[ignored:prompt], history[max(prompt, ignored) :])
        kept = reference.survivors(logits[row], stages, seen)
        p = reference.probabilities(logits[row], stages, seen)
        if vector["id"] in DIFFERENT:
            assert sorted(kept.ids_N.tolist()) == ours[row]
            inside = softmax(np.where(np.isin(np.arange(len(p)), ours[row]), logits[row], -np.inf))
            assert p == pytest.approx(inside, abs=1e-6)
            continue
        assert sorted(kept.ids_N.tolist()) == vector["kept"][row]
        assert p == pytest.approx(softmax(expected[row]), abs=1e-6)
        if "probs" in vector:
            assert p == pytest.approx(array(vector["probs"])[row], abs=1e-6)


def test_every_difference_is_one():
    """A vector named above really differs, so that the list cannot hide agreement."""
    for vector in FACTS["vectors"]:
        if vector["id"] in DIFFERENT:
            logits = array(vector["logits"])
            pairs = vector.get("stages") or [[vector["stage"], vector["params"]]]
            stages = tuple(stage(name, params, 0, []) for name, params in pairs)
            kept = [sorted(reference.survivors(row, stages).ids_N.tolist()) for row in logits]
            assert kept != vector["kept"], vector["id"]


def test_top_p_of_zero_is_refused():
    with pytest.raises(nc.ParameterError, match="top_p must be a number > 0 and <= 1, got 0"):
        TopP(0)
