"""Parses chat messages, tools and chat template variables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nucleate.chat.messages import read_calls
from nucleate.chat.reasoning import effort_variables
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.server.openai.fields import invalid_value, read_bool, unknown_field
from nucleate.tokenization.chat_template import ChatTemplateOptions

MAX_DEPTH = 8
"""Maximum nesting of ``chat_template_kwargs``."""

MAX_MESSAGES = 2048

TEMPLATE_FIELDS = (
    *("add_generation_prompt", "continue_final_message", "add_special_tokens", "split_special_tokens"),
    *("chat_template_kwargs", "reasoning_effort"),
)
"""Fields of ``ChatTemplateOptions`` in a body."""

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
"""Fields of ``ToolUse`` in a body."""

_TEXTS = ("role", "name", "tool_call_id", "reasoning_content", "reasoning")
_SUPPORTED = ("content", "tool_calls", *_TEXTS)
EMPTY_ONLY = ("refusal", "audio", "annotations", "function_call")
"""Fields of OpenAI's responses that clients send back: accepted only if empty."""

_RESERVED = frozenset(
    {
        # set by the server
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "raise_exception",
        "strftime_now",
        # set elsewhere or unsupported
        "chat_template",
        "continue_final_message",
        "tokenize",
        # names of Jinja
        "self",
        "loop",
        "range",
        "namespace",
        "dict",
        "cycler",
        "joiner",
        "lipsum",
    }
)
"""Template variables that clients cannot set."""


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages, each with its role, its content as one text, and what else it has.

    Text parts are concatenated. The content is None only beside tool calls. Raises ParameterError, also for images.
    """
    if not isinstance(value, list) or not value:
        raise invalid_value("messages", "a list with at least one message", value, "messages")
    if len(value) > MAX_MESSAGES:
        raise ParameterError("messages", f"messages has {len(value)} entries, but at most {MAX_MESSAGES} are allowed")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def read_template_options(given: Mapping[str, Any]) -> ChatTemplateOptions:
    """Read the fields that say how messages become a prompt. Raises ParameterError."""
    continues = read_bool(given, "continue_final_message")
    generates = read_bool(given, "add_generation_prompt", not continues)
    if continues and generates:
        message = "continue_final_message and add_generation_prompt cannot both be true"
        raise ParameterError("continue_final_message", message)
    variables = read_chat_template_kwargs(given.get("chat_template_kwargs", {}))
    if "reasoning_effort" in given:
        variables = {**effort_variables(given["reasoning_effort"]), **variables}
    adds, splits = read_bool(given, "add_special_tokens"), read_bool(given, "split_special_tokens", default=True)
    return ChatTemplateOptions(generates, continues, adds, variables, splits)


def read_chat_template_kwargs(value: Any) -> dict[str, Any]:
    """Return ``chat_template_kwargs``: additional variables for the chat template.

    Raises ParameterError for reserved names: those set by the server, and special tokens such as ``bos_token``.
    """
    if not isinstance(value, Mapping):
        raise ParameterError("chat_template_kwargs", f"chat_template_kwargs must be an object, got {shown(value)}")
    for name, item in value.items():
        if name in _RESERVED or name.endswith(("_token", "_tokens")):
            raise ParameterError("chat_template_kwargs", f"chat_template_kwargs cannot set {shown(name)}")
        if not name.isidentifier():
            message = f"chat_template_kwargs: {shown(name)} is not a valid variable name"
            raise ParameterError("chat_template_kwargs", message)
        _check(f"chat_template_kwargs.{name:.60}", item, MAX_DEPTH)
    return dict(value)


def _check(where: str, value: Any, depth: int) -> None:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    if inner and not depth:
        raise ParameterError("chat_template_kwargs", f"{where} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, float) and not math.isfinite(value):
        raise ParameterError("chat_template_kwargs", f"{where} must have finite numbers, got {shown(value)}")
    for item in inner:
        _check(where, item, depth - 1)


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise invalid_value(where, "an object with role and content", message, "messages")
    for name, value in message.items():
        if name not in _SUPPORTED + EMPTY_ONLY:
            raise ParameterError("messages", str(unknown_field(name, _SUPPORTED, where)))
        if name in EMPTY_ONLY and value not in (None, [], ""):
            raise ParameterError("messages", f"{where}.{name} is not supported, got {shown(value)}")
    calls = read_calls(message.get("tool_calls") or [], f"{where}.tool_calls")
    if calls and message.get("role") != "assistant":
        raise ParameterError("messages", f"{where}.tool_calls needs the role assistant")
    content = message.get("content")
    result = {"content": None if content is None and calls else _content(where, content)}
    for name in _TEXTS:
        text = message.get(name)
        if isinstance(text, str) and (text or name.startswith("reasoning")):
            result[name] = text
        elif name == "role" or text is not None:
            raise invalid_value(f"{where}.{name}", "a non-empty string", text, "messages")
    return {**result, "tool_calls": calls} if calls else result


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_value(f"{where}.content", "a string or a list of parts", content, "messages")
    texts = []
    for index, part in enumerate(content):
        place = f"{where}.content[{index}]"
        if not isinstance(part, Mapping) or part.get("type") != "text" or "text" not in part:
            raise invalid_value(place, 'a part such as {"type": "text", "text": ...}', part, "messages")
        if not isinstance(part["text"], str):
            raise invalid_value(f"{place}.text", "a string", part["text"], "messages")
        texts.append(part["text"])
    return "".join(texts)
