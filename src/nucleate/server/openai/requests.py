"""Parses the bodies of generation requests.

A field is one of ``SamplingParams``, or one of OpenAI's API. null counts as absent. An unsupported field of OpenAI's
API is an error, unless its value has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nucleate.chat.chat_format import NO_TOOLS
from nucleate.chat.tools import ToolUse
from nucleate.engine.beam_params import BeamParams, BeamRequest
from nucleate.engine.request import Request
from nucleate.parameters.parameter import ParameterError, invalid_value
from nucleate.sampling_params import FIELDS, SamplingParams
from nucleate.server.openai import fields
from nucleate.server.openai.endpoints import Endpoint
from nucleate.server.openai.messages import TEMPLATE_FIELDS, TOOL_FIELDS, read_messages, read_template_options
from nucleate.server.openai.response_format import (
    FORMAT_FIELDS,
    RESPONSE_FORMAT,
    UNCONSTRAINED,
    RequestedFormat,
    read_format,
)
from nucleate.tokenization.chat_template import DEFAULT_OPTIONS, ChatTemplateOptions

Prompt = str | tuple[int, ...]

NON_EMPTY = frozenset({"stop_regex"})
"""Lists that are absent or not empty: an empty one is a mistake. ``stop`` may be empty in OpenAI's API."""

_MAX_TOKENS = ("max_completion_tokens", "max_tokens")

