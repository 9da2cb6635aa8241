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

from nucleate.core.parameter import ParameterError, unknown
from nucleate.core.values import shown
from nucleate.params import FIELDS, SamplingParams
from nucleate.server.wire.messages import read_messages

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
    own=frozenset({"model", "stream", "stream_options", "best_of"}),
    ignored=_IGNORED,
    not_yet=MappingProxyType({"echo": (False,), "suffix": ("",)}),
)
CHAT = Endpoint(
    "/v1/chat/completions",
    ("messages",),
    own=frozenset({"model", "stream", "stream_options", "max_completion_tokens", "top_logprobs"}),
    ignored=_IGNORED | {"parallel_tool_calls"},
    not_yet=MappingProxyType(
        {
            "tools": ([],),
            "tool_choice": _NO_TOOLS,
            "functions": ([],),
            "function_call": _NO_TOOLS,
            "response_format": ({"type": "text"},),
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
class Asked:
    """What a body asks for: answers to each of some prompts, or to a conversation."""

    prompts: tuple[Prompt, ...]  #: text or token ids; none if there are messages
    messages: Sequence[Mapping[str, str]] | None
    params: SamplingParams
    model: str | None = None
    stream: bool = False
    include_usage: bool = False  #: whether a stream ends with the usage


def read_body(endpoint: Endpoint, body: Any, defaults: SamplingParams) -> Asked:
    """What a body, as ``json.loads`` gives it, asks for. defaults: the parameters that it does not say.

    Raises ParameterError with the name of the field at fault.
    """
    try:
        return _read(endpoint, body, defaults)
    except RecursionError:  # of an error message, at the latest
        raise ParameterError("body", "the body is nested too deeply") from None


def _read(endpoint: Endpoint, body: Any, defaults: SamplingParams) -> Asked:
    if not isinstance(body, Mapping):
        raise _wrong("body", "a JSON object", body)
    for name, value in body.items():
        if name not in endpoint.known:
            raise unknown(name, endpoint.known, "field")
        if value is not None and not any(_same(value, idle) for idle in endpoint.not_yet.get(name, (value,))):
            raise ParameterError(name, f"{name} is not supported yet, got {shown(value)}")
    given = {name: value for name, value in body.items() if value is not None}
    params = defaults.replace(**_values(endpoint, given, defaults))
    if "best_of" in given and not _same(given["best_of"], params.n):
        raise ParameterError(
            "best_of", f"best_of is not supported yet, but for n ({params.n}), got {shown(given['best_of'])}"
        )
    stream, include_usage = _stream(given)
    model = given.get("model")
    if model is not None and (not isinstance(model, str) or not model):
        raise _wrong("model", "a non-empty string", model)
    subject = [name for name in endpoint.subject if name in given]
    if len(subject) != 1:
        what = "must be given" if len(endpoint.subject) == 1 else "or messages must be given, and not both"
        raise ParameterError(endpoint.subject[0], f"{endpoint.subject[0]} {what}")
    if subject == ["messages"]:
        return Asked((), read_messages(given["messages"]), params, model, stream, include_usage)
    prompts = _prompts(given["prompt"], several=bool(endpoint.url))
    return Asked(prompts, None, params, model, stream, include_usage)


def _values(endpoint: Endpoint, given: Mapping[str, Any], defaults: SamplingParams) -> dict[str, Any]:
    """The fields of SamplingParams that a body says, by whatever name."""
    values = {name: value for name, value in given.items() if name in FIELDS}
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
        raise _wrong("logprobs", "true or false (top_logprobs says how many)", told)
    if top is not None:
        top = replace(FIELDS["logprobs"], name="top_logprobs", optional=False).check(top)
        if not told:
            raise ParameterError("top_logprobs", "top_logprobs needs logprobs to be true")
    return {} if told is None else {"logprobs": (top or 0) if told else None}


def _stream(given: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether to stream, and whether with the usage at its end."""
    stream, options = given.get("stream", False), given.get("stream_options", {})
    if not isinstance(stream, bool):
        raise _wrong("stream", "true or false", stream)
    if not isinstance(options, Mapping):
        raise _wrong("stream_options", "an object", options)
    if "stream_options" in given and not stream:
        raise ParameterError("stream_options", "stream_options needs stream to be true")
    for name, value in options.items():
        known = ("include_usage", "include_obfuscation")  # the latter pads what a listener could measure
        if name not in known:
            raise unknown(name, known, "field of stream_options")
        if not isinstance(value, bool):
            raise _wrong(f"stream_options.{name}", "true or false", value)
    return stream, options.get("include_usage", False)


def _prompts(value: Any, *, several: bool) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and value:
        if _are_ids(value):
            return (tuple(value),)
        if several and all(isinstance(item, str) for item in value):
            return tuple(value)
        if several and all(isinstance(item, list | tuple) and item and _are_ids(item) for item in value):
            return tuple(map(tuple, value))
    lists = ", or a list of either" if several else ""
    raise _wrong("prompt", f"a string or a list of token ids{lists}", value)


def _are_ids(value: Sequence[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _same(value: Any, other: Any) -> bool:
    """Whether two JSON values are the same; in Python 1 is true too."""
    return type(value) is type(other) and value == other


def _wrong(name: str, allowed: str, value: object) -> ParameterError:
    return ParameterError(name, f"{name} must be {allowed}, got {shown(value)}")
