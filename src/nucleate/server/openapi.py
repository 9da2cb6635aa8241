"""The OpenAPI 3.1 document of the server: its routes, what they take, what they answer. Knows no model and no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.server import answers
from nucleate.server.limits import Limits
from nucleate.server.schemas import NAME, TEXT, Schema, body_schema, detokenize_schema, tokenize_schema
from nucleate.server.wire.requests import CHAT, COMPLETIONS

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
- At most one of `response_format` (unless its type is text), `structured_outputs` and `structured` is there. Of
  `structured`, `policy` is for `json_schema`, and `whitespace` for JSON. What a form says must be possible to hold, and
  small enough: at most {max_form_characters} characters.
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
_TO_BODY = ("400", "408", "413", "415", "504")  # what a body can lead to, wherever it goes


def document(name: str, version: str, limits: Limits, *, keys: bool = False) -> dict[str, Any]:
    """The document. name: of the model that is served. keys: whether a key is needed, on all routes but /health."""
    about = _ABOUT.format(
        max_answers=limits.max_answers, max_told=limits.max_told, max_form_characters=limits.max_form_characters
    )
    schemas = {
        **answers.SCHEMAS,
        "CompletionRequest": body_schema(COMPLETIONS, limits),
        "ChatRequest": body_schema(CHAT, limits),
        "TokenizeRequest": tokenize_schema(limits),
        "DetokenizeRequest": detokenize_schema(limits),
    }
    for schema in (schemas[name] for name in schemas if name.endswith("Request")):
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
        "components": {"schemas": schemas, "headers": _HEADERS, "responses": _errors()},
    }
    if keys:
        made["security"] = [{"key": []}]
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return made


def _paths(*, keys: bool) -> dict[str, Any]:
    def operation(name: str, about: str, answer: Schema, *errors: str, **more: Any) -> dict[str, Any]:
        known = (*errors, "500", *(("401",) if keys and "security" not in more else ()))
        refused = {status: {"$ref": f"#/components/responses/Error{status}"} for status in sorted(known)}
        return {"operationId": name, "summary": about, **more, "responses": {"200": answer, **refused}}

    def takes(schema: str) -> dict[str, Any]:
        return {"required": True, "content": {"application/json": {"schema": _ref(schema)}}}

    model = {"name": "model", "in": "path", "required": True, "description": "the model's name", "schema": NAME}
    posted = {
        "/v1/completions": operation(
            "complete",
            "Continue prompts",
            _streamed("Completion", "CompletionChunk"),
            *(*_TO_BODY, "404", "503"),
            requestBody=takes("CompletionRequest"),
        ),
        "/v1/chat/completions": operation(
            "chat",
            "Answer in a conversation",
            _streamed("ChatCompletion", "ChatChunk"),
            *(*_TO_BODY, "404", "503"),
            requestBody=takes("ChatRequest"),
        ),
        "/tokenize": operation(
            "tokenize",
            "The token ids of a text or a conversation",
            _json("Tokens"),
            *(*_TO_BODY, "404", "503"),
            requestBody=takes("TokenizeRequest"),
        ),
        "/detokenize": operation(
            "detokenize",
            "The text of token ids",
            _json("Text"),
            *(*_TO_BODY, "404", "503"),
            requestBody=takes("DetokenizeRequest"),
        ),
    }
    got = {
        "/v1/models": operation("models", "The models that are here", _json("Models")),
        "/v1/models/{model}": operation("model", "One of them", _json("Model"), "404", parameters=[model]),
        "/tokenizer_info": operation("tokenizer", "What the tokenizer is", _json("Tokenizer")),
        "/health": operation("health", "Whether requests are answered", _json("Health"), "503", security=[]),
        "/version": operation("version", "The version of the server", _json("Version")),
        "/metrics": operation("metrics", "Figures for Prometheus", _answer({"text/plain": {"schema": TEXT}})),
        "/openapi.json": operation("openapi", "This document", _json("Document")),
    }
    return {path: {"post": made} for path, made in posted.items()} | {path: {"get": made} for path, made in got.items()}


def _ref(schema: str) -> Schema:
    return {"$ref": f"#/components/schemas/{schema}"}


def _answer(content: Mapping[str, Any], about: str = "The answer.", *headers: str) -> dict[str, Any]:
    told = {name: {"$ref": f"#/components/headers/{name}"} for name in (*headers, "X-Request-Id")}
    return {"description": about, "headers": told, "content": dict(content)}


def _json(schema: str) -> dict[str, Any]:
    return _answer({"application/json": {"schema": _ref(schema)}})


def _streamed(whole: str, chunk: str) -> dict[str, Any]:
    """An answer at once, or as server-sent events: chunks, maybe an error, and at the end [DONE]."""
    told = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [_ref(chunk), _ref("Error")]}}
    data = {"anyOf": [{"const": "[DONE]"}, {**TEXT, **told}]}
    event = {"type": "object", "required": ["data"], "properties": {"data": data}}
    return _answer({"application/json": {"schema": _ref(whole)}, "text/event-stream": {"x-itemSchema": event}})


_HEADERS = {
    "X-Request-Id": {"description": "names this request in the server's log", "required": True, "schema": NAME},
    "Retry-After": {"description": "seconds", "schema": {"type": "integer", "minimum": 0}},
    "WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}},
}
_OF_ERRORS = {"401": ("WWW-Authenticate",), "503": ("Retry-After",)}


def _errors() -> dict[str, Any]:
    content = {"application/json": {"schema": _ref("Error")}}
    return {f"Error{status}": _answer(content, about, *_OF_ERRORS.get(status, ())) for status, about in _ERRORS.items()}
