"""Translates the messages of Ollama's API to chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.parameters.parameter import ParameterError
from nucleate.server.chat_api import present_fields, read_call, read_list, read_name, read_text
from nucleate.server.openai.fields import invalid_value

_FIELDS = ("role", "content", "thinking", "tool_calls", "tool_name", "tool_call_id", "name", "images")


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat. Raises ParameterError.

    Calls without an id get one, and so does the result that follows: that of the first open call of this name.
    """
    if not isinstance(value, list) or not value:
        raise invalid_value("messages", "a list with at least one message", value)
    open_calls: list[tuple[str, str]] = []  # names and ids
    return [_message(message, index, open_calls) for index, message in enumerate(value)]


def _message(message: Any, index: int, open_calls: list[tuple[str, str]]) -> dict[str, Any]:
    where = f"messages[{index}]"
    given = present_fields(message, _FIELDS, where, "messages")
    check_no_images(given, where, "messages")
    role, content = read_name(given, "role", where, "messages"), read_text(given, "content", where, "messages", "")
    made: dict[str, Any] = {"role": role, "content": content}
    if given.get("thinking"):
        made["reasoning_content"] = read_text(given, "thinking", where, "messages")
    calls = read_list(given.get("tool_calls", []), f"{where}.tool_calls", "messages")
    for number, call in enumerate(calls):
        own = _call(call, f"{where}.tool_calls[{number}]", f"call_{index}_{number}")
        open_calls.append((own["function"]["name"], own["id"]))
        made.setdefault("tool_calls", []).append(own)
    if calls and role != "assistant":
        raise ParameterError("messages", f"{where}.tool_calls needs the role assistant")
    if calls and not content:
        made["content"] = None
    return made | _answered(given, where, open_calls) if role == "tool" else made


def _call(call: Any, where: str, new_id: str) -> dict[str, Any]:
    given = present_fields(call, ("id", "type", "function"), where, "messages")
    known = ("name", "arguments", "index", "description")
    function = present_fields(given.get("function"), known, f"{where}.function", "messages")
    name = read_name(function, "name", f"{where}.function", "messages")
    call_id = read_name(given, "id", where, "messages") if given.get("id") else new_id
    return read_call(call_id, name, function.get("arguments"), f"{where}.function.arguments", "messages")


def _answered(given: Mapping[str, Any], where: str, open_calls: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the fields of a result: the name of the tool and the id of the call."""
    name = given.get("tool_name") or given.get("name")
    if name is not None and not isinstance(name, str):
        raise invalid_value(f"{where}.tool_name", "a string", name, "messages")
    made = {} if name is None else {"name": name}
    if given.get("tool_call_id"):
        return {**made, "tool_call_id": read_name(given, "tool_call_id", where, "messages")}
    found = next((call for call in open_calls if name in (None, call[0])), None)
    if found is not None:
        open_calls.remove(found)
        made["tool_call_id"] = found[1]
    return made


def check_no_images(given: Mapping[str, Any], where: str, field: str) -> None:
    """Raise ParameterError if there are images."""
    if given.get("images"):
        raise ParameterError(field, f"{where}.images is not supported" if where else "images is not supported")
