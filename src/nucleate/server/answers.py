"""JSON Schemas of what is answered: the form of ``wire.responses`` and ``wire.chunks``, by name. Knows no values."""

from __future__ import annotations

from collections.abc import Mapping

from nucleate.server.schemas import NAME, TEXT, Schema, closed, optional
from nucleate.server.wire.logprobs import UNLIKELY


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(name: str) -> Schema:
    return {"anyOf": [_ref(name), {"type": "null"}]}


def _object(properties: Mapping[str, Schema], more: Mapping[str, Schema] | None = None) -> Schema:
    """An object with all of these properties, and maybe with more of those."""
    return closed({**properties, **(more or {})}, (*properties,))


COUNT: Schema = {"type": "integer", "minimum": 0}
LOGPROB: Schema = {"type": "number", "minimum": UNLIKELY}
_MESSAGE = {"role": {"const": "assistant"}, "content": TEXT, "refusal": {"type": "null"}}
_ASKED = {"asked_logprobs": _list(optional(_list(_ref("Logprob"))))}
_OF_PROMPT = {"prompt_logprobs": _list(_or_null("Step"))}
_LOGPROB = {
    "token": TEXT,
    "logprob": LOGPROB,
    "bytes": _list({"type": "integer", "minimum": 0, "maximum": 255}),
    "token_id": COUNT,
    "rank": optional({"type": "integer", "minimum": 1}),
}
_ENDS: dict[str, Schema] = {
    "finish_reason": {"enum": ["stop", "length", "abort"]},
    "stop_reason": {
        "type": ["string", "integer", "null"],
        "description": "what ended the answer: a stop string, a pattern or a token id; null for the end of sequence, "
        "and for a form that is complete",
    },
    "seed": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1, "description": "gives the same answer again"},
    "token_ids": _list(COUNT),
}
_GOES_ON = {
    **{name: schema for name, schema in _ENDS.items() if name != "stop_reason"},
    "finish_reason": {"enum": [*_ENDS["finish_reason"]["enum"], None]},
}
_WORTH = {
    "validation": closed({"ignored": _list(TEXT), "errors": _list(TEXT)})
    | {
        "description": "of a schema that was not held in full: its keywords that were not, and what is wrong with the "
        "answer by it; no errors mean that the answer is valid"
    }
}
_MAYBE = {**_OF_PROMPT, **_WORTH}
_LAST = {**_MAYBE, "stop_reason": _ENDS["stop_reason"]}


def _body(kind: str, choice: str) -> Mapping[str, Schema]:
    named = {"id": NAME, "object": {"const": kind}, "created": COUNT, "model": NAME}
    return {**named, "choices": _list(_ref(choice))}


SCHEMAS: Mapping[str, Schema] = {
    "Error": _object(
        {"error": _object({"message": TEXT, "type": NAME, "param": optional(TEXT), "code": optional(TEXT)})}
    ),
    "Usage": _object(dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), COUNT)),
    "Logprob": _object(_LOGPROB),
    "Step": _object({**_LOGPROB, "top_logprobs": _list(_ref("Logprob"))}, {"asked_logprobs": _list(_ref("Logprob"))}),
    "Columns": _object(
        {
            "tokens": _list(TEXT),
            "token_logprobs": _list(optional(LOGPROB)),
            "top_logprobs": _list(optional({"type": "object", "additionalProperties": LOGPROB})),
            "text_offset": _list(COUNT),
        },
        _ASKED,
    ),
    "Steps": _object({"content": _list(_ref("Step")), "refusal": {"type": "null"}}),
    "Completion": _object({**_body("text_completion", "CompletionChoice"), "usage": _ref("Usage")}),
    "CompletionChoice": _object({"index": COUNT, "text": TEXT, "logprobs": _or_null("Columns"), **_ENDS}, _MAYBE),
    "CompletionChunk": _object(_body("text_completion", "CompletionChunkChoice"), {"usage": _or_null("Usage")}),
    "CompletionChunkChoice": _object(
        {"index": COUNT, "text": TEXT, "logprobs": _or_null("Columns"), **_GOES_ON}, _LAST
    ),
    "ChatCompletion": _object({**_body("chat.completion", "ChatChoice"), "usage": _ref("Usage")}),
    "ChatChoice": _object(
        {"index": COUNT, "message": _object(_MESSAGE), "logprobs": _or_null("Steps"), **_ENDS}, _MAYBE
    ),
    "ChatChunk": _object(_body("chat.completion.chunk", "ChatChunkChoice"), {"usage": _or_null("Usage")}),
    "ChatChunkChoice": _object(
        {"index": COUNT, "delta": closed(_MESSAGE, ()), "logprobs": _or_null("Steps"), **_GOES_ON}, _LAST
    ),
    "Model": _object(
        {"id": NAME, "object": {"const": "model"}, "created": COUNT, "owned_by": TEXT, "max_model_len": COUNT}
    ),
    "Models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
    "Tokens": _object(
        {"count": COUNT, "max_model_len": COUNT, "tokens": _list(COUNT)}, {"token_strs": optional(_list(TEXT))}
    ),
    "Text": _object({"prompt": TEXT}),
    "Tokenizer": {"type": "object", "additionalProperties": True},
    "Health": _object({"status": {"const": "ok"}}),
    "Version": _object({"version": NAME}),
    "Document": {"type": "object", "required": ["openapi", "info", "paths"], "additionalProperties": True},
}
"""The schemas of all answers, by their names in the document."""
