"""Prepares messages for a chat template, from the form of OpenAI's API."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from nucleate.chat.tool_formats.hermes import with_tools_as_text
from nucleate.chat.tool_formats.mistral import ID_LENGTH, Mistral
from nucleate.chat.tool_formats.tool_format import ToolFormat
from nucleate.chat.tools import Tool
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError, read_json
from nucleate.tokenization.chat_template import check_messages


def template_messages(
    messages: Sequence[Mapping[str, Any]], template: str, tool_format: ToolFormat | None, tools: Sequence[Tool]
) -> list[Mapping[str, Any]]:
    """Return messages as a template expects them.

    The arguments of tool calls become objects, the role developer becomes system unless the template has it, and tools
    become text if the template has none. Messages without tools are not changed. Raises ParameterError.
    """
    check_messages(messages)
    made = [_message(message, index, template, tool_format) for index, message in enumerate(messages)]
    has_tools = tools or any(message.get("tool_calls") or message.get("role") == "tool" for message in made)
    if has_tools and (tool_format is None or not tool_format.in_template):
        return [*with_tools_as_text(made, tools)]
    return made


def _message(
    message: Mapping[str, Any], index: int, template: str, tool_format: ToolFormat | None
) -> Mapping[str, Any]:
    made = message
    if message.get("role") == "developer" and "developer" not in template:
        made = {**made, "role": "system"}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        made = {**made, "reasoning_content": reasoning, "thinking": reasoning}
    if message.get("tool_calls"):
        calls = read_calls(message["tool_calls"], f"messages[{index}].tool_calls")
        made = {**made, "tool_calls": [_template_call(call, tool_format) for call in calls]}
    if message.get("role") == "tool":
        if isinstance(message.get("content"), list):
            made = {**made, "content": "".join(part.get("text", "") for part in message["content"])}
        if isinstance(tool_format, Mistral) and isinstance(message.get("tool_call_id"), str):
            made = {**made, "tool_call_id": _mistral_id(message["tool_call_id"])}
    return made


def read_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls of a message with their arguments as objects. where: their place. Raises ParameterError."""
    if not isinstance(value, list | tuple):
        raise ParameterError("messages", f"{where} must be a list, got {shown(value)}")
    made = []
    for index, call in enumerate(value):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            allowed = 'an object such as {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
            raise ParameterError("messages", f"{where}[{index}] must be {allowed}, got {shown(call)}")
        if not isinstance(call.get("id"), str | None):
            raise ParameterError("messages", f"{where}[{index}].id must be a string, got {shown(call['id'])}")
        arguments = read_arguments(function.get("arguments"), f"{where}[{index}].function.arguments")
        made.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return made


def _template_call(call: dict[str, Any], tool_format: ToolFormat | None) -> dict[str, Any]:
    if tool_format is not None and tool_format.arguments_are_text:
        function = call["function"]
        call = {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
    if isinstance(tool_format, Mistral) and isinstance(call.get("id"), str):
        call = {**call, "id": _mistral_id(call["id"])}
    return call


def read_arguments(value: Any, where: str) -> Any:
    """Return the arguments of a call as an object; they are a JSON text in OpenAI's API. where: their place."""
    if isinstance(value, str):
        try:
            value = read_json(value or "{}", where)
        except ParameterError as error:
            raise ParameterError("messages", str(error)[:300]) from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ParameterError("messages", f"{where} must be a JSON object, or its text, got {shown(value)}")
    return dict(value)


def _mistral_id(value: str) -> str:
    """Return an id of the form that Mistral's templates require: this one, or one derived from it."""
    if len(value) == ID_LENGTH and value.isascii() and value.isalnum():
        return value
    return hashlib.sha256(value.encode(errors="replace")).hexdigest()[:ID_LENGTH]