_OTHER_NAMES = (
    ("max_completion_tokens", fields.MAX_COMPLETION_TOKENS, "max_tokens"),
    (fields.BUDGET, replace(FIELDS["max_reasoning_tokens"], name=fields.BUDGET), "max_reasoning_tokens"),
)
_STREAM_OPTIONS: Mapping[str, fields.Field] = dict.fromkeys(
    ("include_usage", "continuous_usage_stats", "include_obfuscation"),  # the last one has no effect
    fields.Field(fields.BOOLEAN),
)


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request body: prompts or chat messages, and parameters.

    The response follows ``params``. The engine gets ``engine_params``, with which it may generate more than that.
    """

    prompts: tuple[Prompt, ...]  #: text or token ids; empty for a chat
    messages: Sequence[Mapping[str, Any]] | None
    params: SamplingParams
    model: str | None = None
    stream: bool = False
    include_usage: bool = False  #: the last chunk of a stream has the usage
    continuous_usage: bool = False  #: every chunk of a stream has the usage of its choice so far
    suffix: str | None = None  #: text after the output (fill-in-the-middle); the prompts are text
    echo: bool = False  #: completions start with the prompt
    echoed_message: str = ""  #: text of the final message of a chat, with which its choices start
    return_token_ids: bool = False  #: also return those of the prompt
    include_reasoning: bool = True  #: messages have their reasoning
    tokens_as_ids: bool = False  #: in logprobs, tokens are "token_id:ID"
    truncation: fields.Truncation | None = None  #: of the prompt
    priority: int = 0
    best_of: int = 0  #: sequences to generate, of which the n best are returned; 0: n
    prompt_only: bool = False  #: max_tokens was 0: the response has only the prompt
    max_tokens_field: str | None = None  #: the field of the body that sets ``max_tokens``
    template_options: ChatTemplateOptions = DEFAULT_OPTIONS
    requested_format: RequestedFormat = UNCONSTRAINED  #: where the body sets the structured-output constraint
    beam_params: BeamParams | None = None  #: parameters of a beam search, instead of sampling
    tool_use: ToolUse = NO_TOOLS

    def __post_init__(self) -> None:
        object.__setattr__(self, "best_of", self.best_of or self.params.n)

    @property
    def returns_logprobs(self) -> bool:
        """Whether choices have logprobs."""
        return self.params.logprobs is not None or bool(self.params.logprob_token_ids)

    def engine_request(self, prompt_ids: Sequence[int]) -> Request | BeamRequest:
        if self.beam_params is not None:
            return BeamRequest(prompt_ids, self.beam_params, priority=self.priority)
        return Request(prompt_ids, self.engine_params, priority=self.priority, prompt_only=self.prompt_only)

    @cached_property
    def engine_params(self) -> SamplingParams:
        """The parameters for the engine: with logprobs if they are needed for ranking, or of the prompt for echo."""
        params, changes = self.params, dict[str, Any]()
        if self.best_of > params.n:
            changes["n"] = self.best_of
            if not self.returns_logprobs:
                changes["logprobs"] = 0
        if self.echo and self.returns_logprobs:
            changes["prompt_logprobs"] = max(params.logprobs or 0, params.prompt_logprobs or 0)
        return params.replace(**changes) if changes else params


@fields.reject_deep_nesting
def read_body(endpoint: Endpoint, body: Any, defaults: SamplingParams) -> ParsedRequest:
    """Parse a decoded JSON body. defaults: the parameters that it does not set. Raises ParameterError.

    The error names the field.
    """
    if not isinstance(body, Mapping):
        raise invalid_value("body", "a JSON object", body)
    given = endpoint.given_fields(body)
    echo = given.get("echo", False)
    prompt_only = endpoint.completes_prompts and fields.json_equal(given.get("max_tokens"), 0)
    if prompt_only:
        given["max_tokens"] = _prompt_only_max_tokens(given, echo)
    tool_use = _tool_use(given, endpoint.max_tool_name)
    requested = _requested_format(given, tool_use)
    params = defaults.override(**_values(endpoint, given, defaults, requested))
    stream, include_usage, continuous_usage = _stream(given)
    prompts, messages = _prompts_or_messages(endpoint, given)
    best_of, model = _best_of(given, params.n, stream), given.get("model")
    beam_params = None
    options = DEFAULT_OPTIONS if given.keys().isdisjoint(TEMPLATE_FIELDS) else read_template_options(given)
    echoes_prompt = echo and messages is None
    suffix = fields.read_suffix(given, prompts, echo=echoes_prompt)
    if any(name in given for name in fields.BEAM_FIELDS):
        beam_params = fields.read_beams(given, params, best_of=best_of, stream=stream, echo=echoes_prompt)
    return ParsedRequest(
        prompts,
        messages,
        params,
        model,
        stream,
        include_usage,
        continuous_usage,
        suffix,
        echo=echoes_prompt,
        echoed_message=final_answer(messages) if echo and messages is not None else "",
        return_token_ids=given.get("return_token_ids", False),
        include_reasoning=given.get("include_reasoning", True),
        tokens_as_ids=given.get("return_tokens_as_token_ids", False),
        truncation=fields.read_truncation(given, echo=echoes_prompt, suffix=suffix),
        priority=given.get("priority", 0),
        best_of=best_of,
        prompt_only=prompt_only,
        max_tokens_field=None if prompt_only else next((name for name in _MAX_TOKENS if name in given), None),
        template_options=options,
        requested_format=requested or UNCONSTRAINED,
        beam_params=beam_params,
        tool_use=tool_use,
    )


def _tool_use(given: Mapping[str, Any], max_name: int) -> ToolUse:
    if given.keys().isdisjoint(TOOL_FIELDS):
        return NO_TOOLS
    use = ToolUse.read(*(given.get(name) for name in TOOL_FIELDS))
    for index, tool in enumerate(use.tools):
        if len(tool.name) > max_name:
            allowed = f"at most {max_name} characters"
            raise invalid_value(f"tools[{index}].function.name", allowed, tool.name, "tools")
    if use.callable_tools and not given.keys().isdisjoint(fields.BEAM_FIELDS):
        raise ParameterError("tools", "tools cannot be combined with fields of beam search")
    return use


def _requested_format(given: Mapping[str, Any], tool_use: ToolUse) -> RequestedFormat | None:
    """Return the constraint of a body. With required tool calls, there is no answer that it could apply to."""
    requested = read_format(given) if any(name in given for name in FORMAT_FIELDS) else None
    if requested is None or requested.structured_outputs is None or tool_use.mode != "required":
        return requested
    if requested.field != RESPONSE_FORMAT:
        raise ParameterError(requested.field, f"{requested.field} cannot be combined with required tool calls")
    return UNCONSTRAINED


def _prompts_or_messages(
    endpoint: Endpoint, given: Mapping[str, Any]
) -> tuple[tuple[Prompt, ...], list[dict[str, Any]] | None]:
    subject = [name for name in endpoint.prompt_fields if name in given]
    if len(subject) != 1:
        problem = "is missing" if len(endpoint.prompt_fields) == 1 else "or messages must be set, but not both"
        raise ParameterError(endpoint.prompt_fields[0], f"{endpoint.prompt_fields[0]} {problem}")
    if subject == ["messages"]:
        return (), read_messages(given["messages"])
    return _prompts(given["prompt"], several=bool(endpoint.url)), None


def _prompt_only_max_tokens(given: Mapping[str, Any], echo: bool) -> int:
    """Return max_tokens for a request without output: the engine generates at least one token, which is dropped."""
    if not echo:
        raise ParameterError("max_tokens", "max_tokens must be an integer >= 1, or 0 with echo")
    least = FIELDS["min_tokens"].check(given.get("min_tokens", 0))
    if least:
        raise ParameterError("min_tokens", f"min_tokens must be at most max_tokens (0), got {least}")
    return 1


def _best_of(given: Mapping[str, Any], n: int, stream: bool) -> int:
    """Return how many sequences to generate."""
    if "best_of" not in given:
        return n
    best_of: int = fields.BEST_OF.check(given["best_of"])
    if best_of < n:
        raise ParameterError("best_of", f"best_of must be at least n ({n}), got {best_of}")
    if stream and best_of > n:
        why = "because the ranking is known only at the end"
        raise ParameterError("best_of", f"best_of must be n ({n}) in a stream, {why}, got {best_of}")
    return best_of


def _values(
    endpoint: Endpoint, given: Mapping[str, Any], defaults: SamplingParams, requested: RequestedFormat | None
) -> dict[str, Any]:
    """Return the fields of SamplingParams that a body sets, under any name."""
    values = {name: value for name, value in given.items() if name in FIELDS}
    for name in NON_EMPTY:
        if values.get(name) == []:
            raise FIELDS[name].error([])
    if requested is not None:
        values["structured_outputs"] = requested.structured_outputs
    values |= read_logprobs(endpoint, given)
    if "seed" in values:
        values["seed"] = _seed(values["seed"])
    for name, declared, own in _OTHER_NAMES:
        if name in given and values.setdefault(own, value := declared.check(given[name])) != value:
            raise ParameterError(name, f"{name} and {own} differ")
    if defaults.max_tokens is None:
        values.setdefault("max_tokens", endpoint.max_tokens)
    return values


def _seed(value: Any) -> Any:
    """Return a seed of OpenAI's range, signed integers of 64 bits, as an unsigned one. -1 is a random seed."""
    if isinstance(value, int) and value < 0:
        if value < -(2**63):
            raise invalid_value("seed", "an integer >= -2**63 and <= 2**64 - 1", value)
        return None if value == -1 else value % 2**64
    return value


