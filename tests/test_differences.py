"""What docs/differences.md says about values that nucleate refuses, or accepts where other engines do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.server.limits import MAX_ENTRIES, MAX_SEQUENCE_BREAKERS, ServerLimits

PAGE = (Path(__file__).parents[1] / "docs" / "differences.md").read_text("utf-8")

UNKNOWN = (
    *("min_tokens_to_keep", "prompt_ignore_length", "forced_eos_token_id", "forced_bos_token_id", "mirostat", "tfs"),
    *("exponential_decay_length_penalty", "encoder_no_repeat_ngram_size", "renormalize_logits", "watermarking_config"),
    *("prefix_allowed_tokens_fn", "remove_invalid_values", "rep_pen_slope", "token_repetition_decay", "skew"),
    *("penalty_alpha", "banned_strings", "temperature_last", "adaptive_target", "detokenize", "output_kind"),
    *("spaces_between_special_tokens", "truncate_prompt_tokens", "extra_args"),
)
OUT_OF_RANGE = {
    "min_p": 1.5,
    "adaptive_p_target": -1,
    "dry_allowed_length": 0,
    "xtc_threshold": 0.6,
    "temperature": -1,
    "top_k": -2,
    "penalty_last_n": -2,
    "dry_last_n": -2,
    "top_n_sigma": -1,
    "typical_p": 1.5,
    "n": 129,
    "frequency_penalty": 3,
    "presence_penalty": -3,
    "logprobs": -1,
    "prompt_logprobs": -1,
}
REFUSED: list[dict[str, Any]] = [
    *({name: value} for name, value in OUT_OF_RANGE.items()),
    *({"mirostat_tau": 5, **one} for one in ({"temperature": 0}, {"top_k": 1}, {"draw": "greedy"}, {"order": "vllm"})),
    {"mirostat_v1_tau": 5, "temperature": 0},
    {"encoder_repetition_penalty": 1.2, "order": "hf"},
    *({"smoothing_factor": 0.3, "smoothing_curve": curve} for curve in (3.5, 0.5)),
    *({"dry_multiplier": 0.8, "order": order} for order in ("vllm", "hf")),
    {"xtc_probability": 0.5, "order": "hf"},
]
ACCEPTED: list[dict[str, Any]] = [
    {"temperature": 1e-4},
    {"logit_bias": {1: 250.0}},
    {"mirostat_tau": 5, "top_k": 40, "top_p": 0.9, "min_p": 0.1},
    {"mirostat_v1_tau": 5, "min_keep": 0},
    {"top_k": -1, "penalty_last_n": -1, "dry_last_n": -1},
    {"n": 128, "adaptive_p_target": 0.0, "xtc_threshold": 0.5},
]


@pytest.mark.parametrize("name", UNKNOWN)
def test_parameters_of_other_engines_are_errors(name: str) -> None:
    assert name in PAGE
    with pytest.raises(ParameterError, match=f"unknown parameter '{name}'"):
        nc.SamplingParams(**{name: 1})


@pytest.mark.parametrize("values", REFUSED, ids=str)
def test_refused_values(values: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        nc.SamplingParams(**values)
    assert any(name in str(caught.value) for name in values)
    assert any(name in PAGE for name in values if name not in ("order", "draw"))


@pytest.mark.parametrize("values", ACCEPTED, ids=str)
def test_accepted_values(values: dict[str, Any]) -> None:
    params = nc.SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


def test_small_temperatures_and_large_biases_are_used_as_they_are() -> None:
    logits = np.array([0.0, 0.005, -150.0], np.float32)
    [p_V] = nc.probabilities(logits[None], nc.SamplingParams(temperature=0.005))
    assert p_V[1] / p_V[0] == pytest.approx(np.e, rel=1e-3)
    assert nc.probabilities(logits[None], nc.SamplingParams(logit_bias={2: 250.0}))[0, 2] > 0.99


def test_a_row_without_allowed_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="every token is at -inf after allowed"):
        nc.sample(np.zeros((1, 4), np.float32), nc.SamplingParams(allowed_token_ids=[]))


def test_lists_over_http_are_limited() -> None:
    limits = ServerLimits()
    for name, most in (("dry_sequence_breakers", MAX_SEQUENCE_BREAKERS), ("stop", MAX_ENTRIES)):
        assert f"{most:,}" in PAGE
        limits.check_body({name: ["a"] * most}, 100)
        with pytest.raises(ParameterError, match=f"at most {most} entries"):
            limits.check_body({name: ["a"] * (most + 1)}, 100)


def kept(x: list[float], stage: Any) -> list[int]:
    return np.flatnonzero(nc.probabilities([x], (stage,))[0]).tolist()


def test_truncations_where_aphrodite_and_mlx_lm_keep_other_tokens() -> None:
    x = [3.0, 1.4, 0.0, -1.0]
    assert 3 - np.std(x, ddof=1) < 1.4 < 3 - np.std(x)  # Aphrodite keeps token 1
    assert kept(x, nc.stages.TopNSigma(1.0)) == [0]
    assert kept([*x, -np.inf], nc.stages.TopNSigma(1.0)) == [0]  # in Aphrodite the deviation is NaN
    assert kept([0.0] * 4, nc.stages.Typical(0.5)) == [0, 1]  # in Aphrodite [0]
    equal = np.log([0.5, 0.2, 0.2, 0.1]).tolist()
    assert kept(equal, nc.stages.Xtc(1.0, 0.15)) == [2, 3]  # in mlx-lm [1, 2, 3]
    assert kept(equal, nc.stages.Xtc(1.0, 0.2)) == [2, 3]  # in mlx-lm [0, 1, 2, 3]: only token 0 is above 0.2
