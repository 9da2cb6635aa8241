"""Translates request bodies of the Messages API to those of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from nucleate.chat.reasoning import effort_variables
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.server.anthropic.content_blocks import read_conversation
from nucleate.server.anthropic.message_encoder import MessageEncoder
from nucleate.server.anthropic.message_errors import NO_THREADS
from nucleate.server.chat_api import (
    ENGINE_FIELDS,
    WITHOUT_HINT,
    ChatAPI,
    Translation,
    present_fields,
    read_list,
    renames,
    sampling_fields,
    translator,
)
from nucleate.server.http_errors import HTTPError
from nucleate.server.openai.fields import invalid_value, read_bool

URL = "/v1/messages"
IGNORED = frozenset(
    [
        *("metadata", "service_tier", "cache_control", "inference_geo", "speed", "diagnostics"),
        *("context_management", "user_profile_id", "workspace_id"),
    ]
)
"""Fields for Anthropic's accounting, caches and context editing."""
PROMPT_FIELDS = frozenset(
    ["messages", "model", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs"]
)
_THINKING = ("enabled", "disabled", "adaptive")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TOOL = ("name", "description", "input_schema", "type", "strict")
_TOOL_IGNORED = ("cache_control", "eager_input_streaming", "input_examples", "defer_loading", "allowed_callers")
_WITHOUT = ("logprob_token_ids", "logprobs_mode", "stop", "max_reasoning_tokens")


def field_names() -> frozenset[str]:
    """Return the names of all fields of a body."""
    own = {"max_tokens", "stop_sequences", "stream", *ENGINE_FIELDS}
    return frozenset({*sampling_fields(*_WITHOUT), *PROMPT_FIELDS, *IGNORED, *own})


@translator
def translate(body: Any) -> Translation:
    """Translate a decoded body. Raises ParameterError, and HTTPError for a thread."""
    given = present_fields(body, field_names() | {"thread"})
    if "thread" in given:
        message = "thread is not supported: this server stores no conversations; send all messages"
        raise HTTPError(400, message, code=NO_THREADS, param="thread")
    if "max_tokens" not in given:
        raise ParameterError("max_tokens", "max_tokens is missing")
    own = {"stop_sequences", "system", "thinking", "output_config", *IGNORED}
    made = {name: value for name, value in given.items() if name not in own}
    if "stop_sequences" in given:
        made["stop"] = read_list(given["stop_sequences"], "stop_sequences")
    return Translation({**made, **translate_prompt(given)}, partial(MessageEncoder, shows_thinking(given)))


def translate_prompt(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the prompt is made from, and those of the same fields of Anthropic's."""
    made: dict[str, Any] = {"messages": read_conversation(given.get("messages"), given.get("system"))}
    if made["messages"][-1]["role"] == "assistant":  # the response continues it
        made["continue_final_message"] = True
    if "tools" in given:
        tools = read_list(given["tools"], "tools")
        made["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if "tool_choice" in given:
        made |= _tool_choice(given["tool_choice"])
    made |= _thinking(given.get("thinking", {}))
    variables = given.get("chat_template_kwargs")
    if isinstance(variables, Mapping):
        made["chat_template_kwargs"] = {**made.get("chat_template_kwargs", {}), **variables}
    elif variables is not None:  # is rejected later
        made["chat_template_kwargs"] = variables
    return made | _output_config(given.get("output_config", {}))


def shows_thinking(given: Mapping[str, Any]) -> bool:
    """Whether the response has the text of the reasoning."""
    display: object = given.get("thinking", {}).get("display")
    return display != "omitted"


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind not in (None, "custom"):
        raise ParameterError("tools", f"{where}.type must be custom, got {shown(kind)}; this server runs no tools")
    given = present_fields(tool, (*_TOOL, *_TOOL_IGNORED), where, "tools")
    if "input_schema" not in given:
        raise ParameterError("tools", f"{where}.input_schema is missing")
    function = {name: given[name] for name in ("name", "description", "strict") if name in given}
    return {"type": "function", "function": {**function, "parameters": given["input_schema"]}}


def _tool_choice(value: Any) -> dict[str, Any]:
    given = present_fields(value, ("type", "name", "disable_parallel_tool_use"), "tool_choice", "tool_choice")
    kind = given.get("type")
    if kind == "tool":
        if not isinstance(given.get("name"), str):
            raise invalid_value("tool_choice.name", "a string", given.get("name"), "tool_choice")
        choice: Any = {"type": "function", "function": {"name": given["name"]}}
    elif isinstance(kind, str) and kind in _CHOICES:
        choice = _CHOICES[kind]
    else:
        raise invalid_value("tool_choice.type", f"one of {', '.join(_CHOICES)}, tool", kind, "tool_choice")
    return {"tool_choice": choice, "parallel_tool_calls": not read_bool(given, "disable_parallel_tool_use")}


def _thinking(value: Any) -> dict[str, Any]:
    """Return the fields for ``thinking``; without it, the chat template decides."""
    given = present_fields(value, ("type", "budget_tokens", "display"), "thinking", "thinking")
    if not given:
        return {}
    kind = given.get("type")
    if kind not in _THINKING:
        raise invalid_value("thinking.type", f"one of {', '.join(_THINKING)}", kind, "thinking")
    if given.get("display", "summarized") not in ("summarized", "omitted"):
        raise invalid_value("thinking.display", "summarized or omitted", given["display"], "thinking")
    if ("budget_tokens" in given) != (kind == "enabled"):
        need = "needs" if kind == "enabled" else "cannot have"
        raise ParameterError("thinking", f"thinking of type {kind} {need} budget_tokens")
    if kind == "disabled":
        off = effort_variables("none")
        off.pop("reasoning_effort")
        return {"chat_template_kwargs": off}
    on = {"enable_thinking": True, "thinking": True}
    budget = {"max_reasoning_tokens": given["budget_tokens"]} if kind == "enabled" else {}
    return {"chat_template_kwargs": on if kind == "enabled" else {}, **budget}


def _output_config(value: Any) -> dict[str, Any]:
    given = present_fields(value, ("effort", "format"), "output_config", "output_config")
    made: dict[str, Any] = {"reasoning_effort": given["effort"]} if "effort" in given else {}
    if "format" in given:
        wanted = present_fields(given["format"], ("type", "schema"), "output_config.format", "output_config")
        if wanted.get("type") != "json_schema":
            raise invalid_value("output_config.format.type", "json_schema", wanted.get("type"), "output_config")
        schema = {"name": "output", "schema": wanted.get("schema")}
        made["response_format"] = {"type": "json_schema", "json_schema": schema}
    return made


_RENAMES = renames(
    (r"response_format\.json_schema", "output_config.format"),
    (r"response_format", "output_config.format"),
    (r"reasoning_effort", "output_config.effort"),
    (r"max_reasoning_tokens", "thinking.budget_tokens"),
    (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"stop", "stop_sequences"),
    (r"'required'", "'any'"),
)
MESSAGES = ChatAPI(URL, translate, (WITHOUT_HINT, *_RENAMES), field_names())
