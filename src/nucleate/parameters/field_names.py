"""Names of fields of SamplingParams: those that other projects use, and those that need an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.parameters.parameter import ParameterError

SYNONYMS: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "best_of": "n",
    "temp": "temperature",
    "do_sample": "temperature",
    "greedy": "temperature",
    "repeat_penalty": "repetition_penalty",
    "penalty_repeat": "repetition_penalty",
    "no_repeat_ngram": "no_repeat_ngram_size",
    "stop_strings": "stop",
    "stop_words": "stop",
    "eos_token_id": "stop_token_ids",
    "eos_token_ids": "stop_token_ids",
    "bad_words_ids": "bad_words",
    "top_logprobs": "logprobs",
    "random_seed": "seed",
    "min_tokens_to_keep": "min_keep",
    "mirostat": "mirostat_tau",
    "rep_pen": "repetition_penalty",
    "rep_pen_range": "penalty_last_n",
    "nsigma": "top_n_sigma",
    **dict.fromkeys(
        ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), "structured_outputs"
    ),
}
"""Names that other projects use for a field, for error messages."""

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
