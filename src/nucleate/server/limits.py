"""Limits on requests, so that no client can take much of the server's time or memory.

Limits that operators set are declared as parameters, each with a range, a help text and a flag. The others are
constants. The OpenAPI document is generated from both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from nucleate.engine.request import MAX_N
from nucleate.parameters.converters import shown
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import Parameter, ParameterError, param, with_parameters
from nucleate.sampling.pipeline_format import MAX_STAGES
from nucleate.sampling.stages import STAGES
from nucleate.sampling.stages.selection import Logprobs
from nucleate.sampling_params import FIELDS
from nucleate.server.openai.endpoints import Endpoint
from nucleate.server.openai.requests import ParsedRequest

MAX_INT = 2**31 - 1
MAX_ENTRIES = 1024
"""Maximum entries of a list or mapping. ``allowed_token_ids`` may be as long as the vocabulary."""
MAX_SEQUENCE_BREAKERS = 32
"""Maximum entries of ``dry_sequence_breakers``: each is searched for in the whole vocabulary."""
MAX_CHARACTERS = 16_384
"""Maximum characters of all texts in a list, and token ids of all lists in a list."""
MAX_LOGPROBS_PER_RESPONSE = 2**19
"""Maximum logprobs and echoed tokens in one response: about 64 MiB, as a logprob takes up to 128 bytes of JSON."""


def _count(help: str, default: int | None, low: int = 1, high: int = MAX_INT) -> Any:
    return param(help, default=default, low=low, high=high)


@with_suggestions
@with_parameters
class ServerLimits:
    """The limits that operators set with flags of the same names. Raises ParameterError for a value out of range."""

    PARAMETERS: ClassVar[dict[str, Parameter]]

    max_request_body_bytes: int = _count("Maximum size of a request body, in bytes.", 4 * 2**20, low=1024)
    max_completion_tokens: int | None = _count(
        "Maximum number of tokens per choice, also for requests without max_tokens. none: the context length.", None
    )
    max_choices_per_request: int = _count(
        "Maximum number of choices per request: n or best_of, times the number of prompts.", 512
    )
    max_logprobs: int = _count(
        "Maximum number of top logprobs per token in a response. -1: no limit, and requests may set -1, for all.",
        20,
        low=-1,
    )
    max_queued_seqs: int = _count(
        "Maximum number of sequences in the queue. Further requests get status 503.", 256, low=0
    )
    max_concurrent_requests: int = _count(
        "Maximum number of requests in flight, running or queued. Further requests get status 503.", 512
    )
    max_connections: int = _count("Maximum number of open connections. Further connections get status 503.", 2048)
    request_timeout_seconds: float = param(
        "Maximum duration of a request, in seconds. Later it ends with status 504.",
        default=600.0,
        low=0.0,
        open_low=True,
    )
    keep_alive_seconds: int = _count(
        "Close idle keep-alive connections after this many seconds. Set it above the timeout of a proxy in front.", 65
    )
    max_inspector_bytes: int = _count(
        "Maximum size of the logits that the inspector (/inspector) keeps, in bytes. 0: no inspector.",
        256 * 2**20,
        low=0,
        high=2**40,
    )
    shutdown_timeout_seconds: float = param(
        "Time for requests in flight to finish after SIGTERM, in seconds.", default=30.0, low=0.0
    )

    def __post_init__(self) -> None:
        for name, parameter in self.PARAMETERS.items():
            object.__setattr__(self, name, parameter.check(getattr(self, name)))

    def max_value(self, field: str) -> int | None:
        """Return the maximum value of a body field, or None if the server does not limit it."""
        limit: int | None = getattr(self, LIMITED_FIELDS[field]) if field in LIMITED_FIELDS else None
        if field in ("n", "best_of") and limit is not None:
            return min(limit, MAX_N)
        return None if limit == -1 else limit

    def cap_max_tokens(self, endpoint: Endpoint, vocab_size: int = 0) -> Endpoint:
        """Return the endpoint with the default of ``max_tokens`` capped. vocab_size: for logprobs of all tokens."""
        caps = [cap for cap in (endpoint.max_tokens, self.max_completion_tokens) if cap is not None]
        vocab_size = vocab_size if self.max_logprobs == -1 else 0
        return dataclasses.replace(endpoint, max_tokens=min(caps, default=None), vocab_size=vocab_size)

    def check_body(self, body: Any, vocab_size: int) -> None:
        """Check the sizes in a decoded body, before it is parsed.

        Values of a wrong type pass: parsing rejects them. vocab_size: maximum entries of ``allowed_token_ids``. Raises
        ParameterError, which names the field.
        """
        given = body if isinstance(body, Mapping) else {}
        for field in filter(given.__contains__, (*FIELDS, *LIMITED_FIELDS)):
            self._check_field(field, given[field], vocab_size)
        if given.get("pipeline") is not None:
            self._check_pipeline(given["pipeline"], vocab_size)
        prompts = given.get("prompt")
        if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
            _check_count("prompt", len(prompts), self.max_choices_per_request, "prompts")

    def check_request(self, request: ParsedRequest, prompts: Sequence[Sequence[int]], context_length: int) -> None:
        """Check the number of choices and of logprobs of a parsed request. Raises ParameterError.

        prompts: the token ids of each prompt. context_length: maximum tokens of prompt and completion.
        """
        choices = len(prompts) * request.best_of
        if choices > self.max_choices_per_request:
            field = "best_of" if request.best_of > request.params.n else "n" if request.best_of > 1 else "prompt"
            counted = f"{choices} choices ({len(prompts)} prompts, {request.best_of} choices each)"
            allowed = f"this server allows at most {self.max_choices_per_request} choices"
            raise ParameterError(field, f"{field} requests {counted}, but {allowed}")
        params, prompt_tokens = request.engine_params, sum(map(len, prompts))
        requested = len(params.logprob_token_ids)
        per_prompt_token = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs + requested
        per_generated_token = 0 if params.logprobs is None and not requested else 1 + (params.logprobs or 0) + requested
        max_tokens = context_length if params.max_tokens is None else params.max_tokens
        generated = params.n * sum(max(0, min(max_tokens, context_length - len(prompt))) for prompt in prompts)
        total = (
            prompt_tokens * (max(per_prompt_token, 1) * request.params.n if request.echo else per_prompt_token)
            + prompt_tokens * request.params.n * request.return_token_ids
            + generated * per_generated_token
        )
        causes = {
            "echo": request.echo,
            "prompt_logprobs": per_prompt_token,
            "logprobs": request.returns_logprobs,
            "return_token_ids": request.return_token_ids,
            "best_of": True,
        }
        field = next(field for field, present in causes.items() if present)
        _check_count(field, total, MAX_LOGPROBS_PER_RESPONSE, "logprobs and echoed tokens", "requests")

    def _check_pipeline(self, stages: Any, vocab_size: int) -> None:
        """Check the parameters of each stage like the fields of the same name, and the number of entries of all."""
        if not isinstance(stages, list):
            raise ParameterError("pipeline", f"pipeline must be a list of objects with a stage, got {shown(stages)}")
        count = 0
        for stage in stages[: MAX_STAGES + 1]:
            name = stage.get("stage") if isinstance(stage, Mapping) else None
            if name == Logprobs.name:
                raise ParameterError("pipeline", "pipeline cannot have the stage logprobs: set the field logprobs")
            kind = STAGES.get(name) if isinstance(name, str) else None
            for attribute, parameter in kind.parameters.items() if kind else ():
                for value in (stage[key] for key in {attribute, parameter.name} if key in stage):
                    self._check_field(parameter.name, value, vocab_size)
                    count += len(value) if isinstance(value, list | Mapping) else 0
        _check_count("pipeline", count, max(vocab_size, MAX_ENTRIES), "entries in all stages")

    def _check_field(self, field: str, value: Any, vocab_size: int) -> None:
        maximum = self.max_value(field)
        if maximum is not None and isinstance(value, int) and not isinstance(value, bool) and value > maximum:
            raise ParameterError(field, f"{field} must be at most {maximum} on this server, got {shown(value)}")
        if isinstance(value, list | tuple | Mapping):
            _check_count(field, len(value), max_entries(field, vocab_size), "entries")
        if isinstance(value, list | tuple):
            size = sum(len(entry) for entry in value if isinstance(entry, str | list | tuple))
            _check_count(field, size, MAX_CHARACTERS, "characters")
        if isinstance(value, str):
            _check_count(field, len(value), MAX_CHARACTERS, "characters")


def max_entries(field: str, vocab_size: int = MAX_ENTRIES) -> int:
    """Return the maximum number of entries of a list or mapping. vocab_size: that of ``allowed_token_ids``."""
    others = {"dry_sequence_breakers": MAX_SEQUENCE_BREAKERS, "allowed_token_ids": vocab_size}
    return others.get(field, MAX_CHARACTERS if field == "negative_prompt" else MAX_ENTRIES)


def _check_count(field: str, count: int, allowed: int, noun: str, verb: str = "has") -> None:
    if count > allowed:
        raise ParameterError(field, f"{field} {verb} {count} {noun}, but this server allows at most {allowed} {noun}")


LIMITED_FIELDS: Mapping[str, str] = {
    "max_tokens": "max_completion_tokens",
    "max_completion_tokens": "max_completion_tokens",
    "n": "max_choices_per_request",
    "best_of": "max_choices_per_request",
    "logprobs": "max_logprobs",
    "top_logprobs": "max_logprobs",
    "prompt_logprobs": "max_logprobs",
}
"""The limit of each numeric body field."""
