"""The OpenAPI 3.1 document of the server: its routes, what they take, which statuses they answer. Knows no model.

Bodies of requests are described in full, as nowhere else; those of answers are OpenAI's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nucleate.server.limits import MAX_CHARACTERS, MAX_TOLD, ServerLimits
from nucleate.server.openai.requests import CHAT, COMPLETIONS, ENDPOINTS
from nucleate.server.request_schemas import NAME, TEXT, Schema, body_schema, detokenize_schema, tokenize_schema

_ABOUT = """Text from a language model: OpenAI's API, with every sampling parameter as a field.

A field that is null is as if it were not there. Where a request says nothing, what the model recommends in its
generation_config.json goes before the defaults that are shown. Fields that no route knows, and values out of range,
are refused with status 400 and an error that names the field; nothing is dropped or clamped. An integer is written
without a fraction. These rules are over more than one field, or need the model:

- `stream_options` needs `stream`; in a chat, `top_logprobs` needs `logprobs`.
- `min_tokens` is at most `max_tokens`; `max_completion_tokens` and `max_tokens`, if both are there, are the same.
- `n` is at most `best_of`, and a stream has no `best_of` above `n`.
- Fields of a beam search need `use_beam_search`, which has no stream, no logprobs of an echo, no field that says how
  to draw or when else to stop; and `beam_groups` divides `best_of`.
- `dynamic_temperature_low` and `dynamic_temperature_high` are there both or neither, and the former is not the higher.
- A list in `order` has a place for every stage that the request asks for.
- A list of texts has at most {max_characters} characters in all, token ids in lists counted as characters.
- At most one of `response_format` (unless its type is text), `structured_outputs` and `structured` is there. What a
  form says must be possible to hold, and not too large.
- Token ids are those of the vocabulary; prompt and answer are within the model's context.
- A request makes at most {max_answers} answers, and tells at most {max_told} logprobs and echoed tokens.
"""
_ERRORS = {
    "400": "A field is unknown, missing or out of range; `param` names it.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model here.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "500": "The server failed.",
    "503": "The server has no room for more requests now, or is ending; come again after Retry-After seconds.",
    "504": "The answer was not ready in time.",
}
_TO_BODY = ("400", "404", "408", "413", "415", "503", "504")
_POSTED = {
    "/v1/completions": ("Continue prompts; a stream ends with [DONE]", "CompletionRequest"),
    "/v1/chat/completions": ("Answer in a conversation; a stream ends with [DONE]", "ChatRequest"),
    "/tokenize": ("The token ids of a text or a conversation", "TokenizeRequest"),
    "/detokenize": ("The text of token ids", "DetokenizeRequest"),
}
_GOT = {
    "/v1/models": ("The models that are here", ()),
    "/v1/models/{model}": ("One of them", ("404",)),
    "/tokenizer_info": ("What the tokenizer is", ()),
    "/health": ("Whether requests are answered", ("503",)),
    "/version": ("The version of the server", ()),
    "/metrics": ("Figures for Prometheus", ()),
    "/openapi.json": ("This document", ()),
}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": TEXT,
                "type": TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(name: str, version: str, limits: ServerLimits, *, keys: bool = False) -> dict[str, Any]:
    """The document. name: of the model that is served. keys: whether a key is needed, on all routes but /health."""
    about = _ABOUT.format(max_answers=limits.max_answers, max_told=MAX_TOLD, max_characters=MAX_CHARACTERS)
    schemas = {
        "CompletionRequest": body_schema(COMPLETIONS, limits),
        "ChatRequest": body_schema(CHAT, limits),
        "TokenizeRequest": tokenize_schema(limits),
        "DetokenizeRequest": detokenize_schema(limits),
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
        "paths": _paths(keys=keys),
        "components": {
            "schemas": {**schemas, "Error": _ERROR},
            "responses": {f"Error{status}": {"description": why, **_json("Error")} for status, why in _ERRORS.items()},
        },
    }
    if keys:
        made["security"] = [{"key": []}]
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return made


def _paths(*, keys: bool) -> dict[str, Any]:
    def operation(about: str, kinds: Iterable[str], errors: Iterable[str], **more: Any) -> dict[str, Any]:
        known = sorted({*errors, "500", *(("401",) if keys and "security" not in more else ())})
        refused = {status: {"$ref": f"#/components/responses/Error{status}"} for status in known}
        answer = {"description": "The answer.", "content": {kind: {} for kind in kinds}}
        return {"summary": about, **more, "responses": {"200": answer, **refused}}

    paths: dict[str, Any] = {}
    for path, (about, schema) in _POSTED.items():
        kinds = ("application/json", "text/event-stream") if path in ENDPOINTS else ("application/json",)
        body = {"required": True, **_json(schema)}
        paths[path] = {"post": operation(about, kinds, _TO_BODY, requestBody=body)}
    for path, (about, errors) in _GOT.items():
        kinds = ("text/plain",) if path == "/metrics" else ("application/json",)
        paths[path] = {"get": operation(about, kinds, errors, **({"security": []} if path == "/health" else {}))}
    model = {"name": "model", "in": "path", "required": True, "description": "the model's name", "schema": NAME}
    paths["/v1/models/{model}"]["get"]["parameters"] = [model]
    return paths


def _json(schema: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}}
