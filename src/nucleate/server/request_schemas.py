"""Generates the JSON schemas of request bodies from the parameters and limits.

Every accepted body conforms to its schema. The schemas do not express rules over several fields, the total length of
lists, the vocabulary and the content of objects; the OpenAPI document describes them in prose. The server accepts
integers only without a fraction, although JSON Schema also allows 1.0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from nucleate.chat.reasoning import EFFORTS
from nucleate.chat.tools import MAX_TOOLS, MODES
from nucleate.chat.tools import NAME as TOOL_NAME
from nucleate.engine.beam_params import BeamParams
from nucleate.parameters.parameter import Parameter
from nucleate.sampling.pipeline_format import KIND as PIPELINE
from nucleate.sampling.pipeline_format import MAX_STAGES
from nucleate.sampling.presets import REQUESTABLE
from nucleate.sampling_params import FIELDS
from nucleate.server import messages_api, ollama_api, responses_api
from nucleate.server.limits import MAX_CHARACTERS, MAX_ENTRIES, ServerLimits, max_entries
from nucleate.server.openai.endpoints import CHAT, Endpoint
from nucleate.server.openai.fields import BEAM_PARAMETER_FIELDS, USE_BEAM_SEARCH
from nucleate.server.openai.messages import MAX_MESSAGES, TEMPLATE_FIELDS
from nucleate.server.openai.requests import NON_EMPTY
from nucleate.server.openai.response_format import GRAMMAR, GRAMMAR_LAZY, GRAMMAR_TRIGGERS, RESPONSE_FORMAT
from nucleate.structured_output.grammar_triggers import MAX_TRIGGERS

Schema = dict[str, Any]

MAX_FLOAT = sys.float_info.max
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
TEXT: Schema = {"type": "string"}
NULL: Schema = {"type": "null"}
NAME: Schema = {"type": "string", "minLength": 1}
STAGE: Schema = {**OBJECT, "properties": {"stage": NAME}, "required": ["stage"]}
INT64: Schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}


_FUNCTION: Schema = {
    **OBJECT,
    "properties": {
        "name": {"type": "string", "pattern": f"^{TOOL_NAME}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["name"],
    "additionalProperties": False,
}
_TOOL: Schema = {
    **OBJECT,
    "properties": {"type": {"enum": ["function", None]}, "function": _FUNCTION},
    "required": ["function"],
    "additionalProperties": False,
}
_CALL: Schema = {
    **OBJECT,
    "properties": {"id": {"type": ["string", "null"]}, "function": OBJECT},
    "required": ["function"],
}


def body_schema(endpoint: Endpoint, limits: ServerLimits, *, ignore_unknown: bool = False) -> Schema:
    """Return the schema of a body of an OpenAI endpoint, with all of its fields. ignore_unknown: others are allowed."""
    schemas = _endpoint_schemas(limits)
    fields = {name: field_schema(parameter, limits) for name, parameter in FIELDS.items()}
    fields["max_tokens"]["default"] = limits.cap_max_tokens(endpoint).max_tokens
    text = "Random seed, a signed or unsigned integer of 64 bits; -1 or null: a random one"
    fields["seed"] |= {"minimum": -(2**63), "description": text}
    if endpoint.completes_prompts:
        fields["max_tokens"] |= {"minimum": 0, "description": f"{FIELDS['max_tokens'].help}; 0 only with echo"}
    names = [*endpoint.prompt_fields, *sorted(endpoint.supported)]
    if "top_logprobs" in endpoint.supported:
        names.append("logprobs")
    properties = {**fields, **{name: schemas[name] for name in names}}
    properties |= {name: {"description": "No effect."} for name in sorted(endpoint.ignored)}
    for name, accepted in sorted(endpoint.unsupported.items()):
        properties[name] = {"enum": [None, *accepted], "description": "Not supported."}
    others = {} if ignore_unknown else NULL
    return {**_object_schema(properties, *endpoint.prompt_fields), "additionalProperties": others}


def tokenize_schema(limits: ServerLimits) -> Schema:
    """Return the schema of a body of /tokenize: a text or a chat."""
    schemas = _endpoint_schemas(limits)
    made = _object_schema(
        {
            "prompt": _nullable(TEXT, "The text to tokenize."),
            "messages": _nullable(schemas["messages"], "The chat to tokenize, instead of a text."),
            **{name: schemas[name] for name in ("model", "tools", *TEMPLATE_FIELDS)},
            "add_special_tokens": _nullable(BOOLEAN, "Add special tokens; by default only to a text."),
            "return_token_strs": _nullable(BOOLEAN, "Also return the tokens as strings."),
        }
    )
    return {**made, "additionalProperties": NULL}


def detokenize_schema(limits: ServerLimits) -> Schema:
    """Return the schema of a body of /detokenize."""
    made = _object_schema({"tokens": IDS, "model": _endpoint_schemas(limits)["model"]}, "tokens")
    return {**made, "additionalProperties": NULL}


def field_schema(parameter: Parameter, limits: ServerLimits) -> Schema:
    """Return the schema of a field of SamplingParams."""
    default = parameter.default
    if isinstance(default, Mapping | tuple):
        default = {str(key): value for key, value in default.items()} if isinstance(default, Mapping) else [*default]
    default = None if parameter.name in NON_EMPTY else default
    return {**_nullable(_value_schema(parameter, limits), parameter.help), "default": default}


def _value_schema(parameter: Parameter, limits: ServerLimits) -> Schema:
    names, kind = {"type": "string", "enum": [*parameter.choices]}, parameter.kind
    if kind == "str | tuple[str, ...]":
        return {"anyOf": [names, {"type": "array", "items": {"enum": [*REQUESTABLE]}, "uniqueItems": True}]}
    if kind in ("bool", "str", "StructuredOutputs", PIPELINE):
        stages = {**_list_schema(STAGE, MAX_STAGES), "minItems": 1}
        return {"bool": BOOLEAN, "str": names, "StructuredOutputs": OBJECT, PIPELINE: stages}[kind]
    if kind in ("float", "int"):
        number = _number_schema(parameter, limits)
        return {"anyOf": [number, {"enum": [*parameter.off]}]} if parameter.off else number
    if kind == "Mapping[int, float]":
        values = {"type": "number", "minimum": -MAX_FLOAT, "maximum": MAX_FLOAT}
        keys = {"pattern": "^[0-9]+$", "maxLength": 20}
        return {**OBJECT, "propertyNames": keys, "additionalProperties": values, "maxProperties": MAX_ENTRIES}
    if kind == "tuple[int, ...]":
        most = None if parameter.name == "allowed_token_ids" else max_entries(parameter.name)
        return _list_schema(_number_schema(parameter, limits), most)
    text = {**NAME, "maxLength": MAX_CHARACTERS}
    ids = _list_schema(_number_schema(parameter, limits), MAX_CHARACTERS)
    words = {"anyOf": [text, {**ids, "minItems": 1}]}
    items = _list_schema(words if "int" in kind else text, max_entries(parameter.name))
    if parameter.name in NON_EMPTY:
        items["minItems"] = 1
    if kind == "str | tuple[int, ...]":
        items = ids
    return items if kind.startswith("tuple") and "int" in kind else {"anyOf": [text, items]}


def _number_schema(parameter: Parameter, limits: ServerLimits) -> Schema:
    is_int = "int" in parameter.kind
    low = parameter.low if is_int or parameter.low is not None else -MAX_FLOAT
    if limits.max_logprobs == -1 and parameter.name in ("logprobs", "prompt_logprobs"):
        low = -1
    high = parameter.high if is_int or parameter.high is not None else MAX_FLOAT
    highest = min((bound for bound in (high, limits.max_value(parameter.name)) if bound is not None), default=None)
    schema: Schema = {"type": "integer" if is_int else "number"}
    if low is not None:
        schema["exclusiveMinimum" if parameter.open_low else "minimum"] = low
    if highest is not None:
        schema["maximum"] = highest
    return schema


def _endpoint_schemas(limits: ServerLimits) -> dict[str, Schema]:
    """Return the schemas of fields that SamplingParams does not have, or has with another meaning."""
    part = {**OBJECT, "properties": {"type": {"const": "text"}, "text": TEXT}, "required": ["type", "text"]}
    message = {"role": NAME, "content": {"anyOf": [TEXT, _list_schema(part, None), {"type": "null"}]}}
    message["tool_calls"] = {"type": ["array", "null"], "items": _CALL}
    messages = _list_schema({**OBJECT, "properties": message, "required": ["role"]}, MAX_MESSAGES)
    several = ({**_list_schema(one, limits.max_choices_per_request), "minItems": 1} for one in (TEXT, IDS))
    prompt = {"anyOf": [TEXT, {**IDS, "minItems": 1}, *several]}
    declared = {name: BeamParams.PARAMETERS.get(name) for name in BEAM_PARAMETER_FIELDS}
    searching = {
        name: _nullable(_number_schema(parameter, limits), f"With use_beam_search: {parameter.help}")
        for name, parameter in declared.items()
        if parameter is not None
    }
    return {
        "prompt": {**prompt, "description": "Text or token ids, or a list of either."},
        "messages": {**messages, "minItems": 1, "description": "The chat messages; text and tool calls."},
        "tools": _nullable(_list_schema(_TOOL, MAX_TOOLS), "The tools that the model may call."),
        "tool_choice": {
            "anyOf": [{"enum": [None, *MODES]}, NAME, OBJECT],
            "description": "Whether and which tools are called: none, auto, required, or one by name.",
        },
        "parallel_tool_calls": _nullable(BOOLEAN, "Allow several tool calls; the default."),
        "reasoning_effort": _nullable({"type": "string", "enum": [*EFFORTS]}, "Variable for the chat template."),
        "max_completion_tokens": field_schema(FIELDS["max_tokens"], limits),
        "top_logprobs": {
            **field_schema(FIELDS["logprobs"], limits),
            "description": "Number of top logprobs per token, with logprobs.",
        },
        "best_of": _nullable(
            _number_schema(FIELDS["n"], limits),
            "Generate this many sequences and return the n with the highest mean logprob.",
        ),
        "logprobs": _nullable(BOOLEAN, "Return logprobs; top_logprobs is the number."),
        "echo": _nullable(
            BOOLEAN,
            "Start each completion with its prompt; in a chat, with the final message if it is the assistant's.",
        ),
        "priority": _nullable(INT64, "Lower runs first; other than 0 needs --scheduling-policy priority."),
        "truncate_prompt_tokens": _nullable(
            {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 2**63 - 1}, {"enum": [-1]}]},
            "Keep so many tokens of the prompt; -1: as many as fit the context.",
        ),
        "truncation_side": _nullable(
            {"type": "string", "enum": ["left", "right"]}, "The side on which tokens are removed; by default left."
        ),
        "return_token_ids": _nullable(BOOLEAN, "Also return prompt_token_ids; token_ids are always returned."),
        "return_tokens_as_token_ids": _nullable(BOOLEAN, "In logprobs, write tokens as token_id:ID."),
        "suffix": _nullable(TEXT, "Text after the output, for models with fill-in-the-middle tokens."),
        "stream": _nullable(BOOLEAN, "Stream the response as server-sent events."),
        "stream_options": _nullable(OBJECT, "With stream: include_usage, continuous_usage_stats."),
        "add_generation_prompt": _nullable(BOOLEAN, "Append the header of the assistant's next message; the default."),
        "continue_final_message": _nullable(BOOLEAN, "Continue the final message instead of adding one."),
        "add_special_tokens": _nullable(BOOLEAN, "Add special tokens to those of the chat template."),
        "split_special_tokens": _nullable(
            BOOLEAN, "Special tokens in messages are text; the default. If false, they become special tokens."
        ),
        "chat_template_kwargs": _nullable(OBJECT, "Additional variables for the chat template."),
        "model": _nullable(NAME, "The model name."),
        RESPONSE_FORMAT: _nullable(OBJECT, "Structured output as in OpenAI's API; strict by default."),
        GRAMMAR: _nullable(TEXT, "A grammar in GBNF or Lark, as in llama.cpp."),
        GRAMMAR_LAZY: _nullable(BOOLEAN, "Apply the grammar from a trigger on only."),
        GRAMMAR_TRIGGERS: _nullable(
            _list_schema(OBJECT, MAX_TRIGGERS), "With grammar_lazy: objects with type and value."
        ),
        USE_BEAM_SEARCH: _nullable(BOOLEAN, "Use beam search with best_of (or n) beams instead of sampling."),
        "early_stopping": {"enum": [False, True, "never", None], "description": "With use_beam_search: when to stop."},
        **searching,
    }


def _list_schema(items: Schema, most: int | None) -> Schema:
    schema: Schema = {"type": "array", "items": items}
    return schema if most is None else {**schema, "maxItems": most}


def _object_schema(properties: Mapping[str, Schema], *required: str) -> Schema:
    """Return the schema of an object with these properties only."""
    return {**OBJECT, "properties": dict(properties), "required": [*required], "additionalProperties": False}


def _nullable(schema: Schema, about: str) -> Schema:
    """Return a nullable schema with a description."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}], "description": about}
    nullable = {**schema, "type": [schema["type"], "null"], "description": about}
    return {**nullable, "enum": [*schema["enum"], None]} if "enum" in schema else nullable


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
    "metadata": _field("Texts that the response repeats.", "object", maxProperties=responses_api.MAX_METADATA),
    "truncation": {
        "enum": [*responses_api.TRUNCATIONS, None],
        "description": "No effect: an input that does not fit the context is an error.",
    },
    "store": _field("No effect: nothing is stored.", "boolean"),
    "tools": _field("Tools of type function.", "array"),
    **{
        name: {"enum": [None, *accepted], "description": "Not supported."}
        for name, accepted in responses_api.UNSUPPORTED.items()
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
        "enum": [True, False, *ollama_api.LEVELS, None],
        "description": "Whether, or how much, the model reasons.",
    },
    "system": _field("A system message.", "string"),
    "suffix": _field("Text after the output.", "string"),
    "raw": _field("Complete the prompt without the chat template.", "boolean"),
    **dict.fromkeys(("images", *ollama_api.UNSUPPORTED), _EMPTY_ONLY),
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
        "ResponseRequest": schema(responses_api.field_names(), _RESPONSE, "input"),
        "MessageRequest": schema(messages_api.field_names(), _MESSAGE, "messages", "max_tokens"),
        "CountTokensRequest": schema(messages_api.COUNT_FIELDS, _MESSAGE, "messages"),
        "OllamaChatRequest": schema(ollama_api.CHAT_FIELDS, _OLLAMA, "messages"),
        "OllamaGenerateRequest": schema(ollama_api.GENERATE_FIELDS, _OLLAMA, "prompt"),
        "OllamaShowRequest": schema(ollama_api.SHOW, _SHOW),
    }
