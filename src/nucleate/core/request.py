"""What a request may say that is no stage: when to stop, how often to answer, what of the text to show. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from nucleate.core.parameter import Parameter, declared, param
from nucleate.core.structured import Structured


class Stopping:
    """When a request ends, and what of its end is shown."""

    max_tokens: int | None = param("most tokens of output; none: as many as the context holds", default=None, low=1)
    stop: tuple[str, ...] = param("strings that end the output, cut before them", default=())
    stop_token_ids: tuple[int, ...] = param("token ids that end the output", default=(), low=0)
    stop_regex: tuple[str, ...] = param("regular expressions that end the output, cut before their match", default=())
    stop_json: bool = param("end the output after the first complete JSON object or array", default=False)
    include_stop_str_in_output: bool = param("keep what ended the output in the text", default=False)
    ignore_eos: bool = param("go on after the end-of-sequence token", default=False)


class Answering:
    """How many answers, of what form, and how their text is made."""

    structured: Structured | None = param(
        "the form that the text has: a JSON schema, any JSON object, a pattern, one of some texts, a grammar",
        default=None,
    )
    n: int = param("how many answers; answer i uses seed + i", default=1, low=1, high=128)
    prompt_logprobs: int | None = param(
        "how many of the likeliest tokens to report at each place of the prompt, beside the one there",
        default=None,
        low=0,
    )
    logprobs_mode: Literal["raw", "processed"] = param(
        "whether logprobs are those of the logits as given, or those after the last stage", default="raw"
    )
    skip_special_tokens: bool = param("leave special tokens out of the text", default=True)


REQUEST_PARAMETERS: Mapping[str, Parameter] = {**declared(Stopping), **declared(Answering)}
"""The parameters above by name."""
