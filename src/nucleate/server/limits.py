"""What a server refuses although its model could do it, so that no request costs others much. Knows no HTTP.

A limit that operators set is declared as a parameter is, and so has a range, a sentence and a flag. The others are
constants. The OpenAPI document is made from both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import Parameter, ParameterError, param, with_parameters
from nucleate.sampling_params import FIELDS
from nucleate.server.openai.requests import Endpoint, ParsedRequest

MOST = 2**31 - 1
MAX_ENTRIES = 1024
"""Entries of a list or mapping, except ``allowed_token_ids``, which may be as long as the vocabulary."""
MAX_BREAKERS = 32
"""Entries of ``dry_sequence_breakers``, each of which is searched for in the whole vocabulary."""
MAX_CHARACTERS = 16_384
"""Characters of a list of texts, and token ids in lists of lists."""
MAX_TOLD = 2**21
"""Logprobs in the answer to a request, and tokens that it has echoed."""


@with_parameters
class ServerLimits:
    """The limits that an operator sets. Raises ParameterError for one that is out of its own range."""

    PARAMETERS: ClassVar[dict[str, Parameter]]

    max_body: int = param("bytes of a request's body", default=4 * 2**20, low=1024, high=MOST)
    max_tokens: int | None = param(
        "tokens of an answer, also where a request does not say how many; none: the context",
        default=None,
        low=1,
        high=MOST,
    )
    max_answers: int = param("answers that a request makes, to all of its prompts", default=512, low=1, high=MOST)
    max_logprobs: int = param("most likely tokens reported with each token", default=20, low=0, high=MOST)
    queue: int = param("answers that may wait for their turn; more requests get a 503", default=256, low=0, high=MOST)
    streams: int = param("requests at work or waiting at a time; more get a 503", default=512, low=1, high=MOST)
    connections: int = param("connections at a time; more get a 503", default=2048, low=1, high=MOST)
    request_seconds: float = param("seconds that a request may take", default=600.0, low=0.0, open_low=True)
    idle_seconds: int = param(
        "seconds that a connection may be idle between two requests; proxies in front want it to outlast theirs",
        default=65,
        low=1,
        high=MOST,
    )
    grace: float = param("seconds that streams may go on after SIGTERM", default=30.0, low=0.0)

    def __post_init__(self) -> None:
        for name, parameter in self.PARAMETERS.items():
            object.__setattr__(self, name, parameter.check(getattr(self, name)))

    def most(self, field: str) -> int | None:
        """The largest number that a field may be; None: that is not limited here."""
        return getattr(self, NUMBERS[field]) if field in NUMBERS else None

    def endpoint(self, endpoint: Endpoint) -> Endpoint:
        """The same kind of body, with ``max_tokens`` limited where a body does not say it."""
        said = [most for most in (endpoint.max_tokens, self.max_tokens) if most is not None]
        return dataclasses.replace(endpoint, max_tokens=min(said, default=None))

    def check_body(self, body: Any, vocab_size: int) -> None:
        """Refuse a body, as ``json.loads`` gives it, for its sizes alone: in a moment, before it is read.

        Says nothing about what is not of the right kind: reading it will. vocab_size: how many entries
        allowed_token_ids may have. Raises ParameterError that names the field as the body has it.
        """
        given = body if isinstance(body, Mapping) else {}
        for field in filter(given.__contains__, (*FIELDS, *NUMBERS)):
            self._check_field(field, given[field], vocab_size)
        prompts = given.get("prompt")
        if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
            _check_count("prompt", len(prompts), self.max_answers, "prompts")

    def check(self, asked: ParsedRequest, prompts: Sequence[Sequence[int]], context_length: int) -> None:
        """Raise ParameterError for more answers than this server makes, or if what they tell could be too large.

        prompts: the token ids of each. context_length: tokens of prompt and answer.
        """
        answers = len(prompts) * asked.best_of
        if answers > self.max_answers:
            field = "best_of" if asked.best_of > asked.params.n else "n" if asked.best_of > 1 else "prompt"
            asks = f"{answers} answers ({len(prompts)} prompts, {asked.best_of} answers to each)"
            raise ParameterError(field, f"{field} asks for {asks}, but at most {self.max_answers} are allowed here")
        params, read = asked.to_run, sum(map(len, prompts))
        more = len(params.logprob_token_ids)
        of_prompt = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs + more
        of_output = 0 if params.logprobs is None and not more else 1 + (params.logprobs or 0) + more
        rooms = (context_length - len(prompt) for prompt in prompts)
        most = context_length if params.max_tokens is None else params.max_tokens
        written = params.n * sum(max(0, min(most, room)) for room in rooms)
        told = read * (max(of_prompt, 1) * asked.params.n if asked.echo else of_prompt) + written * of_output
        asks_for = {"echo": asked.echo, "prompt_logprobs": of_prompt, "logprobs": asked.tells_logprobs, "best_of": True}
        field = next(field for field, asked_for in asks_for.items() if asked_for)
        _check_count(field, told, MAX_TOLD, "logprobs and echoed tokens")

    def _check_field(self, field: str, value: Any, vocab_size: int) -> None:
        most = self.most(field)
        if most is not None and isinstance(value, int) and not isinstance(value, bool) and value > most:
            raise ParameterError(field, f"{field} must be at most {most} here, got {shown(value)}")
        if isinstance(value, list | tuple | Mapping):
            _check_count(field, len(value), vocab_size if field == "allowed_token_ids" else entries(field), "entries")
        if isinstance(value, list | tuple):
            size = sum(len(entry) for entry in value if isinstance(entry, str | list | tuple))
            _check_count(field, size, MAX_CHARACTERS, "characters")
        if isinstance(value, str):
            _check_count(field, len(value), MAX_CHARACTERS, "characters")


def entries(field: str) -> int:
    """How many entries a field may have that is a list or a mapping."""
    return MAX_BREAKERS if field == "dry_sequence_breakers" else MAX_ENTRIES


def _check_count(field: str, count: int, allowed: int, noun: str) -> None:
    if count > allowed:
        raise ParameterError(field, f"{field} has {count} {noun}, but at most {allowed} are allowed here")


NUMBERS: Mapping[str, str] = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n": "max_answers",
    "best_of": "max_answers",
    "logprobs": "max_logprobs",
    "top_logprobs": "max_logprobs",
    "prompt_logprobs": "max_logprobs",
}
"""The limit of how large a number is."""
