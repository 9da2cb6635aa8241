"""Generates the OpenAPI 3.1 document: routes, request bodies and statuses. Response bodies are OpenAI's.

Also the page ``/docs``: a readable version of the document, without files of other servers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from typing import Any

from nucleate.parameters.parameter import Parameter
from nucleate.sampling.pipeline_format import KIND as PIPELINE
from nucleate.sampling.pipeline_format import MAX_STAGES
from nucleate.sampling.presets import REQUESTABLE
from nucleate.sampling_params import FIELDS
from nucleate.server.http_errors import ANTHROPIC, OLLAMA
from nucleate.server.limits import (
    LIMITED_FIELDS,
    MAX_CHARACTERS,
    MAX_ENTRIES,
    MAX_LOGPROBS_PER_RESPONSE,
    ServerLimits,
    max_entries,
)
from nucleate.server.messages_api import COUNT_FIELDS, MESSAGE_FIELDS
from nucleate.server.ollama_api import CHAT_FIELDS, GENERATE_FIELDS
from nucleate.server.ollama_routes import PULL, SHOW
from nucleate.server.openai.endpoints import CHAT, COMPLETIONS, ENDPOINTS, Endpoint
from nucleate.server.openai.fields import BOOLEAN, IDS, NAME, OBJECT, TEXT, Declared, Field, Schema, object_schema
from nucleate.server.openai.messages import DETOKENIZE, TOKENIZE
from nucleate.server.openai.requests import NON_EMPTY
from nucleate.server.responses_api import RESPONSE_FIELDS

_ABOUT = """OpenAI-compatible text generation, with every sampling parameter as a request field.

A field that is null counts as absent. Absent fields take the values of the server's flags, then of the model's
generation_config.json, then the defaults shown here. Values out of range and, by default, unknown fields are rejected
with status 400 and an error that names the field; nothing is dropped or clamped. Integers are written without a
fraction. The following rules involve several fields or the model:

- `stream_options` needs `stream`; in a chat, `top_logprobs` needs `logprobs`.
- `min_tokens` is at most `max_tokens`; `max_completion_tokens` and `max_tokens` are equal if both are set.
- `n` is at most `best_of`; a stream has no `best_of` above `n`.
- Beam search fields need `use_beam_search`, which excludes streams, logprobs with echo, and all fields for sampling or
  other stop criteria; `num_beam_groups` divides `best_of`.
- `truncate_prompt_tokens` excludes `echo` of a completion and `suffix`. `priority` other than 0 needs a server that
  allows it.
- `suffix` needs prompts of text and a model with fill-in-the-middle tokens; it excludes `echo` and beam search.
- `dynamic_temperature_low` and `dynamic_temperature_high` are set together, the former at most the latter.
- A list in `order` names every stage that the request uses.
- A list of texts has at most {max_characters} characters in total; token ids in lists count as characters.
- At most one of `response_format` (unless its type is text), `structured_outputs` and `grammar` is set. The constraint
  must be enforceable and within size limits. `grammar_lazy` and `grammar_triggers` are set together, with `grammar`.
- `tool_choice` other than none and auto needs `tools`, and names one of them; tools exclude fields of beam search.
  `structured_outputs` and `grammar` exclude required tool calls.
- Requests of other APIs (`/v1/responses`, `/v1/messages`, `/api/chat`, `/api/generate`) become chat completions, with
  the same rules.
