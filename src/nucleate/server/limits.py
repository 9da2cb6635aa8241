"""What a server refuses although its model could do it, so that no request costs others much. Knows no HTTP.

A limit is declared as a parameter is, and so has a range, a sentence and a flag. Which limit bounds which field stands
in the tables below; the OpenAPI document is made from the same tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nucleate.core.parameter import Parameter, ParameterError, declared, param
from nucleate.core.values import shown
from nucleate.params import FIELDS
from nucleate.presets import WANTED
from nucleate.server.sizes import characters_of, sizes_of, values_of
from nucleate.server.wire.forms import NAMES
from nucleate.server.wire.requests import Asked, Endpoint
from nucleate.text.stop_rules import (
    MAX_PATTERN_CHARACTERS,
    MAX_PATTERNS,
    MAX_SECONDS,
    MAX_STRING_CHARACTERS,
    MAX_STRINGS,
    MAX_TOKEN_IDS,
)
from nucleate.text.structured import Limits as FormLimits

MOST = 2**31 - 1
_FORM = FormLimits()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one server. Raises ParameterError for a limit that is out of its own range."""

    max_head: int = param("bytes of a request's path and headers", default=2**16, low=1024, high=MOST)
    max_body: int = param("bytes of a request's body", default=4 * 2**20, low=1024, high=MOST)
    max_prompt_tokens: int | None = param("tokens of a prompt; none: the context", default=None, low=1, high=MOST)
    max_tokens: int | None = param(
        "tokens of an answer, also where a request does not say how many; none: the context",
        default=None,
        low=1,
        high=MOST,
    )
    max_n: int = param("answers to a prompt (n and best_of)", default=128, low=1, high=FIELDS["n"].high)
    max_prompts: int = param("prompts of a request", default=256, low=1, high=MOST)
    max_answers: int = param("answers that a request makes, to all of its prompts", default=512, low=1, high=MOST)
    max_messages: int = param("messages of a conversation, and parts of all of them", default=2048, low=1, high=MOST)
    max_stops: int = param("stop strings", default=16, low=0, high=MAX_STRINGS)
    max_stop_characters: int = param(
        "characters of all stop strings together", default=4096, low=0, high=MAX_STRING_CHARACTERS
    )
    max_patterns: int = param("regular expressions that end the output", default=4, low=0, high=MAX_PATTERNS)
    max_pattern_characters: int = param(
        "characters of one regular expression", default=512, low=0, high=MAX_PATTERN_CHARACTERS
    )
    max_logit_bias: int = param("entries of logit_bias", default=1024, low=0, high=MOST)
    max_breakers: int = param("entries of dry_sequence_breakers", default=32, low=0, high=MAX_TOKEN_IDS)
    max_logprob_ids: int = param("entries of logprob_token_ids", default=128, low=0, high=MAX_TOKEN_IDS)
    max_listed: int = param(
        "entries of any other list (allowed_token_ids may be as long as the vocabulary), values for the chat template",
        default=1024,
        low=0,
        high=MAX_TOKEN_IDS,
    )
    max_listed_characters: int = param(
        "characters, and token ids in lists of lists, that a list other than stop has in all",
        default=16_384,
        low=0,
        high=MOST,
    )
    max_logprobs: int = param("likeliest tokens told with each token of an answer", default=20, low=0, high=MOST)
    max_prompt_logprobs: int = param("likeliest tokens told with each token of a prompt", default=20, low=0, high=MOST)
    max_told: int = param(
        "logprobs that a request asks for in all, and tokens that it has echoed", default=2**21, low=1, high=MOST
    )
    max_form_characters: int = param(
        "characters of a form: the JSON of a schema, all texts of a choice", default=_FORM.characters, low=1, high=MOST
    )
    max_form_text: int = param(
        "characters of a regular expression or a grammar, and of one text within a schema or a choice",
        default=_FORM.string,
        low=1,
        high=MOST,
    )
    max_form_depth: int = param("levels of a schema", default=_FORM.depth, low=1, high=_FORM.depth)
    max_form_properties: int = param("properties in all of a schema", default=_FORM.properties, low=0, high=MOST)
    max_form_values: int = param(
        "values in all enums of a schema, texts of a choice, alternatives of a grammar",
        default=_FORM.enum,
        low=1,
        high=MOST,
    )
    max_form_repetitions: int = param(
        "the most that a regular expression or a schema may let something be repeated",
        default=_FORM.repetitions,
        low=0,
        high=MOST,
    )
    form_seconds: float = param(
        "seconds that the form of an answer may take beyond what forms usually take", default=_FORM.seconds, low=0.001
    )
    queue: int = param("answers that may wait for their turn; more requests get a 503", default=256, low=0, high=MOST)
    streams: int = param("requests at work or waiting at a time; more get a 503", default=512, low=1, high=MOST)
    connections: int = param("connections at a time; more get a 503", default=2048, low=1, high=MOST)
    request_seconds: float = param("seconds that a request may take", default=600.0, low=0.0, open_low=True)
    head_seconds: float = param(
        "seconds in which a request's path and headers must arrive", default=10.0, low=0.0, open_low=True
    )
    idle_seconds: int = param(
        "seconds that a connection may be idle between two requests; proxies in front want it to outlast theirs",
        default=65,
        low=1,
        high=MOST,
    )
    body_seconds: float = param("seconds in which a body must arrive", default=30.0, low=0.0, open_low=True)
    regex_seconds: float = param(
        "seconds that the stop patterns of an answer may take; a hundredth of it comes back with each token",
        default=0.1,
        low=0.001,
        high=MAX_SECONDS,
    )
    prepare_seconds: float = param(
        "seconds to read a body, fill the chat template and make tokens of it", default=10.0, low=0.0, open_low=True
    )
    keep_alive: float = param(
        "seconds of silence after which a stream gets a comment", default=15.0, low=0.0, open_low=True
    )
    grace: float = param("seconds that streams may go on after SIGTERM", default=30.0, low=0.0)

    def __post_init__(self) -> None:
        for name, parameter in LIMITS.items():
            object.__setattr__(self, name, parameter.check(getattr(self, name)))

    def entries(self, field: str) -> int | None:
        """How many entries a field may have that is a list or a mapping; None: that is not limited here."""
        if field == "order":
            return len(WANTED)  # every one can be there once
        return getattr(self, ENTRIES[field]) if field in ENTRIES else None

    def characters(self, field: str) -> int | None:
        """How many characters (and ids in lists of lists) a field may have: each entry of ``EACH``, others in all."""
        if field == "order":
            return sum(map(len, WANTED))
        return getattr(self, CHARACTERS[field]) if field in CHARACTERS else None

    def most(self, field: str) -> int | None:
        """The largest number that a field may be; None: that is not limited here."""
        return getattr(self, NUMBERS[field]) if field in NUMBERS else None

    @property
    def of_forms(self) -> FormLimits:
        """Those that an engine has to know."""
        return FormLimits(
            characters=self.max_form_characters,
            string=self.max_form_text,
            depth=self.max_form_depth,
            properties=self.max_form_properties,
            enum=self.max_form_values,
            choices=self.max_form_values,
            repetitions=self.max_form_repetitions,
            seconds=self.form_seconds,
        )

    def endpoint(self, endpoint: Endpoint) -> Endpoint:
        """The same kind of body, with ``max_tokens`` limited where a body does not say it."""
        said = [most for most in (endpoint.max_tokens, self.max_tokens) if most is not None]
        return dataclasses.replace(endpoint, max_tokens=min(said, default=None))

    def check_body(self, body: Any, vocab_size: int) -> None:
        """Refuse a body, as ``json.loads`` gives it, for its sizes alone: in a moment, before it is read.

        Says nothing about what is not of the right kind: reading it will. Raises ParameterError that names the field
        as the body has it.
        """
        given = body if isinstance(body, Mapping) else {}
        for field in filter(given.__contains__, _SIZED):
            self._check_field(field, given[field], vocab_size)
        prompts, messages = given.get("prompt"), given.get("messages")
        if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
            _check_count("prompt", len(prompts), self.max_prompts, "prompts")
        if isinstance(messages, list):
            contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
            parts = sum(len(content) for content in contents if isinstance(content, list))
            _check_count("messages", parts, self.max_messages, "parts")
        _check_count(_VARIABLES, values_of(given.get(_VARIABLES), self.max_listed), self.max_listed, "values")
        for field in filter(given.__contains__, NAMES):
            self._check_form(field, given[field])

    def check(self, asked: Asked, vocab_size: int) -> None:
        """Raise ParameterError, with the field, what it is and what is allowed, for more than this server does.

        vocab_size: how many entries allowed_token_ids may have.
        """
        for field in FIELDS:
            self._check_field(field, getattr(asked.params, field), vocab_size)
        if self.max_tokens is not None and asked.params.max_tokens is None:
            raise ParameterError("max_tokens", f"max_tokens must be at most {self.max_tokens} here, got none")
        self._check_field("best_of", asked.best_of, vocab_size)
        self._check_field("messages", asked.messages, vocab_size)
        _check_count("prompt", len(asked.prompts), self.max_prompts, "prompts")
        self._check_answers(asked)

    def check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raise ParameterError for a prompt of too many tokens. prompts: token ids."""
        longest = max(map(len, prompts), default=0)
        if self.max_prompt_tokens is not None:
            _check_count("prompt", longest, self.max_prompt_tokens, "tokens")

    def check_told(self, asked: Asked, prompts: Sequence[Sequence[int]], context_length: int) -> None:
        """Raise ParameterError if an answer to this could be too large. context_length: tokens of prompt and answer."""
        params, read = asked.to_run, sum(map(len, prompts))
        more = len(params.logprob_token_ids)
        of_prompt = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs + more
        of_output = 0 if params.logprobs is None and not more else 1 + (params.logprobs or 0) + more
        rooms = (context_length - len(prompt) for prompt in prompts)
        most = context_length if params.max_tokens is None else params.max_tokens
        written = params.n * sum(max(0, min(most, room)) for room in rooms)
        told = read * (max(of_prompt, 1) * asked.params.n if asked.echo else of_prompt) + written * of_output
        asks = {"echo": asked.echo, "prompt_logprobs": of_prompt, "logprobs": asked.tells_logprobs, "best_of": True}
        field = next(field for field, asked_for in asks.items() if asked_for)
        _check_count(field, told, self.max_told, "logprobs and echoed tokens")

    def _check_field(self, field: str, value: Any, vocab_size: int) -> None:
        most = self.most(field)
        if most is not None and isinstance(value, int) and not isinstance(value, bool) and value > most:
            raise ParameterError(field, f"{field} must be at most {most} here, got {shown(value)}")
        if isinstance(value, list | tuple | Mapping):
            allowed = vocab_size if field == "allowed_token_ids" else self.entries(field)
            _check_count(field, len(value), allowed, "entries")
        characters = self.characters(field)
        if characters is not None and isinstance(value, str | list | tuple):
            sizes = [len(value)] if isinstance(value, str) else sizes_of(value)
            one, size = ("an entry of ", max(sizes, default=0)) if field in EACH else ("", sum(sizes))
            _check_count(field, size, characters, "characters", one)

    def _check_form(self, field: str, value: Any) -> None:
        """Before anything is made of it. Its JSON has at least so many characters; the engine counts them all."""
        most = self.max_form_characters
        if characters_of(value, most) > most:
            raise ParameterError(field, f"{field} is too large: at most {most} characters are allowed here")

    def _check_answers(self, asked: Asked) -> None:
        prompts = 1 if asked.messages is not None else len(asked.prompts)
        answers = prompts * asked.best_of
        if answers > self.max_answers:
            field = "best_of" if asked.best_of > asked.params.n else "n" if asked.best_of > 1 else "prompt"
            asks = f"{answers} answers ({prompts} prompts, {asked.best_of} answers to each)"
            raise ParameterError(field, f"{field} asks for {asks}, but at most {self.max_answers} are allowed here")


def _check_count(field: str, count: int, allowed: int | None, noun: str, one: str = "") -> None:
    if allowed is not None and count > allowed:
        raise ParameterError(field, f"{one}{field} has {count} {noun}, but at most {allowed} are allowed here")


# A dataclass keeps its defaults where a class body has its declarations, so they are put together again.
_DECLARED: dict[str, Any] = {field.name: field for field in dataclasses.fields(Limits)}
_DECLARED |= {"__annotations__": Limits.__annotations__, "__module__": __name__}
LIMITS: Mapping[str, Parameter] = declared(type("Limits", (), _DECLARED))
"""Every limit by name."""

_LISTS = [field for field in FIELDS if field != "order" and FIELDS[field].kind.startswith(("tuple", "Mapping"))]
_TEXTS = [field for field in _LISTS if "str" in FIELDS[field].kind]
_OWN = {
    "stop": "max_stops",
    "stop_regex": "max_patterns",
    "logit_bias": "max_logit_bias",
    "dry_sequence_breakers": "max_breakers",
    "logprob_token_ids": "max_logprob_ids",
    "messages": "max_messages",
}
ENTRIES: Mapping[str, str] = {**{field: "max_listed" for field in _LISTS if field != "allowed_token_ids"}, **_OWN}
"""The limit of how many entries a field has."""
CHARACTERS: Mapping[str, str] = {
    **dict.fromkeys(_TEXTS, "max_listed_characters"),
    "stop": "max_stop_characters",
    "stop_regex": "max_pattern_characters",
}
"""The limit of how many characters a field has."""
EACH = frozenset({"stop_regex"})
"""Fields each entry of which may have so many characters."""
NUMBERS: Mapping[str, str] = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n": "max_n",
    "best_of": "max_n",
    "logprobs": "max_logprobs",
    "top_logprobs": "max_logprobs",
    "prompt_logprobs": "max_prompt_logprobs",
}
"""The limit of how large a number is."""
_VARIABLES = "chat_template_kwargs"
_SIZED = sorted({*ENTRIES, *CHARACTERS, *NUMBERS, "allowed_token_ids", "order"})
