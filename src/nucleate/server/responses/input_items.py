"""Translates the input items of the Responses API to chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.server.chat_api import read_call, read_list, read_name, read_text
from nucleate.server.openai.fields import invalid_value

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")


def read_input(value: Any, instructions: str | None) -> list[dict[str, Any]]:
    """Return the messages for an input: a text or a list of items. Raises ParameterError, which names the item.

    Reasoning, text and calls of the assistant that follow each other become one message.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise invalid_value("input", "a string or a list with at least one item", value)
    for index, item in enumerate(value):
        _add(messages, item, f"input[{index}]")
    if not messages:
        raise ParameterError("input", "input has reasoning only; a message is missing")
    for message in messages:
        message.setdefault("content", None if "tool_calls" in message else "")
    return messages


def _add(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    if not isinstance(item, Mapping):
        raise invalid_value(where, "an object", item, "input")
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise invalid_value(f"{where}.role", f"one of {', '.join(_ROLES)}", role, "input")
        text = read_content(item.get("content"), f"{where}.content")
        if role == "assistant":
            _assistant(messages, "content", "tool_calls")["content"] = text
        else:
            messages.append({"role": role, "content": text})
    elif kind == "reasoning":
        text = _reasoning(item, where)
        if text:
            _assistant(messages, "content", "tool_calls", "reasoning_content")["reasoning_content"] = text
    elif kind == "function_call":
        call_id, name = (read_name(item, one, where, "input") for one in ("call_id", "name"))
        call = read_call(call_id, name, read_text(item, "arguments", where, "input"), f"{where}.arguments", "input")
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        call_id = read_name(item, "call_id", where, "input")
        text = read_content(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
    elif kind == "item_reference":
        raise ParameterError("input", f"{where}: this server stores no items; send the item instead of its id")
    else:
        known = "message, reasoning, function_call and function_call_output"
        raise ParameterError("input", f"{where}.type {shown(kind)} is not supported; the types are {known}")


def _assistant(messages: list[dict[str, Any]], *new_after: str) -> dict[str, Any]:
    """Return the assistant's message that an item belongs to: the last one, unless it has one of these fields."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in new_after):
        messages.append({"role": "assistant"})
    return messages[-1]


def read_content(value: Any, where: str) -> str:
    """Return the content of an item as one text. Raises ParameterError, also for images and files."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid_value(where, "a string or a list of parts", value, "input")
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(value))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "refusal":
        return read_text(part, "refusal", where, "input")
    if kind not in _TEXT_PARTS:
        raise invalid_value(where, f"a part of type {', '.join(_TEXT_PARTS)} or refusal", part, "input")
    return read_text(part, "text", where, "input")


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Return the text of a reasoning item: its content, or else its summary."""
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = read_list(item.get(name) or [], f"{where}.{name}", "input")
        for index, part in enumerate(parts):
            if not isinstance(part, Mapping) or part.get("type") not in (kind, "text"):
                raise invalid_value(f"{where}.{name}[{index}]", f"a part of type {kind}", part, "input")
        if parts:
            return "".join(read_text(part, "text", f"{where}.{name}", "input") for part in parts)
    return ""