def _stream(given: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Return whether to stream, to end the stream with the usage, and to report it in every chunk."""
    stream, options = given.get("stream", False), given.get("stream_options", {})
    if "stream_options" in given and not stream:
        raise ParameterError("stream_options", "stream_options needs stream to be true")
    options = fields.present_fields(options, _STREAM_OPTIONS, "stream_options")
    include_usage = bool(options.get("include_usage"))
    return stream, include_usage, include_usage and bool(options.get("continuous_usage_stats"))


def _prompts(value: Any, *, several: bool) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and value:
        if fields.are_token_ids(value):
            return (tuple(value),)
        if several and all(isinstance(item, str) for item in value):
            return tuple(value)
        if several and all(isinstance(item, list | tuple) and item and fields.are_token_ids(item) for item in value):
            return tuple(map(tuple, value))
    lists = ", or a list of either" if several else ""
    raise invalid_value("prompt", f"a string or a list of token ids{lists}", value)


def read_logprobs(endpoint: Endpoint, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``logprobs`` and ``prompt_logprobs``, as far as a body sets them.

    In a chat, ``logprobs`` is a boolean and ``top_logprobs`` the number. Raises ParameterError.
    """
    names = ["logprobs", "prompt_logprobs", "top_logprobs"]
    numbers = {name: _number(name, given[name], endpoint.vocab_size) for name in names if name in given}
    if "top_logprobs" not in endpoint.fields:
        return numbers
    enabled, top = numbers.pop("logprobs", None), numbers.pop("top_logprobs", None)
    if top is not None:
        top = fields.TOP_LOGPROBS.check(top)
        if not enabled:
            raise ParameterError("top_logprobs", "top_logprobs needs logprobs to be true")
    return numbers if enabled is None else {**numbers, "logprobs": (top or 0) if enabled else None}


def _number(name: str, value: Any, vocab_size: int) -> Any:
    if not fields.json_equal(value, -1):
        return value
    if not vocab_size:
        raise ParameterError(name, f"{name} must be an integer >= 0; -1, for all tokens, needs --max-logprobs -1")
    return vocab_size


def final_answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the final message if it is the assistant's: with ``echo``, answers begin with it."""
    last = messages[-1]
    return last["content"] or "" if last["role"] == "assistant" else ""
