"""Anthropic's Messages API: ``/v1/messages`` and ``/v1/messages/count_tokens``.

Request bodies, whose messages are made of content blocks, become those of chat completions. Responses are one message,
or the events of a stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, final

from nucleate.chat.reasoning import effort_variables
from nucleate.outputs import CompletionChunk, Usage
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError, invalid_value
from nucleate.sampling_params import FIELDS
from nucleate.server import chat_api
from nucleate.server.generation_endpoint import answer
from nucleate.server.http_errors import NO_THREADS, HTTPError, anthropic_error
from nucleate.server.openai import fields
from nucleate.server.openai.json_encoding import Encoded
from nucleate.server.openai.messages import TEMPLATE_FIELDS
from nucleate.server.openai.responses import JSON
from nucleate.server.request_context import RequestContext
from nucleate.server.service import Service

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
            made += _message(role, fields.LISTED.check(f"{where}.content", content, "messages"), f"{where}.content")
    return made


def read_texts(value: Any, where: str, field: str) -> str:
    """Return a text, or the joined texts of blocks. field: the field that it belongs to. Raises ParameterError."""
    return SEPARATOR.join(fields.read_parts(value, where, field, {"text": "text"}, "a block of type text"))


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
            text = fields.read_text(block, "text", place, "messages")
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
    call_id, name = (fields.read_name(block, one, where, "messages") for one in ("id", "name"))
    if not isinstance(block.get("input"), Mapping):
        raise invalid_value(f"{where}.input", "an object", block.get("input"), "messages")
    call = chat_api.read_call(call_id, name, block["input"], f"{where}.input", "messages")
    message.setdefault("tool_calls", []).append(call)


def _add_thinking(message: dict[str, Any], block: Mapping[str, Any], where: str) -> None:
    thought = fields.read_text(block, "thinking", where, "messages")
    message["reasoning_content"] = message.get("reasoning_content", "") + thought


_ASSISTANT = {"tool_use": _add_call, "thinking": _add_thinking, "redacted_thinking": lambda *_: None}
"""What the blocks of the assistant add to its message. Reasoning that another server encrypted is left out."""


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the message for the result of a tool. Templates have no place for ``is_error``, so its text says it."""
    call_id = fields.read_name(block, "tool_use_id", where, "messages")
    text = read_texts(block.get("content") or "", f"{where}.content", "messages")
    is_error = block.get("is_error")
    if is_error is not None and fields.FLAG.check("is_error", is_error) and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": call_id, "content": text}


STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
"""By finish reason; all others are "end_turn"."""


