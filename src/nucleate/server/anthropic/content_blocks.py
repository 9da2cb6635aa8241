"""Translates the messages of the Messages API, made of content blocks, to chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.server.chat_api import read_call, read_list, read_name, read_text
from nucleate.server.openai.fields import invalid_value, read_bool

_ROLES = ("user", "assistant", "system")
_KNOWN = "text, tool_use, tool_result, thinking and redacted_thinking"
SEPARATOR = "\n"
"""Between blocks of text."""


def read_conversation(messages: Any, system: Any) -> list[dict[str, Any]]:
    """Return the messages of a conversation. system: a text or a list of blocks; None: none. Raises ParameterError."""
    made = [] if system is None else [{"role": "system", "content": read_texts(system, "system", "system")}]
    if not isinstance(messages, list) or not messages:
        raise invalid_value("messages", "a list with at least one message", messages)
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in _ROLES:
            raise invalid_value(where, f"an object with content and a role: {', '.join(_ROLES)}", message, "messages")
        content = message.get("content")
        if isinstance(content, str):
            made.append({"role": role, "content": content})
        elif role == "system":
            made.append({"role": role, "content": read_texts(content, f"{where}.content", "messages")})
        else:
            made += _message(role, read_list(content, f"{where}.content", "messages"), f"{where}.content")
    return made


def read_texts(value: Any, where: str, field: str) -> str:
    """Return a text, or the joined texts of blocks. field: the field that it belongs to. Raises ParameterError."""
    if isinstance(value, str):
        return value
    texts = []
    for index, block in enumerate(read_list(value, where, field)):
        if not isinstance(block, Mapping) or block.get("type") != "text":
            raise invalid_value(f"{where}[{index}]", "a block of type text", block, field)
        texts.append(read_text(block, "text", f"{where}[{index}]", field))
    return SEPARATOR.join(texts)


def _message(role: str, blocks: list[Any], where: str) -> list[dict[str, Any]]:
    """Return the messages for the blocks of one message: results of tools are messages of their own."""
    made: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str):
            raise invalid_value(place, "a content block with a type", block, "messages")
        if kind == "text":
            message = _current(made, role)
            text = read_text(block, "text", place, "messages")
            message["content"] = text if message["content"] is None else message["content"] + SEPARATOR + text
        elif kind == "tool_result" and role == "user":
            made.append(_result(block, place))
        elif kind in _ASSISTANT and role == "assistant":
            _ASSISTANT[kind](_current(made, role), block, place)
        else:
            problem = f"{place}.type {shown(kind)} is not supported in a message of the role {role}"
            raise ParameterError("messages", f"{problem}; the types are {_KNOWN}")
    for message in made:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return made or [{"role": role, "content": ""}]


def _current(made: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """Return the message of this role that blocks are added to."""
    if not made or made[-1]["role"] != role:
        made.append({"role": role, "content": None})
    return made[-1]


def _add_call(message: dict[str, Any], block: Mapping[str, Any], where: str) -> None:
    call_id, name = (read_name(block, one, where, "messages") for one in ("id", "name"))
    if not isinstance(block.get("input"), Mapping):
        raise invalid_value(f"{where}.input", "an object", block.get("input"), "messages")
    call = read_call(call_id, name, block["input"], f"{where}.input", "messages")
    message.setdefault("tool_calls", []).append(call)


def _add_thinking(message: dict[str, Any], block: Mapping[str, Any], where: str) -> None:
    thought = read_text(block, "thinking", where, "messages")
    message["reasoning_content"] = message.get("reasoning_content", "") + thought


def _skip(message: dict[str, Any], block: Mapping[str, Any], where: str) -> None:
    """Leave out reasoning that another server encrypted."""


_ASSISTANT = {"tool_use": _add_call, "thinking": _add_thinking, "redacted_thinking": _skip}
"""What the blocks of the assistant add to its message."""


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the message for the result of a tool. Templates have no place for ``is_error``, so its text says it."""
    call_id = read_name(block, "tool_use_id", where, "messages")
    text = read_texts(block.get("content") or "", f"{where}.content", "messages")
    present = {name: value for name, value in block.items() if value is not None}
    if read_bool(present, "is_error") and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": call_id, "content": text}