- Token ids are in the vocabulary; prompt and completion fit the model's context length.
- A request has at most {max_choices} choices, and a response at most {max_logprobs} logprobs and echoed tokens.
"""
_ERRORS = {
    "400": "A field is unknown, missing or invalid; `param` names it.",
    "401": "The API key is missing or invalid.",
    "403": "The server does not allow this.",
    "404": "The model does not exist.",
    "408": "The request body did not arrive in time.",
    "413": "The request body is too large.",
    "415": "The request body is not application/json.",
    "500": "Internal server error.",
    "502": "The download from the hub failed.",
    "503": "The server is at capacity or shutting down; retry after Retry-After seconds.",
    "504": "The request timed out.",
}
_BODY_ERRORS = ("400", "404", "408", "413", "415", "503", "504")
_MORE_ERRORS = {"/api/pull": ("403", "502")}
_POST = {
    "/v1/completions": ("Complete prompts; a stream ends with [DONE]", "CompletionRequest"),
    "/v1/chat/completions": ("Complete a chat; a stream ends with [DONE]", "ChatRequest"),
    "/tokenize": ("Tokenize a text or a chat", "TokenizeRequest"),
    "/detokenize": ("Convert token ids to text", "DetokenizeRequest"),
    "/v1/responses": ("Create a response (OpenAI's Responses API), without storing it", "ResponseRequest"),
    "/v1/messages": ("Create a message (Anthropic's API)", "MessageRequest"),
    "/v1/messages/count_tokens": ("Count the tokens of messages (Anthropic's API)", "CountTokensRequest"),
    "/api/chat": ("Complete a chat (Ollama's API)", "OllamaChatRequest"),
    "/api/generate": ("Complete a prompt (Ollama's API)", "OllamaGenerateRequest"),
    "/api/show": ("Describe the model (Ollama's API)", "OllamaShowRequest"),
    "/api/pull": ("Download a model, if the server allows it (Ollama's API)", "OllamaPullRequest"),
}
_STREAMS = {
    **dict.fromkeys((*ENDPOINTS, "/v1/responses", "/v1/messages"), "text/event-stream"),
    **dict.fromkeys(("/api/chat", "/api/generate", "/api/pull"), "application/x-ndjson"),
}
"""The content type of streams, by path."""
_GET = {
    "/v1/models": ("List models", ()),
    "/v1/models/{model}": ("Describe a model", ("404",)),
    "/tokenizer_info": ("Describe the tokenizer", ()),
    "/health": ("Check whether the server accepts requests", ("503",)),
    "/ping": ("Same as /health, as in Amazon SageMaker", ("503",)),
    "/load": ("Return the number of requests in flight", ()),
    "/version": ("Return the version of the server", ()),
    "/metrics": ("Return Prometheus metrics", ()),
    "/openapi.json": ("Return this document", ()),
    "/docs": ("Show this document as a page", ()),
    "/api/tags": ("List models (Ollama's API)", ()),
    "/api/ps": ("List models that are loaded (Ollama's API)", ()),
    "/api/version": ("Return the version of Ollama's API", ()),
}
_KINDS = {"/metrics": "text/plain", "/docs": "text/html"}
_OPEN = frozenset({"/health", "/ping", "/docs"})
"""Paths that need no API key."""
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_ERROR = object_schema(
    "error",
    error=object_schema(
        *("message", "type", "param", "code"), message=TEXT, type=TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL
    ),
)
_ANTHROPIC_ERROR = object_schema(
    *("type", "error", "request_id"),
    type={"const": "error"},
    error=object_schema("type", "message", type=TEXT, message=TEXT),
    request_id=_TEXT_OR_NULL,
)
_OLLAMA_ERROR = object_schema("error", error=TEXT)
_FORMATS = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR, "OllamaError": _OLLAMA_ERROR}


def document(
    name: str,
    version: str,
    limits: ServerLimits,
    *,
    needs_key: bool = False,
    root_path: str = "",
    ignore_unknown: bool = False,
) -> dict[str, Any]:
    """Return the document. name: the served model. needs_key: whether most routes need an API key.

    root_path: the path prefix of a proxy in front. ignore_unknown: whether unknown fields of a body are ignored.
    """
    about = _ABOUT.format(
        max_choices=limits.max_choices_per_request,
        max_logprobs=MAX_LOGPROBS_PER_RESPONSE,
        max_characters=MAX_CHARACTERS,
    )
    schemas = {
        "CompletionRequest": endpoint_schema(COMPLETIONS, limits, ignore_unknown=ignore_unknown),
        "ChatRequest": endpoint_schema(CHAT, limits, ignore_unknown=ignore_unknown),
        "TokenizeRequest": body_schema(TOKENIZE, limits),
        "DetokenizeRequest": body_schema(DETOKENIZE, limits, "tokens"),
        **api_schemas(limits, ignore_unknown=ignore_unknown),
    }
    for schema in schemas.values():
        schema["properties"]["model"]["examples"] = [name]
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "nucleate",
            "version": version,
            "description": about,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": _paths(needs_key=needs_key),
        "components": {
            "schemas": {**schemas, **_FORMATS},
            "responses": {
                f"{name}{status}": {"description": why, **_json(name)}
                for name in _FORMATS
                for status, why in _ERRORS.items()
            },
        },
    }
    if root_path:
        made["servers"] = [{"url": root_path}]
    if needs_key:
        made["security"] = [{"key": []}]
        other = {"type": "apiKey", "in": "header", "name": "x-api-key"}
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}, "x-api-key": other}
    return made


def _paths(*, needs_key: bool) -> dict[str, Any]:
    def operation(path: str, about: str, kinds: Iterable[str], errors: Iterable[str], **more: Any) -> dict[str, Any]:
        name = _error_format(path)
        if needs_key and name == "AnthropicError":
            more["security"] = [{"key": []}, {"x-api-key": []}]
        statuses = sorted({*errors, "500", *(("401",) if needs_key and more.get("security") != [] else ())})
        errors_by_status = {status: {"$ref": f"#/components/responses/{name}{status}"} for status in statuses}
        success = {"description": "Success.", "content": {kind: {} for kind in kinds}}
        return {"summary": about, **more, "responses": {"200": success, **errors_by_status}}

    paths: dict[str, Any] = {}
    for path, (about, schema) in _POST.items():
        kinds = ("application/json", *((_STREAMS[path],) if path in _STREAMS else ()))
        body = {"required": True, **_json(schema)}
        paths[path] = {
            "post": operation(path, about, kinds, _BODY_ERRORS + _MORE_ERRORS.get(path, ()), requestBody=body)
        }
    for path, (about, errors) in _GET.items():
        kinds = (_KINDS.get(path, "application/json"),)
        paths[path] = {"get": operation(path, about, kinds, errors, **({"security": []} if path in _OPEN else {}))}
    paths["/ping"]["post"] = {**paths["/ping"]["get"], "summary": "Same as GET /ping"}
    model = {"name": "model", "in": "path", "required": True, "description": "The model name.", "schema": NAME}
    paths["/v1/models/{model}"]["get"]["parameters"] = [model]
    return paths


def _error_format(path: str) -> str:
    return "AnthropicError" if path.startswith(ANTHROPIC) else "OllamaError" if path.startswith(OLLAMA) else "Error"


def _json(schema: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}}


MAX_FLOAT = sys.float_info.max
_STAGE = object_schema("stage", stage=NAME)


def body_schema(
    fields: Mapping[str, Declared], limits: ServerLimits, *required: str, ignore_unknown: bool = False
) -> Schema:
    """Return the schema of a body with these fields. ignore_unknown: others are allowed.

    Every accepted body conforms to it. It does not express rules over several fields, the total length of lists, the
    vocabulary and the content of objects; the document describes them in prose. The server accepts integers only
    without a fraction, although JSON Schema also allows 1.0.
    """
    properties = {name: _schema(declared, limits, nullable=name not in required) for name, declared in fields.items()}
    others = {} if ignore_unknown else {"type": "null"}
    return {**OBJECT, "properties": properties, "required": [*required], "additionalProperties": others}


def endpoint_schema(endpoint: Endpoint, limits: ServerLimits, *, ignore_unknown: bool = False) -> Schema:
    """Return the schema of a body of an OpenAI endpoint, with all of its fields."""
    made = body_schema({**FIELDS, **endpoint.fields}, limits, *endpoint.prompt_fields, ignore_unknown=ignore_unknown)
    fields = made["properties"]
    fields["max_tokens"]["default"] = limits.cap_max_tokens(endpoint).max_tokens
    text = "Random seed, a signed or unsigned integer of 64 bits; -1 or null: a random one"
    fields["seed"] |= {"minimum": -(2**63), "description": text}
    if endpoint.completes_prompts:
        fields["max_tokens"] |= {"minimum": 0, "description": f"{FIELDS['max_tokens'].help}; 0 only with echo"}
        several = [{**_list_schema(one, limits.max_choices_per_request), "minItems": 1} for one in (TEXT, IDS)]
        fields["prompt"]["anyOf"] = [TEXT, {**IDS, "minItems": 1}, *several]
    return made


def api_schemas(limits: ServerLimits, *, ignore_unknown: bool = False) -> dict[str, Schema]:
    """Return the schemas of the bodies of other APIs, by name."""
    shared = endpoint_schema(CHAT, limits)["properties"]

    def schema(fields: Mapping[str, Declared], *required: str) -> Schema:
        made = body_schema(fields, limits, *required, ignore_unknown=ignore_unknown)
        made["properties"] |= {name: dict(shared[name]) for name in fields if fields[name] is FIELDS.get(name)}
        return made

    return {
        "ResponseRequest": schema(RESPONSE_FIELDS, "input"),
        "MessageRequest": schema(MESSAGE_FIELDS, "messages", "max_tokens"),
        "CountTokensRequest": schema(COUNT_FIELDS, "messages"),
        "OllamaChatRequest": schema(CHAT_FIELDS, "messages"),
        "OllamaGenerateRequest": schema(GENERATE_FIELDS, "prompt"),
        "OllamaShowRequest": schema(SHOW),
        "OllamaPullRequest": schema(PULL),
    }


def _schema(declared: Declared, limits: ServerLimits, *, nullable: bool) -> Schema:
    if isinstance(declared, Field):
        made = dict(declared.schema)
    else:
        made = dict(_value_schema(declared, limits))
        default = declared.default
        if isinstance(default, Mapping | tuple):
            default = {str(key): one for key, one in default.items()} if isinstance(default, Mapping) else [*default]
        if default is not MISSING:
            made["default"] = None if declared.name in NON_EMPTY else default
    if nullable and "anyOf" in made:
        made["anyOf"] = [*made["anyOf"], {"type": "null"}]
    elif nullable:
        made |= {"type": [made["type"], "null"]} if "type" in made else {}
        made |= {"enum": [*made["enum"], None]} if "enum" in made else {}
    return {**made, "description": declared.help}


def _value_schema(parameter: Parameter, limits: ServerLimits) -> Schema:
    names, kind = {"type": "string", "enum": [*parameter.choices]}, parameter.kind
    if kind == "str | tuple[str, ...]":
        return {"anyOf": [names, {"type": "array", "items": {"enum": [*REQUESTABLE]}, "uniqueItems": True}]}
    if kind in ("bool", "str", "StructuredOutputs", PIPELINE):
        stages = {**_list_schema(_STAGE, MAX_STAGES), "minItems": 1}
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
    if limits.max_logprobs == -1 and LIMITED_FIELDS.get(parameter.name) == "max_logprobs":
        low = -1
    high = parameter.high if is_int or parameter.high is not None else MAX_FLOAT
    highest = min((bound for bound in (high, limits.max_value(parameter.name)) if bound is not None), default=None)
    schema: Schema = {"type": "integer" if is_int else "number"}
    if low is not None:
        schema["exclusiveMinimum" if parameter.open_low else "minimum"] = low
    if highest is not None:
        schema["maximum"] = highest
    return schema


def _list_schema(items: Schema, most: int | None) -> Schema:
    schema: Schema = {"type": "array", "items": items}
    return schema if most is None else {**schema, "maxItems": most}
