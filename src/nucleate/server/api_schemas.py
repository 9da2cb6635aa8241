"""Generates the JSON schemas of request bodies of other APIs, without the content of lists and objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nucleate.server.anthropic import count_tokens, message_request
from nucleate.server.limits import ServerLimits
from nucleate.server.ollama import ollama_options, ollama_request, ollama_routes
from nucleate.server.openai.endpoints import CHAT
from nucleate.server.request_schemas import BOOLEAN, NULL, OBJECT, TEXT, Schema, body_schema
from nucleate.server.responses import response_request

_LIST: Schema = {"type": "array", "items": OBJECT, "minItems": 1}
_TEXT_OR_LIST: Schema = {"anyOf": [TEXT, _LIST]}
_EMPTY_ONLY: Schema = {"enum": ["", 0, False, [], {}, None], "description": "Not supported."}
_NO_EFFECT: Schema = {"description": "No effect."}


def _field(description: str, *types: str, **more: object) -> Schema:
    return {"type": [*types, "null"], "description": description, **more}


_RESPONSE: Mapping[str, Schema] = {
    "input": {**_TEXT_OR_LIST, "description": "A text, or messages, reasoning, function calls and their outputs."},
    "instructions": _field("A system message before the input.", "string"),
    "text": _field("format: text, json_object or json_schema, with its name, schema and strict.", "object"),
    "reasoning": _field("effort; other fields have no effect.", "object"),
    "include": _field("message.output_text.logprobs; other values have no effect.", "array"),
    "metadata": _field("Texts that the response repeats.", "object", maxProperties=response_request.MAX_METADATA),
    "truncation": {
        "enum": [*response_request.TRUNCATIONS, None],
        "description": "No effect: an input that does not fit the context is an error.",
    },
    "store": _field("No effect: nothing is stored.", "boolean"),
    "tools": _field("Tools of type function.", "array"),
    **{
        name: {"enum": [None, *accepted], "description": "Not supported."}
        for name, accepted in response_request.UNSUPPORTED.items()
    },
}
_MESSAGE: Mapping[str, Schema] = {
    "messages": {**_LIST, "description": "The messages: texts, or blocks of text, thinking, tool uses and results."},
    "system": {"anyOf": [TEXT, {"type": "array"}, {"type": "null"}], "description": "The system message."},
    "stop_sequences": _field("Texts that end the output.", "array"),
    "tools": _field("Tools with name, description and input_schema.", "array"),
    "tool_choice": _field("type: auto, any, tool (with name) or none; disable_parallel_tool_use.", "object"),
    "thinking": _field("type: enabled (with budget_tokens), adaptive or disabled; display.", "object"),
    "output_config": _field("effort; format: json_schema with its schema.", "object"),
}
_OLLAMA: Mapping[str, Schema] = {
    "messages": {**_LIST, "description": "The messages, with role, content, thinking and tool_calls."},
    "prompt": {**TEXT, "minLength": 1, "description": "The prompt; a message of the user unless raw is set."},
    "stream": _field("Stream the response as lines of JSON; the default.", "boolean"),
    "options": _field("Ollama's options and every sampling parameter by its name.", "object"),
    "format": {"anyOf": [{"enum": ["", "json", None]}, OBJECT], "description": "json, or a JSON schema."},
    "think": {
        "enum": [True, False, *ollama_options.LEVELS, None],
        "description": "Whether, or how much, the model reasons.",
    },
    "system": _field("A system message.", "string"),
    "suffix": _field("Text after the output.", "string"),
    "raw": _field("Complete the prompt without the chat template.", "boolean"),
    **dict.fromkeys(("images", *ollama_request.UNSUPPORTED), _EMPTY_ONLY),
}
_SHOW: Mapping[str, Schema] = {"name": _field("The model name, if model is not set.", "string")}


def api_schemas(limits: ServerLimits, *, ignore_unknown: bool = False) -> dict[str, Schema]:
    """Return the schemas by name. ignore_unknown: other fields are allowed."""
    fields: dict[str, Schema] = body_schema(CHAT, limits)["properties"]
    fields["max_output_tokens"] = fields["max_completion_tokens"]
    logprobs = {"logprobs": {**BOOLEAN, "type": ["boolean", "null"], "description": "Return logprobs."}}

    def schema(names: Iterable[str], own: Mapping[str, Schema], *required: str) -> Schema:
        known = {**fields, **logprobs, **own}
        properties = {name: dict(known.get(name, _NO_EFFECT)) for name in sorted(names)}
        return {
            **OBJECT,
            "properties": properties,
            "required": [*required],
            "additionalProperties": {} if ignore_unknown else NULL,
        }

    return {
        "ResponseRequest": schema(response_request.field_names(), _RESPONSE, "input"),
        "MessageRequest": schema(message_request.field_names(), _MESSAGE, "messages", "max_tokens"),
        "CountTokensRequest": schema(count_tokens.FIELDS, _MESSAGE, "messages"),
        "OllamaChatRequest": schema(ollama_request.CHAT_FIELDS, _OLLAMA, "messages"),
        "OllamaGenerateRequest": schema(ollama_request.GENERATE_FIELDS, _OLLAMA, "prompt"),
        "OllamaShowRequest": schema(ollama_routes.SHOW, _SHOW),
    }
