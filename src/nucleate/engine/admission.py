"""Validates a request against the model before it runs, and builds its pipeline and stop rules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nucleate.models.protocol import DecodingContext, ModelLimits
from nucleate.outputs import PromptLogprobs, StepLogprobs
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.inputs import check_ids
from nucleate.sampling.stage import Pipeline
from nucleate.sampling.token_logprobs import logprobs
from nucleate.sampling_params import SamplingParams
from nucleate.stopping.stop_matcher import StopRules
from nucleate.tokenization.tokenizer import Tokenizer


def stages_of(params: SamplingParams, vocab_size: int, tokenizer: Tokenizer) -> Pipeline:
    """The sampling pipeline of some parameters, for a model and its tokenizer."""
    ends = tuple(token for token in tokenizer.eos_token_ids if token < vocab_size)  # others cannot be sampled
    stages = params.pipeline(ends, tokenizer)
    check_ids(stages, vocab_size)
    return stages


def admit(
    model: ModelLimits,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    regex_seconds: float = 0.5,
) -> StopRules:
    """Validate a request against the model, and build its stop rules. Raises ParameterError."""
    size, room = model.vocab_size, model.context_length - len(prompt_ids)
    if not len(prompt_ids):
        raise ParameterError("prompt", "the prompt is empty; it must have at least one token")
    if not all(0 <= token < size for token in prompt_ids):
        raise ParameterError("prompt", f"the prompt holds token ids outside the vocabulary (0..{size - 1})")
    if room < 1:
        raise ParameterError(
            "prompt",
            f"the prompt has {len(prompt_ids)} tokens, but the context holds {model.context_length}, output included",
        )
    if params.min_tokens > room:
        message = f"min_tokens is {params.min_tokens}, but the context has room for {room} tokens after the prompt"
        raise ParameterError("min_tokens", message)
    for token in params.stop_token_ids:
        if token >= size:
            raise ParameterError(
                "stop_token_ids", f"stop_token_ids names token {token}, but the vocabulary ends at {size - 1}"
            )
    return StopRules(
        stop=params.stop,
        stop_token_ids=frozenset(params.stop_token_ids),
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        stop_regex=params.stop_regex,
        stop_json=params.stop_json,
        include_stop_str_in_output=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        min_tokens=params.min_tokens,
        regex_seconds=regex_seconds,
    )


def read_prompt(
    context: DecodingContext, prompt_ids: tuple[int, ...], params: SamplingParams, most: int = 1 << 26
) -> tuple[NDArray[np.float32], PromptLogprobs]:
    """The logits after the prompt, and the logprobs of each prompt token; None for the first.

    The prompt is computed in chunks of at most ``most`` logits.
    """
    prompt_logprobs: list[StepLogprobs | None] = [None]
    top, more = params.prompt_logprobs or 0, params.logprob_token_ids
    logits_TV = context.forward_all(prompt_ids[:1])
    ids_V = np.arange(logits_TV.shape[1])
    size = max(1, most // len(ids_V))
    for start in range(1, len(prompt_ids), size):
        part = prompt_ids[start : start + size]
        before_TV, logits_TV = logits_TV[-1:], context.forward_all(part)
        for x_V, token in zip((*before_TV, *logits_TV[:-1]), part, strict=True):
            prompt_logprobs.append(logprobs(ids_V, x_V, token, top, more) if np.isfinite(x_V.max()) else None)
    return logits_TV[-1], tuple(prompt_logprobs)
