"""OpenAI's Responses API: ``/v1/responses``, stateless.

Request bodies become those of chat completions, their input items messages. Responses are one object, or events that
end with it. Nothing is stored: ``store`` has no effect, and fields that need stored responses are errors.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

from nucleate.outputs import StepLogprobs, Usage
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError, invalid_value
from nucleate.server import chat_api
from nucleate.server.http_errors import HTTPError
from nucleate.server.openai import fields
from nucleate.server.openai.json_encoding import Encoded, dumps, json_parts
from nucleate.server.openai.messages import TEMPLATE_FIELDS, TOOL_FIELDS
from nucleate.server.openai.responses import JSON, validation_body

_ROLES = ("user", "assistant", "system", "developer")
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def read_input(value: Any, instructions: str | None) -> list[dict[str, Any]]:
    """Return the messages for an input: a text or a list of items. Raises ParameterError, which names the item.

    Reasoning, text and calls of the assistant that follow each other become one message.
    """
    messages: list[dict[str, Any]] = []
    messages += [] if instructions is None else [{"role": "system", "content": instructions}]
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
        text = _reasoning_text(item, where)
        if text:
            _assistant(messages, "content", "tool_calls", "reasoning_content")["reasoning_content"] = text
    elif kind == "function_call":
        call_id, name = (fields.read_name(item, one, where, "input") for one in ("call_id", "name"))
        text = fields.read_text(item, "arguments", where, "input")
        call = chat_api.read_call(call_id, name, text, f"{where}.arguments", "input")
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        call_id = fields.read_name(item, "call_id", where, "input")
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
    return "".join(fields.read_parts(value, where, "input", _PARTS, f"a part of type {' or '.join(_PARTS)}"))


def _reasoning_text(item: Mapping[str, Any], where: str) -> str:
    """Return the text of a reasoning item: its content, or else its summary."""
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = fields.LISTED.check(f"{where}.{name}", item.get(name) or [], "input")
        kinds = {kind: "text", "text": "text"}
        if texts := fields.read_parts(parts, f"{where}.{name}", "input", kinds, f"a part of type {kind}"):
            return "".join(texts)
    return ""


ID_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


@final
class ResponseEncoder(chat_api.ChatEncoder):
    """echoed: the fields of the request that the response repeats.

    They are encoded once, because a request may have megabytes of tools, and a stream repeats them three times.
    """

    def __init__(self, echoed: Mapping[str, Any], given: chat_api.EncoderInput) -> None:
        super().__init__(given)
        self._number = 0  # of the next event
        self._id = given.head.id.rpartition("-")[2]
        params, use = given.request.params, given.request.tool_use
        request: JSON = {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": given.head.created,
            "model": given.head.model,
            "instructions": None,
            "tools": [],
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": None, "summary": None},
            **echoed,
            "parallel_tool_calls": use.parallel,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": params.logprobs or 0,
            "max_output_tokens": params.max_tokens,
            "truncation": "disabled",
            "store": False,
            "background": False,
            "previous_response_id": None,
        }
        self._request = {name: Encoded(dumps(value)) for name, value in request.items()}
        asked = request["reasoning"]  # for a summary: the reasoning then takes its place
        self._summarizes = any(asked.get(name) is not None for name in ("summary", "generate_summary"))
        self._reasoning_text = "reasoning_summary_text" if self._summarizes else "reasoning_text"

    def body(self, usage: Usage) -> JSON:
        return {**self._request, **self._final(usage)}

    def error(self, error: HTTPError) -> bytes:
        found = error.body["error"]
        failure = {"code": "server_error" if error.kind else "invalid_prompt", "message": found["message"]}
        return (self._begin() + self._lifecycle("failed", {**_state("failed"), "error": failure})).encode()

    def _start(self) -> str:
        return "".join(self._lifecycle(kind, _state("in_progress")) for kind in ("created", "in_progress"))

    def _idle(self) -> str:
        return ": keep-alive\n\n"

    def _event(self, event: chat_api.BlockEvent) -> str:
        block, kind, part = event.block, "function_call_arguments", ""
        place: JSON = {"output_index": block.index}
        where: JSON = {"item_id": self._item_id(block), **place}
        if block.kind != "call":
            summarized = self._summarizes and block.kind == "reasoning"
            where["summary_index" if summarized else "content_index"] = 0
            kind = "output_text" if block.kind == "text" else self._reasoning_text
            part = "reasoning_summary_part" if summarized else "content_part"
        if event.kind == "add":
            return self._frame(f"{kind}.delta", {**where, "delta": event.text, **self._steps(block, event.logprobs)})
        if event.kind == "open":
            made = self._frame("output_item.added", {**place, "item": self._item(block, "in_progress", empty=True)})
            made += self._frame(f"{part}.added", {**where, "part": self._part(block, empty=True)}) if part else ""
            return made
        text: JSON = {"text": block.text} if part else {"name": block.name, "arguments": block.text}
        made = self._frame(f"{kind}.done", {**where, **text, **self._steps(block, block.logprobs)})
        made += self._frame(f"{part}.done", {**where, "part": self._part(block)}) if part else ""
        return made + self._frame("output_item.done", {**place, "item": self._item(block, self._status(block))})

    def _steps(self, block: chat_api.Block, steps: Sequence[StepLogprobs]) -> JSON:
        """Return the field for the logprobs of a text."""
        return {"logprobs": iter([*map(self.tokens.step, steps)])} if block.kind == "text" else {}

    def _end(self, usage: Usage) -> str:
        state = self._final(usage)
        return self._lifecycle(state["status"], state)

    def _lifecycle(self, kind: str, state: JSON) -> str:
        """Return an event with the whole response."""
        return self._frame(kind, {"response": {**self._request, **state}})

    def _frame(self, kind: str, fields: JSON) -> str:
        name, number = f"response.{kind}", self._number
        self._number += 1
        body = {"type": name, "sequence_number": number, **fields}
        return f"event: {name}\ndata: {''.join(json_parts(body))}\n\n"

    def _final(self, usage: Usage) -> JSON:
        """Return what a response has at its end."""
        last = self.blocks.last
        cut = last is not None and last.finish_reason == "length"
        made = _state("incomplete" if cut else "completed")
        made |= {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {"completed_at": int(time.time())}
        made["output"] = iter([self._item(block, self._status(block)) for block in self.blocks.all])
        made["usage"] = _usage(usage)
        if last is not None:
            made["seed"] = last.seed
            if last.validation is not None:
                made["validation"] = validation_body(last.validation)
        return made

    def _status(self, block: chat_api.Block) -> str:
        return "incomplete" if self.blocks.is_cut(block) else "completed"

    def _item(self, block: chat_api.Block, status: str, *, empty: bool = False) -> JSON:
        """Return an output item. empty: as it is when it is added."""
        made: JSON = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            arguments = "" if empty else block.text
            return {**made, "type": "function_call", "call_id": block.id, "name": block.name, "arguments": arguments}
        content = iter(() if empty else (self._part(block),))
        if block.kind == "reasoning":
            texts = {"summary": content} if self._summarizes else {"summary": [], "content": content}
            return {**made, "type": "reasoning", **texts}
        return {**made, "type": "message", "role": "assistant", "content": content}

    def _part(self, block: chat_api.Block, *, empty: bool = False) -> JSON:
        text = "" if empty else block.text
        if block.kind == "reasoning":
            return {"type": "summary_text" if self._summarizes else "reasoning_text", "text": text}
        steps = self._steps(block, () if empty else block.logprobs)
        return {"type": "output_text", "text": text, "annotations": [], **steps}

    def _item_id(self, block: chat_api.Block) -> str:
        return f"{ID_PREFIXES[block.kind]}_{self._id}_{block.index}"


def _state(status: str) -> JSON:
    """Return the fields of a response that change."""
    nothing = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
    return {"status": status, "output": [], **nothing}


def _usage(usage: Usage) -> JSON:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
INCLUDABLE = (
    *(LOGPROBS, ENCRYPTED, "file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
"""The values of ``include``. Only the first has an effect: there is nothing of the others."""
MAX_METADATA, METADATA = 16, "an object with at most 16 strings"
_OWN: Mapping[str, fields.Field] = {
    "input": fields.Field(fields.TEXT_OR_LIST, "A text, or messages, reasoning, function calls and their outputs."),
    "instructions": fields.Field(fields.TEXT, "A system message before the input."),
    "text": fields.Field(fields.OBJECT, "format: text, json_object or json_schema, with its name, schema and strict."),
    "reasoning": fields.Field(fields.OBJECT, "effort; other fields have no effect."),
    "include": fields.Field(fields.ARRAY, "message.output_text.logprobs; other values have no effect."),
    "metadata": fields.Field(
        {**fields.OBJECT, "maxProperties": MAX_METADATA}, "Texts that the response repeats.", METADATA
    ),
    "truncation": fields.Field(
        {"enum": ["auto", "disabled"]}, "No effect: an input that does not fit the context is an error."
    ),
    "store": fields.Field(fields.BOOLEAN, "No effect: nothing is stored."),
    "tools": fields.Field(fields.ARRAY, "Tools of type function."),
    **dict.fromkeys(
        [
            *("user", "safety_identifier", "service_tier", "max_tool_calls"),  # the latter is about OpenAI's own tools
            *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        ],
        fields.NO_EFFECT,
    ),
    "background": fields.unsupported(False),
    "context_management": fields.unsupported([]),
    **dict.fromkeys(("conversation", "moderation", "prompt"), fields.unsupported()),
    "previous_response_id": fields.unsupported(
        instead="; this server stores no responses: send the whole conversation as input"
    ),
}
_REASONING = ("effort", "summary", "generate_summary", "mode", "context")
_TEXT = {"format": fields.ANY, "verbosity": TEMPLATE_FIELDS["verbosity"]}
_ECHOED = ("instructions", "tools", "tool_choice", "text", "reasoning")
RESPONSE_FIELDS: Mapping[str, fields.Declared] = {
    **chat_api.sampling_fields(),
    **{name: field for name, field in TEMPLATE_FIELDS.items() if name not in ("reasoning_effort", "verbosity")},
    **{name: fields.COMMON[name] for name in ("model", "stream", "stream_options")},
    **chat_api.ENGINE_FIELDS,
    **TOOL_FIELDS,
    "max_output_tokens": fields.MAX_COMPLETION_TOKENS,
    "top_logprobs": fields.TOP_LOGPROBS,
    **_OWN,
}


@chat_api.translator
def translate(body: Any) -> chat_api.Translation:
    """Translate a decoded body. Raises ParameterError."""
    given = fields.present_fields(body, RESPONSE_FIELDS)
    if "input" not in given:
        raise ParameterError("input", "input is missing")
    made = {name: value for name, value in given.items() if name not in _OWN}
    made["messages"] = read_input(given["input"], given.get("instructions"))
    if "max_output_tokens" in made:
        made["max_completion_tokens"] = made.pop("max_output_tokens")
    if "tools" in given:
        made["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given["tools"])]
    made |= _logprobs(given) | _text(given.get("text", {}))
    reasoning = fields.present_fields(given.get("reasoning", {}), _REASONING, "reasoning", "reasoning")
    if "effort" in reasoning:
        made["reasoning_effort"] = reasoning["effort"]
    metadata = given.get("metadata", {})
    if len(metadata) > MAX_METADATA or not all(isinstance(text, str) for text in metadata.values()):
        raise invalid_value("metadata", METADATA, metadata)
    echoed = {name: value for name, value in given.items() if name in _ECHOED} | {"metadata": metadata}
    return chat_api.Translation(made, partial(ResponseEncoder, echoed))


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise invalid_value(where, "a tool of type function", tool if kind is None else kind, "tools")
    known = ("type", "name", "description", "parameters", "strict")
    no_effect = ("allowed_callers", "async", "defer_loading", "output_schema")
    given = fields.present_fields(tool, (*known, *no_effect), where, "tools")
    return {"type": "function", "function": {name: given[name] for name in known[1:] if name in given}}


def _logprobs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for logprobs: ``top_logprobs`` above 0 requests them as well."""
    include = given.get("include", [])
    for index, value in enumerate(include):
        if value not in INCLUDABLE:
            raise invalid_value(f"include[{index}]", f"one of {', '.join(INCLUDABLE)}", value, "include")
    top = given.get("top_logprobs", 0)
    if LOGPROBS in include or not fields.json_equal(top, 0):
        return {"logprobs": True, "top_logprobs": top}
    return {"top_logprobs": None}


def _text(value: Any) -> dict[str, Any]:
    given = fields.present_fields(value, _TEXT, "text", "text")
    made = {"verbosity": given["verbosity"]} if "verbosity" in given else {}
    return made | _format(given["format"]) if "format" in given else made


def _format(value: Any) -> dict[str, Any]:
    known = ("type", "name", "schema", "strict", "description")
    wanted = fields.present_fields(value, known, "text.format", "text")
    if wanted.get("type") != "json_schema":
        return {"response_format": wanted}
    schema = {name: wanted[name] for name in known[1:] if name in wanted}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


RESPONSES = chat_api.ChatAPI(
    "/v1/responses",
    translate,
    chat_api.renames(
        (r"max_completion_tokens", "max_output_tokens"),
        (r"response_format\.json_schema", "text.format"),
        (r"response_format", "text.format"),
        (r"messages", "input"),
        (r"reasoning_effort", "reasoning.effort"),
        (r"verbosity", "text.verbosity"),
        (r"(tools\[\d+\])\.function", r"\1"),
    ),
    RESPONSE_FIELDS,
)
