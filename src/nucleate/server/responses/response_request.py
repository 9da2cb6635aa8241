"""Translates request bodies of the Responses API to those of chat completions.

Nothing is stored: ``store`` has no effect, and fields that need stored responses are errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.server.chat_api import (
    ENGINE_FIELDS,
    ChatAPI,
    Translation,
    present_fields,
    read_list,
    renames,
    sampling_fields,
    translator,
)
from nucleate.server.openai.fields import invalid_value, json_equal, read_bool
from nucleate.server.openai.messages import TEMPLATE_FIELDS, TOOL_FIELDS
from nucleate.server.responses.input_items import read_input
from nucleate.server.responses.response_encoder import ResponseEncoder

URL = "/v1/responses"
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
INCLUDABLE = (
    *(LOGPROBS, ENCRYPTED, "file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
"""The values of ``include``. Only the first has an effect: there is nothing of the others."""
TRUNCATIONS = ("auto", "disabled")
MAX_METADATA = 16

_PASSED = frozenset(
    {"model", "stream", "stream_options", "max_output_tokens", "top_logprobs", *TOOL_FIELDS, *ENGINE_FIELDS}
)
_OWN = frozenset({"input", "instructions", "text", "reasoning", "include", "metadata", "truncation", "store"})
_ECHOED = ("instructions", "tools", "tool_choice", "text", "reasoning")
IGNORED = frozenset(
    [
        *("user", "safety_identifier", "service_tier", "max_tool_calls"),  # the latter is about OpenAI's own tools
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    ]
)
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "background": (False,),
        "context_management": ([],),
        **dict.fromkeys(("conversation", "moderation", "previous_response_id", "prompt"), ()),
    }
)
"""Unsupported fields, and their values without effect, which are accepted."""
_WHY = {"previous_response_id": "; this server stores no responses: send the whole conversation as input"}


def field_names() -> frozenset[str]:
    """Return the names of all fields of a body."""
    template = {name for name in TEMPLATE_FIELDS if name != "reasoning_effort"}
    return frozenset({*sampling_fields(), *template, *_PASSED, *_OWN, *IGNORED, *UNSUPPORTED})


@translator
def translate(body: Any) -> Translation:
    """Translate a decoded body. Raises ParameterError."""
    given = present_fields(body, field_names())
    for name, accepted in UNSUPPORTED.items():
        if name in given and not any(json_equal(given[name], one) for one in accepted):
            raise ParameterError(name, f"{name} is not supported, got {shown(given[name])}{_WHY.get(name, '')}")
    read_bool(given, "store")
    instructions = given.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise invalid_value("instructions", "a string", instructions)
    if "input" not in given:
        raise ParameterError("input", "input is missing")
    if given.get("truncation", "disabled") not in TRUNCATIONS:
        raise invalid_value("truncation", f"one of {', '.join(TRUNCATIONS)}", given["truncation"])
    made = {name: value for name, value in given.items() if name not in {*_OWN, *IGNORED, *UNSUPPORTED}}
    made["messages"] = read_input(given["input"], instructions)
    if "max_output_tokens" in made:
        made["max_completion_tokens"] = made.pop("max_output_tokens")
    if "tools" in made:
        made["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(read_list(made["tools"], "tools"))]
    made |= _logprobs(given) | _reasoning(given.get("reasoning", {})) | _text(given.get("text", {}))
    echoed = {name: value for name, value in given.items() if name in _ECHOED}
    echoed["metadata"] = _metadata(given.get("metadata", {}))
    return Translation(made, partial(ResponseEncoder, echoed))


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise ParameterError(
            "tools", f"{where} must be a tool of type function, got {shown(tool if kind is None else kind)}"
        )
    known = ("type", "name", "description", "parameters", "strict")
    no_effect = ("allowed_callers", "async", "defer_loading", "output_schema")
    given = present_fields(tool, (*known, *no_effect), where, "tools")
    return {"type": "function", "function": {name: given[name] for name in known[1:] if name in given}}


def _logprobs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for logprobs: ``top_logprobs`` above 0 requests them as well."""
    include = read_list(given.get("include", []), "include")
    for index, value in enumerate(include):
        if value not in INCLUDABLE:
            raise invalid_value(f"include[{index}]", f"one of {', '.join(INCLUDABLE)}", value, "include")
    top = given.get("top_logprobs", 0)
    return (
        {"logprobs": True, "top_logprobs": top}
        if LOGPROBS in include or not json_equal(top, 0)
        else {"top_logprobs": None}
    )


def _reasoning(value: Any) -> dict[str, Any]:
    given = present_fields(
        value, ("effort", "summary", "generate_summary", "mode", "context"), "reasoning", "reasoning"
    )
    return {"reasoning_effort": given["effort"]} if "effort" in given else {}


def _text(value: Any) -> dict[str, Any]:
    given = present_fields(value, ("format", "verbosity"), "text", "text")
    if given.get("verbosity", "medium") != "medium":
        raise ParameterError("text", f"text.verbosity is not supported, got {shown(given['verbosity'])}")
    if "format" not in given:
        return {}
    known = ("type", "name", "schema", "strict", "description")
    wanted = present_fields(given["format"], known, "text.format", "text")
    if wanted.get("type") != "json_schema":
        return {"response_format": wanted}
    schema = {name: wanted[name] for name in known[1:] if name in wanted}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _metadata(value: Any) -> Mapping[str, str]:
    texts = isinstance(value, Mapping) and all(isinstance(item, str) for item in value.values())
    if not isinstance(value, Mapping) or not texts or len(value) > MAX_METADATA:
        raise invalid_value("metadata", f"an object with at most {MAX_METADATA} strings", value)
    return value


RESPONSES = ChatAPI(
    URL,
    translate,
    renames(
        (r"max_completion_tokens", "max_output_tokens"),
        (r"response_format\.json_schema", "text.format"),
        (r"response_format", "text.format"),
        (r"messages", "input"),
        (r"reasoning_effort", "reasoning.effort"),
        (r"(tools\[\d+\])\.function", r"\1"),
    ),
    field_names(),
)
