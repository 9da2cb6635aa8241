"""The messages of a conversation, checked, as text. Knows no chat template: what a role means is up to that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.core.parameter import ParameterError, unknown
from nucleate.core.values import shown

_READ = ("role", "content", "name")
_EMPTY = ("refusal", "audio", "annotations", "tool_calls", "function_call", "tool_call_id", "reasoning_content")
"""What OpenAI's answers have too, and clients send back with them: understood as long as nothing is in it."""


def read_messages(value: Any) -> list[dict[str, str]]:
    """The messages with their role, their content as one text, and their name if they have one.

    The parts of a content that is a list are joined as they are. Raises ParameterError for what is not text: images,
    tools and their calls.
    """
    if not isinstance(value, list) or not value:
        raise _wrong("messages", "a list with at least one message", value)
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(where: str, message: Any) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise _wrong(where, "an object with role and content", message)
    for name, value in message.items():
        if name not in _READ + _EMPTY:
            raise ParameterError("messages", str(unknown(name, _READ, f"field of {where}")))
        if name in _EMPTY and value not in (None, [], ""):
            raise ParameterError("messages", f"{where}.{name} is not supported yet, got {shown(value)}")
    made = {"content": _content(where, message.get("content"))}
    for name in ("role", "name"):
        text = message.get(name)
        if isinstance(text, str) and text:
            made[name] = text
        elif name == "role" or text is not None:
            raise _wrong(f"{where}.{name}", "a non-empty string", text)
    return made


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(f"{where}.content", "a string or a list of parts", content)
    texts = []
    for index, part in enumerate(content):
        place = f"{where}.content[{index}]"
        if not isinstance(part, Mapping) or part.get("type") != "text" or part.keys() != {"type", "text"}:
            raise _wrong(place, 'a part such as {"type": "text", "text": ...}', part)
        if not isinstance(part["text"], str):
            raise _wrong(f"{place}.text", "a string", part["text"])
        texts.append(part["text"])
    return "".join(texts)


def _wrong(where: str, allowed: str, value: object) -> ParameterError:
    return ParameterError("messages", f"{where} must be {allowed}, got {shown(value)}")