@final
class MessageEncoder(chat_api.ChatEncoder):
    """shows_thinking: whether the text of the reasoning is sent."""

    def __init__(self, shows_thinking: bool, given: chat_api.EncoderInput) -> None:
        super().__init__(given)
        self._shows_thinking = shows_thinking

    def body(self, usage: Usage) -> JSON:
        content = map(self._content, self.blocks.all)
        return {**self._message(usage), **_stop(self.blocks.last), "content": content}

    def error(self, error: HTTPError) -> bytes:
        return chat_api.event_frame("error", anthropic_error(error)).encode()

    def _start(self) -> str:
        message = self._message(Usage(self.given.prompt_tokens, 0))
        return _frame("message_start", {"message": message})

    def _idle(self) -> str:
        return _frame("ping", {})

    def _event(self, event: chat_api.BlockEvent) -> str:
        index = {"index": event.block.index}
        if event.kind == "open":
            return _frame("content_block_start", {**index, "content_block": _empty(event.block)})
        if event.kind == "close":
            return _frame("content_block_stop", index)
        if event.block.kind == "text":
            delta = {"type": "text_delta", "text": event.text}
        elif event.block.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": event.text}
        elif self._shows_thinking:
            delta = {"type": "thinking_delta", "thinking": event.text}
        else:
            return ""
        return _frame("content_block_delta", {**index, "delta": delta})

    def _end(self, usage: Usage) -> str:
        delta = _frame("message_delta", {"delta": _stop(self.blocks.last), "usage": _usage(usage)})
        return delta + _frame("message_stop", {})

    def _message(self, usage: Usage) -> JSON:
        """Return a message without content."""
        head = self.given.head
        return {
            "id": f"msg_{head.id.rpartition('-')[2]}",
            "type": "message",
            "role": "assistant",
            "model": head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _content(self, block: chat_api.Block) -> JSON:
        """Return a content block."""
        made = _empty(block)
        if block.kind == "call":
            made["input"] = Encoded(block.arguments)
        elif block.kind == "text":
            made["text"] = block.text
        elif self._shows_thinking:
            made["thinking"] = block.text
        return made


def _empty(block: chat_api.Block) -> JSON:
    """Return a content block as it is when it starts."""
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _stop(last: CompletionChunk | None) -> JSON:
    """Return why an output ended."""
    found, text = (None, None) if last is None else (last.finish_reason, last.stop_reason)
    if found == "stop" and isinstance(text, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": text}
    return {"stop_reason": STOP_REASONS.get(found or "", "end_turn"), "stop_sequence": None}


def _usage(usage: Usage) -> JSON:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _frame(kind: str, fields: dict[str, Any]) -> str:
    return chat_api.event_frame(kind, {"type": kind, **fields})


URL = "/v1/messages"
_PROMPT_FIELDS: Mapping[str, fields.Declared] = {
    "messages": fields.Field(fields.LIST, "The messages: texts, or blocks of text, thinking, tool uses and results."),
    "model": fields.COMMON["model"],
    "system": fields.Field({"anyOf": [fields.TEXT, fields.ARRAY]}, "The system message."),
    "tools": fields.Field(fields.ARRAY, "Tools with name, description and input_schema."),
    "tool_choice": fields.Field(fields.OBJECT, "type: auto, any, tool (with name) or none; disable_parallel_tool_use."),
    "thinking": fields.Field(fields.OBJECT, "type: enabled (with budget_tokens), adaptive or disabled; display."),
    "output_config": fields.Field(fields.OBJECT, "effort; format: json_schema with its schema."),
    "chat_template_kwargs": TEMPLATE_FIELDS["chat_template_kwargs"],
}
IGNORED = dict.fromkeys(  # for Anthropic's accounting, caches and context editing
    [
        *("metadata", "service_tier", "cache_control", "inference_geo", "speed", "diagnostics"),
        *("context_management", "user_profile_id", "workspace_id"),
    ],
    fields.NO_EFFECT,
)
COUNT_FIELDS: Mapping[str, fields.Declared] = {**_PROMPT_FIELDS, **IGNORED}
MESSAGE_FIELDS: Mapping[str, fields.Declared] = {
    **chat_api.sampling_fields("logprob_token_ids", "logprobs_mode", "stop", "max_reasoning_tokens"),
    **COUNT_FIELDS,
    **chat_api.ENGINE_FIELDS,
    "max_tokens": FIELDS["max_tokens"],
    "stream": fields.COMMON["stream"],
    "stop_sequences": fields.Field(fields.ARRAY, "Texts that end the output."),
}
_THINKING = ("enabled", "disabled", "adaptive")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TOOL = ("name", "description", "input_schema", "type", "strict")
_TOOL_IGNORED = ("cache_control", "eager_input_streaming", "input_examples", "defer_loading", "allowed_callers")


@chat_api.translator
def translate(body: Any) -> chat_api.Translation:
    """Translate a decoded body. Raises ParameterError, and HTTPError for a thread."""
    if isinstance(body, Mapping) and body.get("thread") is not None:
        message = "thread is not supported: this server stores no conversations; send all messages"
        raise HTTPError(400, message, code=NO_THREADS, param="thread")
    given = fields.present_fields(body, MESSAGE_FIELDS)
    if "max_tokens" not in given:
        raise ParameterError("max_tokens", "max_tokens is missing")
    own = {"stop_sequences", "system", "thinking", "output_config", *IGNORED}
    made = {name: value for name, value in given.items() if name not in own}
    if "stop_sequences" in given:
        made["stop"] = given["stop_sequences"]
    return chat_api.Translation({**made, **translate_prompt(given)}, partial(MessageEncoder, shows_thinking(given)))


def translate_prompt(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the prompt is made from, and those of the same fields of Anthropic's."""
    made: dict[str, Any] = {"messages": read_conversation(given.get("messages"), given.get("system"))}
    if made["messages"][-1]["role"] == "assistant":  # the response continues it
        made["continue_final_message"] = True
    if "tools" in given:
        made["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given["tools"])]
    if "tool_choice" in given:
        made |= _tool_choice(given["tool_choice"])
    made |= _thinking(given.get("thinking", {}))
    if "chat_template_kwargs" in given:
        made["chat_template_kwargs"] = {**made.get("chat_template_kwargs", {}), **given["chat_template_kwargs"]}
    return made | _output_config(given.get("output_config", {}))


def shows_thinking(given: Mapping[str, Any]) -> bool:
    """Whether the response has the text of the reasoning."""
    display: object = given.get("thinking", {}).get("display")
    return display != "omitted"


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind not in (None, "custom"):
        raise ParameterError("tools", f"{where}.type must be custom, got {shown(kind)}; this server runs no tools")
    given = fields.present_fields(tool, (*_TOOL, *_TOOL_IGNORED), where, "tools")
    if "input_schema" not in given:
        raise ParameterError("tools", f"{where}.input_schema is missing")
    function = {name: given[name] for name in ("name", "description", "strict") if name in given}
    return {"type": "function", "function": {**function, "parameters": given["input_schema"]}}


def _tool_choice(value: Any) -> dict[str, Any]:
    given = fields.present_fields(value, ("type", "name", "disable_parallel_tool_use"), "tool_choice", "tool_choice")
    kind = given.get("type")
    if kind == "tool":
        if not isinstance(given.get("name"), str):
            raise invalid_value("tool_choice.name", "a string", given.get("name"), "tool_choice")
        choice: Any = {"type": "function", "function": {"name": given["name"]}}
    elif isinstance(kind, str) and kind in _CHOICES:
        choice = _CHOICES[kind]
    else:
        raise invalid_value("tool_choice.type", f"one of {', '.join(_CHOICES)}, tool", kind, "tool_choice")
    name = "disable_parallel_tool_use"
    return {"tool_choice": choice, "parallel_tool_calls": not fields.FLAG.check(name, given.get(name, False))}


def _thinking(value: Any) -> dict[str, Any]:
    """Return the fields for ``thinking``; without it, the chat template decides."""
    given = fields.present_fields(value, ("type", "budget_tokens", "display"), "thinking", "thinking")
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
    given = fields.present_fields(value, ("effort", "format"), "output_config", "output_config")
    made: dict[str, Any] = {"reasoning_effort": given["effort"]} if "effort" in given else {}
    if "format" in given:
        wanted = fields.present_fields(given["format"], ("type", "schema"), "output_config.format", "output_config")
        if wanted.get("type") != "json_schema":
            raise invalid_value("output_config.format.type", "json_schema", wanted.get("type"), "output_config")
        schema = {"name": "output", "schema": wanted.get("schema")}
        made["response_format"] = {"type": "json_schema", "json_schema": schema}
    return made


_RENAMES = chat_api.renames(
    (r"response_format\.json_schema", "output_config.format"),
    (r"response_format", "output_config.format"),
    (r"reasoning_effort", "output_config.effort"),
    (r"max_reasoning_tokens", "thinking.budget_tokens"),
    (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"stop", "stop_sequences"),
    (r"'required'", "'any'"),
)
MESSAGES = chat_api.ChatAPI(URL, translate, (chat_api.WITHOUT_HINT, *_RENAMES), MESSAGE_FIELDS)


COUNT_URL = "/v1/messages/count_tokens"


async def count_tokens(service: Service, context: RequestContext) -> None:
    """Count the tokens of the prompt that ``/v1/messages`` would make."""

    def count(body: Any) -> dict[str, Any]:
        return {"input_tokens": service.count_chat_tokens(_translate(body))}

    with MESSAGES.own_names():
        await answer(service, context, COUNT_FIELDS, count)


@chat_api.translator
def _translate(body: Any) -> dict[str, Any]:
    given = fields.present_fields(body, COUNT_FIELDS)
    made = translate_prompt(given)
    return {**made, "model": given.get("model")}
