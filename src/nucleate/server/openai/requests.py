"""Bodies of requests, as JSON has them, to values: what is to be answered, and how. Knows no model and no tokenizer.

A field is one of ``SamplingParams`` by its Python name, or one that OpenAI's API has. null is as if the field were not
there. A field that OpenAI has and we have not is an error, unless it says what happens anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from nucleate.engine.beam.params import BeamParams, BeamRequest
from nucleate.engine.request import Request
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import FIELDS, SamplingParams
from nucleate.server.openai.beam_search import FIELDS_OF_BEAMS as SEARCHING
from nucleate.server.openai.beam_search import SWITCH, read_beams
from nucleate.server.openai.fields import are_ids, guarded, read_model, read_switch, same, unknown_field, wrong
from nucleate.server.openai.messages import read_messages, read_template
from nucleate.server.openai.response_format import (
    RENAMED,
    RESPONSE,
    UNCONSTRAINED,
    RequestedFormat,
    read_format,
)

Prompt = str | tuple[int, ...]

_NO_TOOLS = ("none", "auto")  # what tool_choice may say where there are no tools
_IGNORED = frozenset(  # they are for OpenAI's bookkeeping, its caches and its queues
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"]
)


@dataclass(frozen=True)
class Endpoint:
    """A kind of body: what it may say besides the fields of SamplingParams."""

    url: str
    subject: tuple[str, ...]  #: what is to be answered: one of these fields
    max_tokens: int | None = None  #: where neither the body nor the defaults say; None: all that the context holds
    own: frozenset[str] = frozenset()  #: fields that are read here
    ignored: frozenset[str] = frozenset()  #: fields that cannot change the answer
    not_yet: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)
    """Fields that are refused, but for values that ask for nothing."""

    @cached_property
    def known(self) -> frozenset[str]:
        """The names of all fields that a body may have."""
        return frozenset({*FIELDS, *self.subject, *self.own, *self.ignored, *self.not_yet})


COMPLETIONS = Endpoint(
    "/v1/completions",
    ("prompt",),
    max_tokens=16,
    own=frozenset({"model", "stream", "stream_options", "best_of", "echo", RESPONSE, SWITCH, *SEARCHING}),
    ignored=_IGNORED,
    not_yet=MappingProxyType({"suffix": ("",)}),
)
CHAT = Endpoint(
    "/v1/chat/completions",
    ("messages",),
    own=frozenset(
        [
            *("model", "stream", "stream_options", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"),
            *(RESPONSE, SWITCH, *SEARCHING),
        ]
    ),
    ignored=_IGNORED | {"parallel_tool_calls"},
    not_yet=MappingProxyType(
        {
            "tools": ([],),
            "tool_choice": _NO_TOOLS,
            "functions": ([],),
            "function_call": _NO_TOOLS,
            "modalities": (["text"],),
            **dict.fromkeys(("audio", "prediction", "reasoning_effort", "verbosity", "web_search_options"), ()),
        }
    ),
)
PLAIN = Endpoint("", ("prompt", "messages"))
"""Our own: one prompt or conversation, and fields of SamplingParams alone, each with its own meaning."""

ENDPOINTS: Mapping[str, Endpoint] = {endpoint.url: endpoint for endpoint in (COMPLETIONS, CHAT)}
"""OpenAI's, by path."""


@dataclass(frozen=True)
class ParsedRequest:
    """What a body asks for: answers to each of some prompts, or to a conversation.

    What is made may be more than what is told of it: ``to_run`` and ``params``.
    """

    prompts: tuple[Prompt, ...]  #: text or token ids; none if there are messages
    messages: Sequence[Mapping[str, str]] | None
    params: SamplingParams
    model: str | None = None
    stream: bool = False
    include_usage: bool = False  #: whether a stream ends with the usage
    echo: bool = False  #: whether each answer begins with its prompt
    best_of: int = 0  #: answers to make, of which the n best are told; 0: n
    silent: bool = False  #: max_tokens was 0: only the prompt is told
    template: Mapping[str, Any] = field(default_factory=dict)  #: what the chat template is told besides the messages
    format: RequestedFormat = UNCONSTRAINED  #: where the body sets the structured-output constraint
    beams: BeamParams | None = None  #: how to search for the answers, if they are not drawn

    def __post_init__(self) -> None:
        object.__setattr__(self, "best_of", self.best_of or self.params.n)

    @property
    def tells_logprobs(self) -> bool:
        """Whether answers have logprobs."""
        return self.params.logprobs is not None or bool(self.params.logprob_token_ids)

    def request(self, prompt_ids: Sequence[int]) -> Request | BeamRequest:
        """What an engine is asked for one of the prompts."""
        return Request(prompt_ids, self.to_run) if self.beams is None else BeamRequest(prompt_ids, self.beams)

    @cached_property
    def to_run(self) -> SamplingParams:
        """What an engine is to do: with logprobs where answers are to be compared, and of a prompt that is shown."""
        params, changes = self.params, dict[str, Any]()
        if self.best_of > params.n:
            changes["n"] = self.best_of
            if not self.tells_logprobs:
                changes["logprobs"] = 0
        if self.echo and self.tells_logprobs:
            changes["prompt_logprobs"] = max(params.logprobs or 0, params.prompt_logprobs or 0)
        return params.replace(**changes) if changes else params


