"""A conversation and what else its template is told, checked. Knows no template: what a role means is up to that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.server.openai.fields import unknown_field, wrong

MOST_DEPTH = 8
"""Of lists and objects within ``chat_template_kwargs``."""

MOST_MESSAGES = 2048

_READ = ("role", "content", "name")
EMPTY = ("refusal", "audio", "annotations", "tool_calls", "function_call", "tool_call_id", "reasoning_content")
"""What OpenAI's answers have too, and clients send back with them: understood as long as nothing is in it."""

_OURS = frozenset(
    {
        # what every template is told
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "raise_exception",
        "strftime_now",
        # what is said elsewhere, or not at all
        "chat_template",
        "continue_final_message",
        "tokenize",
        # Jinja's own
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
"""Names that a client cannot give a meaning."""


def read_messages(value: Any) -> list[dict[str, str]]:
    """The messages with their role, their content as one text, and their name if they have one.

    The parts of a content that is a list are joined as they are. Raises ParameterError for what is not text: images,
    tools and their calls.
    """
    if not isinstance(value, list) or not value:
        raise wrong("messages", "a list with at least one message", value, "messages")
    if len(value) > MOST_MESSAGES:
        raise ParameterError("messages", f"messages has {len(value)} entries, but at most {MOST_MESSAGES} are allowed")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def read_template(value: Any) -> dict[str, Any]:
    """``chat_template_kwargs``: names that the template may look at, and JSON for them.

    Raises ParameterError for a name that is not a client's to say: what every template is told by us, and the special
    tokens of a tokenizer (``bos_token`` and all others of that form).
    """
    if not isinstance(value, Mapping):
        raise ParameterError("chat_template_kwargs", f"chat_template_kwargs must be an object, got {shown(value)}")
    for name, item in value.items():
        if name in _OURS or name.endswith(("_token", "_tokens")):
            raise ParameterError("chat_template_kwargs", f"chat_template_kwargs may not say {shown(name)}")
        if not name.isidentifier():
            what = f"chat_template_kwargs: {shown(name)} is no name that a template could use"
            raise ParameterError("chat_template_kwargs", what)
        _check(f"chat_template_kwargs.{name:.60}", item, MOST_DEPTH)
    return dict(value)


def _check(where: str, value: Any, depth: int) -> None:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    if inner and not depth:
        raise ParameterError("chat_template_kwargs", f"{where} is nested too deeply; allowed are {MOST_DEPTH} levels")
    if isinstance(value, float) and not math.isfinite(value):
        raise ParameterError("chat_template_kwargs", f"{where} must have finite numbers, got {shown(value)}")
    for item in inner:
        _check(where, item, depth - 1)


def _message(where: str, message: Any) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise wrong(where, "an object with role and content", message, "messages")
    for name, value in message.items():
        if name not in _READ + EMPTY:
            raise ParameterError("messages", str(unknown_field(name, _READ, where)))
        if name in EMPTY and value not in (None, [], ""):
            raise ParameterError("messages", f"{where}.{name} is not supported yet, got {shown(value)}")
    made = {"content": _content(where, message.get("content"))}
    for name in ("role", "name"):
        text = message.get(name)
        if isinstance(text, str) and text:
            made[name] = text
        elif name == "role" or text is not None:
            raise wrong(f"{where}.{name}", "a non-empty string", text, "messages")
    return made


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(f"{where}.content", "a string or a list of parts", content, "messages")
    texts = []
    for index, part in enumerate(content):
        place = f"{where}.content[{index}]"
        if not isinstance(part, Mapping) or part.get("type") != "text" or part.keys() != {"type", "text"}:
            raise wrong(place, 'a part such as {"type": "text", "text": ...}', part, "messages")
        if not isinstance(part["text"], str):
            raise wrong(f"{place}.text", "a string", part["text"], "messages")
        texts.append(part["text"])
    return "".join(texts)
