"""The fields of SamplingParams that need an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.parameters.parameter import ParameterError

ENGINE_ONLY: Mapping[str, str] = {
    "max_tokens": "stop after that many tokens yourself",
    "stop": "look for the strings in the text yourself",
    "stop_regex": "look for the patterns in the text yourself",
    "stop_json": "look for the end of the JSON yourself",
    "stop_token_ids": "compare the sampled tokens with them yourself",
    "include_stop_str_in_output": "the caller makes the text",
    "skip_special_tokens": "the caller makes the text",
    "structured_outputs": "pass the allowed tokens of each step as mask",
    "n": "add one row per output, with index from 0 to n - 1",
    "prompt_logprobs": "there are no logits of the prompt",
    "max_reasoning_tokens": "force the tokens that close the section yourself, with a mask",
}
"""Fields that a ``Sampler`` alone cannot apply, and what its caller can do instead."""


def check_for_sampler(values: Mapping[str, Any], *, has_ends: bool) -> None:
    """Raise ParameterError for a field that needs an engine, or for min_tokens without ids that end the output.

    values: the fields that differ from their default.
    """
    for name, value in values.items():
        if name not in ENGINE_ONLY or (name == "stop_token_ids" and values.get("min_tokens")):
            continue
        message = f"{name} is for LLM and Engine, but a Sampler only samples tokens: {ENGINE_ONLY[name]}"
        raise ParameterError(name, f"{message}; params.build_pipeline() leaves it out; got {value!r:.60}")
    if values.get("min_tokens") and not has_ends:
        message = "min_tokens needs the ids that end the output, which it bans: give eos_token_ids or stop_token_ids"
        raise ParameterError("min_tokens", f"{message}; got min_tokens={values['min_tokens']}")