@guarded
def read_body(endpoint: Endpoint, body: Any, defaults: SamplingParams) -> ParsedRequest:
    """What a body, as ``json.loads`` gives it, asks for. defaults: the parameters that it does not say.

    Raises ParameterError with the name of the field at fault.
    """
    if not isinstance(body, Mapping):
        raise wrong("body", "a JSON object", body)
    for name, value in body.items():
        if name not in endpoint.known:
            raise _unknown(name, endpoint)
        idle = endpoint.not_yet.get(name)
        if value is not None and idle is not None and not any(same(value, one) for one in idle):
            raise ParameterError(name, f"{name} is not supported yet, got {shown(value)}")
    given = {name: value for name, value in body.items() if value is not None}
    echo, silent = read_switch(given, "echo"), same(given.get("max_tokens"), 0) and "echo" in endpoint.own
    if silent:
        given["max_tokens"] = _one_unseen(given, echo, defaults)
    requested = read_format(given)
    params = defaults.override(**_values(endpoint, given, defaults, requested))
    stream, include_usage = _stream(given)
    prompts, messages = _subject(endpoint, given)
    best_of = _best_of(given, params.n, stream)
    return ParsedRequest(
        prompts,
        messages,
        params,
        read_model(given),
        stream,
        include_usage,
        echo=echo,
        best_of=best_of,
        silent=silent,
        template=read_template(given.get("chat_template_kwargs", {})),
        format=requested or UNCONSTRAINED,
        beams=read_beams(given, params, best_of=best_of, stream=stream, echo=echo),
    )


def _unknown(name: str, endpoint: Endpoint) -> ParameterError:
    if name in RENAMED:
        return ParameterError(name, f"unknown field {shown(name)}; use {RENAMED[name]}")
    return unknown_field(name, endpoint.known)


def _subject(endpoint: Endpoint, given: Mapping[str, Any]) -> tuple[tuple[Prompt, ...], list[dict[str, str]] | None]:
    """What is to be answered: prompts, or messages."""
    subject = [name for name in endpoint.subject if name in given]
    if len(subject) != 1:
        what = "must be given" if len(endpoint.subject) == 1 else "or messages must be given, and not both"
        raise ParameterError(endpoint.subject[0], f"{endpoint.subject[0]} {what}")
    if subject == ["messages"]:
        return (), read_messages(given["messages"])
    return _prompts(given["prompt"], several=bool(endpoint.url)), None


def _one_unseen(given: Mapping[str, Any], echo: bool, defaults: SamplingParams) -> int:
    """The tokens to make where a prompt is to be told without an answer: engines make at least one."""
    if not echo:
        raise ParameterError("max_tokens", "max_tokens may be 0 only if echo is true; else it must be an integer >= 1")
    least = FIELDS["min_tokens"].check(given.get("min_tokens", defaults.min_tokens))
    if least:
        raise ParameterError("min_tokens", f"min_tokens must be at most max_tokens (0), got {least}")
    return 1


def _best_of(given: Mapping[str, Any], n: int, stream: bool) -> int:
    """How many answers to make."""
    if "best_of" not in given:
        return n
    best_of: int = replace(FIELDS["n"], name="best_of").check(given["best_of"])
    if best_of < n:
        raise ParameterError("best_of", f"best_of must be at least n ({n}), got {best_of}")
    if stream and best_of > n:
        raise ParameterError(
            "best_of", f"best_of must be n ({n}) in a stream, as the best are not known before its end, got {best_of}"
        )
    return best_of


def _values(
    endpoint: Endpoint, given: Mapping[str, Any], defaults: SamplingParams, requested: RequestedFormat | None
) -> dict[str, Any]:
    """The fields of SamplingParams that a body says, by whatever name."""
    values = {name: value for name, value in given.items() if name in FIELDS}
    if requested is not None:
        values["structured_outputs"] = requested.structured_outputs
    if "top_logprobs" in endpoint.own:
        values |= _chat_logprobs(given)
    most = given.get("max_completion_tokens")
    if most is not None:
        most = replace(FIELDS["max_tokens"], name="max_completion_tokens").check(most)
        if values.setdefault("max_tokens", most) != most:
            raise ParameterError("max_completion_tokens", "max_completion_tokens and max_tokens say different things")
    if defaults.max_tokens is None:
        values.setdefault("max_tokens", endpoint.max_tokens)
    return values


def _chat_logprobs(given: Mapping[str, Any]) -> dict[str, int | None]:
    """In a chat, ``logprobs`` says whether, and ``top_logprobs`` how many."""
    told, top = given.get("logprobs"), given.get("top_logprobs")
    if told is not None and not isinstance(told, bool):
        raise wrong("logprobs", "true or false (top_logprobs says how many)", told)
    if top is not None:
        top = replace(FIELDS["logprobs"], name="top_logprobs", optional=False).check(top)
        if not told:
            raise ParameterError("top_logprobs", "top_logprobs needs logprobs to be true")
    return {} if told is None else {"logprobs": (top or 0) if told else None}


def _stream(given: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether to stream, and whether with the usage at its end."""
    stream, options = read_switch(given, "stream"), given.get("stream_options", {})
    if not isinstance(options, Mapping):
        raise wrong("stream_options", "an object", options)
    if "stream_options" in given and not stream:
        raise ParameterError("stream_options", "stream_options needs stream to be true")
    for name, value in options.items():
        known = ("include_usage", "include_obfuscation")  # the latter pads what a listener could measure
        if name not in known:
            raise unknown_field(name, known, "stream_options")
        if not isinstance(value, bool):
            raise wrong(f"stream_options.{name}", "true or false", value)
    return stream, options.get("include_usage", False)


def _prompts(value: Any, *, several: bool) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and value:
        if are_ids(value):
            return (tuple(value),)
        if several and all(isinstance(item, str) for item in value):
            return tuple(value)
        if several and all(isinstance(item, list | tuple) and item and are_ids(item) for item in value):
            return tuple(map(tuple, value))
    lists = ", or a list of either" if several else ""
    raise wrong("prompt", f"a string or a list of token ids{lists}", value)
