"""Hugging Face Transformers' numbers. Where it differs by design, the reason is given, and our result is tested."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import nucleate as nc
from nucleate.sampling import reference
from nucleate.sampling.history import History
from nucleate.sampling.stages import (
    Allowed,
    BadWords,
    Epsilon,
    Gumbel,
    LogitBias,
    Logprobs,
    MinP,
    MinTokens,
    NoRepeatNgram,
    Repetition,
    Suppress,
    Temperature,
    TopH,
    TopK,
    TopP,
    Typical,
)

FACTS = json.loads((Path(__file__).parents[2] / "data" / "transformers.json").read_text("utf-8"))
VECTORS = [vector for vector in FACTS["vectors"] if vector.get("stage") != "log_softmax"]
LOG_SOFTMAX = [vector for vector in FACTS["vectors"] if vector.get("stage") == "log_softmax"]

NO_MIN_KEEP = "Transformers always keeps min_tokens_to_keep tokens; ours keep at least the best one"
TIES = "Transformers keeps every token equal to the k-th, so more than k; ours keep exactly k, the lowest ids first"
DIFFERENT = {  # id: (reason, our surviving tokens per row)
    "topk_1_keep3_uniform": (f"{TIES}; {NO_MIN_KEEP}", [[0]]),
    "topk_ties_at_boundary": (TIES, [[0, 1]]),
    "topp_0_keeps_one": ("its sort may put any of equal tokens first; ours the lowest id", [[3], [1]]),
    "topp_0.9_keep2": (NO_MIN_KEEP, [[7, 8, 9], [9]]),
    "epsilon_keep2": (NO_MIN_KEEP, [[7, 8, 9], [9]]),
    "minp_0.9_keep2": (NO_MIN_KEEP, [[9], [9]]),
    "legacy_topk10_topp0.6_keep4": (NO_MIN_KEEP, [[10, 26], [27]]),
    "typical_0.7_keep2": (NO_MIN_KEEP, [[8, 9], [9]]),
    "badwords": ("it removes bad words that consist of EOS only; ours bans them", [[2], [3]]),
}
PRESET_AGREES = {"topk_ties_at_boundary": "the preset keeps what equals the k-th, as they do"}


def array(rows):
    return np.array([[float(x) for x in row] for row in rows], np.float32)


def stage(name, params, row, history, logits):
    """Our stage for one of theirs, for one row: (stage, number of prompt tokens in the history)."""
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
        case "allowed":  # theirs calls a function per row
            return Allowed(params["allowed"][row])
        case "min_new_tokens":
            return MinTokens(params["min_new_tokens"], params["eos_token_id"])
        case "sequence_bias":  # the bias applies to the last token of a sequence, right after its other tokens
            bias: dict[int, float] = {}
            for ids, value in params["sequence_bias"]:
                if history[len(history) - len(ids) + 1 :] == ids[:-1] and len(ids) <= len(history) + 1:
                    bias[ids[-1]] = bias.get(ids[-1], 0.0) + value
            return LogitBias(bias)
        case "typical_p":
            return Typical(params["typical_p"])
        case "top_h":
            return TopH(params["top_h"])
        case "no_repeat_ngram":
            return NoRepeatNgram(params["ngram_size"])
        case "bad_words":
            return BadWords(params["bad_words_ids"])
        case "forced_eos":  # no equivalent stage: allow only this token in the last step instead
            return Allowed([params["eos_token_id"]] if len(history) == params["max_length"] - 1 else None)
        case "exp_decay":  # no equivalent stage: a bias that grows with the output, and with the score
            start, factor = params["exponential_decay_length_penalty"]
            over = len(history) - params["prompt_len"] - start
            eos, score = params["eos_token_id"], logits[params["eos_token_id"]]
            return LogitBias({eos: abs(score) * (factor**over - 1)} if over > 0 else {})
    raise AssertionError(name)


def preset(stages):
    """The pipeline of an equivalent request, in the order of Transformers."""
    fields, ends = {"order": "hf"}, ()
    for one in stages:
        for attribute, parameter in one.parameters.items():
            if parameter.public and getattr(one, attribute) != parameter.default:
                fields[parameter.name] = getattr(one, attribute)
            if parameter.name == "ends":
                ends = getattr(one, attribute)
    return nc.SamplingParams(**fields).build_pipeline(ends)


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def test_every_vector_is_tested():
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
        "no_repeat_ngram": 3,
        "typical_p": 2,
        "top_h": 2,
        "forced_eos": 2,
        "exp_decay": 2,
        "bad_words": 1,
        "log_softmax": 1,
    }
    assert len({vector["id"] for vector in FACTS["vectors"]}) == len(FACTS["vectors"])
    assert PRESET_AGREES.keys() <= DIFFERENT.keys() <= {vector["id"] for vector in FACTS["vectors"]}


def our_stages(vector, row):
    """(stages, history) for one row of a vector."""
    history = (vector.get("history") or [[]] * len(vector["logits"]))[row]
    pairs = vector.get("stages") or [[vector["stage"], vector["params"]]]
    logits = array(vector["logits"])[row].astype(np.float64)
    stages = tuple(stage(name, params, row, history, logits) for name, params in pairs)
    ignored = max(params.get("prompt_ignore_length", 0) for _, params in pairs)
    prompt = max(params.get("prompt_len", 0) for _, params in pairs)
    # prompt_ignore_length excludes tokens of the prompt from the penalty; ours counts all, so they are not passed
    return stages, History(history[ignored:prompt], history[max(prompt, ignored) :])


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["id"])
def test_a_vector(vector):
    logits, expected = array(vector["logits"]), array(vector["expected"])
    _, different = DIFFERENT.get(vector["id"], ("", None))
    for row in range(len(logits)):
        stages, past = our_stages(vector, row)
        for way, pipeline in ((stages, (*stages, Gumbel(0))), (preset, preset(stages))):
            survivors = reference.survivors(logits[row], pipeline, past)
            p = reference.probabilities(logits[row], pipeline, past)
            if different is not None and not (way is preset and vector["id"] in PRESET_AGREES):
                assert sorted(survivors.ids_N.tolist()) == different[row]
                inside = softmax(np.where(np.isin(np.arange(len(p)), different[row]), logits[row], -np.inf))
                assert p == pytest.approx(inside, abs=1e-6)
                continue
            assert sorted(survivors.ids_N.tolist()) == vector["kept"][row]
            assert p == pytest.approx(softmax(expected[row]), abs=1e-6)
            if "probs" in vector:
                assert p == pytest.approx(array(vector["probs"])[row], abs=1e-6)


@pytest.mark.parametrize("vector", LOG_SOFTMAX, ids=lambda v: v["id"])
def test_logprobs_equal_log_softmax(vector):
    logits, expected = array(vector["logits"]), array(vector["expected"])
    size = logits.shape[1]
    request = nc.SamplingParams(order="hf", logprobs=0, logprob_token_ids=range(size), seed=1)
    for row in range(len(logits)):
        for pipeline in ((Logprobs(0, range(size)), Gumbel(1)), request.build_pipeline()):
            report = reference.run(logits[row], pipeline, 1, 0).logprobs
            assert [one.logprob for one in report.requested] == pytest.approx(expected[row].tolist(), rel=1e-6)


@pytest.mark.parametrize("name", sorted(DIFFERENT))
def test_every_listed_difference_exists(name):
    """Every vector listed above really differs, so that the list cannot hide agreement."""
    [vector] = [vector for vector in FACTS["vectors"] if vector["id"] == name]
    assert DIFFERENT[name][1] != vector["kept"]
