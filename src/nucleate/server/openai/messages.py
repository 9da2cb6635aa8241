"""Parses chat messages, tools and chat template variables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nucleate.chat.chat_format import read_calls
from nucleate.chat.reasoning import EFFORTS, effort_variables
from nucleate.chat.tools import MAX_TOOLS, MODES
from nucleate.chat.tools import NAME as TOOL_NAME
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError, invalid_value, unknown
from nucleate.server.openai.fields import (
    ARRAY,
    BOOLEAN,
    COMMON,
    IDS,
    NAME,
    OBJECT,
    TEXT,
    Declared,
    Field,
    object_schema,
    read_parts,
    read_text,
)
from nucleate.tokenization.chat_template import ChatTemplateOptions

MAX_DEPTH = 8
"""Maximum nesting of ``chat_template_kwargs``."""

MAX_MESSAGES = 2048

TEMPLATE_FIELDS: Mapping[str, Field] = {
    "add_generation_prompt": Field(BOOLEAN, "Append the header of the assistant's next message; the default."),
    "continue_final_message": Field(BOOLEAN, "Continue the final message instead of adding one."),
    "add_special_tokens": Field(BOOLEAN, "Add special tokens to those of the chat template."),
    "split_special_tokens": Field(
        BOOLEAN, "Special tokens in messages are text; the default. If false, they become special tokens."
    ),
    "chat_template_kwargs": Field(OBJECT, "Additional variables for the chat template."),
    "reasoning_effort": Field({"type": "string", "enum": [*EFFORTS]}, "Variable for the chat template."),
    "verbosity": Field({"type": "string", "enum": ["low", "medium", "high"]}, "Variable for the chat template."),
}
"""Fields of ``ChatTemplateOptions`` in a body."""

_FUNCTION = object_schema(
    "name",
    closed=True,
    name={"type": "string", "pattern": f"^{TOOL_NAME}$"},
    description={"type": ["string", "null"]},
    parameters={"type": ["object", "null"]},
    strict={"type": ["boolean", "null"]},
)
_TOOL = object_schema("function", closed=True, type={"enum": ["function", None]}, function=_FUNCTION)
TOOL_FIELDS: Mapping[str, Field] = {
    "tools": Field({**ARRAY, "items": _TOOL, "maxItems": MAX_TOOLS}, "The tools that the model may call."),
    "tool_choice": Field(
        {"anyOf": [{"enum": [*MODES]}, NAME, OBJECT]},
        "Whether and which tools are called: none, auto, required, or one by name.",
    ),
    "parallel_tool_calls": Field(BOOLEAN, "Allow several tool calls; the default."),
}
"""Fields of ``ToolUse`` in a body."""

_PART = object_schema("type", type={"enum": ["text", "refusal"]}, text=TEXT, refusal=TEXT)
_MESSAGE = object_schema(
    "role",
    role=NAME,
    content={"anyOf": [TEXT, {**ARRAY, "items": _PART}, {"type": "null"}]},
    tool_calls={
        "type": ["array", "null"],
        "items": object_schema("function", id={"type": ["string", "null"]}, function=OBJECT),
    },
)
MESSAGES = Field(
    {**ARRAY, "items": _MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES}, "The chat messages; text and tool calls."
)

TOKENIZE: Mapping[str, Declared] = {
    **TEMPLATE_FIELDS,
    "prompt": Field(TEXT, "The text to tokenize."),
    "messages": MESSAGES._replace(help="The chat to tokenize, instead of a text."),
    "model": COMMON["model"],
    "tools": TOOL_FIELDS["tools"],
    "add_special_tokens": Field(BOOLEAN, "Add special tokens; by default only to a text."),
    "return_token_strs": Field(BOOLEAN, "Also return the tokens as strings."),
}
DETOKENIZE: Mapping[str, Declared] = {"model": COMMON["model"], "tokens": Field(IDS, "The token ids.")}

_TEXTS = ("role", "name", "tool_call_id", "reasoning_content", "reasoning")
_SUPPORTED = ("content", "refusal", "tool_calls", *_TEXTS)
_PARTS = {"text": "text"}
_ASSISTANT_PARTS = {**_PARTS, "refusal": "refusal"}
EMPTY_ONLY = ("audio", "annotations", "function_call")
"""Fields of OpenAI's responses that clients send back: accepted only if empty."""

_RESERVED = frozenset(
    [
        *("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"),  # the server's
        *("chat_template", "continue_final_message", "tokenize"),  # set elsewhere or unsupported
        *("self", "loop", "range", "namespace", "dict", "cycler", "joiner", "lipsum"),  # names of Jinja
    ]
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
    """Read the fields that say how messages become a prompt, whose types are checked. Raises ParameterError."""
    continues = given.get("continue_final_message", False)
    generates = given.get("add_generation_prompt", not continues)
    if continues and generates:
        message = "continue_final_message and add_generation_prompt cannot both be true"
        raise ParameterError("continue_final_message", message)
    variables = read_chat_template_kwargs(given.get("chat_template_kwargs", {}))
    if "verbosity" in given:
        variables = {"verbosity": given["verbosity"], **variables}
    if "reasoning_effort" in given:
        variables = {**effort_variables(given["reasoning_effort"]), **variables}
    adds, splits = given.get("add_special_tokens", False), given.get("split_special_tokens", True)
    return ChatTemplateOptions(generates, continues, adds, variables, splits)


def read_chat_template_kwargs(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``chat_template_kwargs``: additional variables for the chat template.

    Raises ParameterError for reserved names: those set by the server, and special tokens such as ``bos_token``.
    """
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
            raise ParameterError("messages", str(unknown(name[:100], _SUPPORTED, f"field of {where}")))
        if name in EMPTY_ONLY and value not in (None, [], ""):
            raise ParameterError("messages", f"{where}.{name} is not supported, got {shown(value)}")
    calls = read_calls(message.get("tool_calls") or [], f"{where}.tool_calls")
    if calls and message.get("role") != "assistant":
        raise ParameterError("messages", f"{where}.tool_calls needs the role assistant")
    result: dict[str, Any] = {"content": _content(where, message, needed=not calls)}
    for name in _TEXTS:
        text = message.get(name)
        if isinstance(text, str) and (text or name.startswith("reasoning")):
            result[name] = text
        elif name == "role" or text is not None:
            raise invalid_value(f"{where}.{name}", "a non-empty string", text, "messages")
    return {**result, "tool_calls": calls} if calls else result


def _content(where: str, message: Mapping[str, Any], *, needed: bool) -> str | None:
    """The text of a message; of the assistant, a refusal is its text. needed: it must have one."""
    content, own = message.get("content"), message.get("role") == "assistant"
    if message.get("refusal"):
        if not own or content:
            raise ParameterError("messages", f"{where}.refusal needs the role assistant, and no content")
        return read_text(message, "refusal", where, "messages")
    if content is None and not needed:
        return None
    allowed = 'a part such as {"type": "text", "text": ...}'
    return "".join(read_parts(content, f"{where}.content", "messages", _ASSISTANT_PARTS if own else _PARTS, allowed))
