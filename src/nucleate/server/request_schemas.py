"""JSON Schemas of what requests may say, made from the parameters and the limits themselves. Knows no route.

What the server takes fits its schema. The other way round that holds for the parameters of sampling, as far as a schema
can say it: rules over several fields, the sum of lengths in a list and the vocabulary are left to prose, and so is what
is within objects. An integer is written without a fraction: 1.0 is none here, although JSON Schema takes it for one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from nucleate.engine.beam.params import BeamParams
from nucleate.parameters.parameter import Parameter
from nucleate.sampling.presets import REQUESTABLE
from nucleate.sampling_params import FIELDS
from nucleate.server.limits import MAX_CHARACTERS, MAX_ENTRIES, ServerLimits, max_entries
from nucleate.server.openai.beam_search import FIELDS_OF_BEAMS, SWITCH
from nucleate.server.openai.messages import MOST_MESSAGES
from nucleate.server.openai.requests import Endpoint
from nucleate.server.openai.response_format import RESPONSE

Schema = dict[str, Any]

LARGEST = sys.float_info.max
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def body_schema(endpoint: Endpoint, limits: ServerLimits) -> Schema:
    """What a body of one of OpenAI's endpoints may say. Every field that the endpoint knows is in it."""
    known, fields = _own(limits), {name: field_schema(parameter, limits) for name, parameter in FIELDS.items()}
    fields["max_tokens"]["default"] = limits.endpoint(endpoint).max_tokens
    if "echo" in endpoint.own:
        fields["max_tokens"] |= {"minimum": 0, "description": f"{FIELDS['max_tokens'].help}; 0 only with echo"}
    own = [*endpoint.subject, *sorted(endpoint.own)] + ["logprobs"] * ("top_logprobs" in endpoint.own)
    made = {**fields, **{name: known[name] for name in own}}
    made |= {name: {"description": "has no effect"} for name in sorted(endpoint.ignored)}
    for name, idle in sorted(endpoint.not_yet.items()):
        made[name] = {"enum": [None, *idle], "description": "not supported, but for what asks for nothing"}
    return _closed(made, *endpoint.subject)


def tokenize_schema(limits: ServerLimits) -> Schema:
    """What a body of /tokenize may say: a text or a conversation, not both."""
    known = _own(limits)
    return _closed(
        {
            "prompt": _said(TEXT, "the text"),
            "messages": _said(known["messages"], "instead of a text, a conversation"),
            **{name: known[name] for name in ("model", "chat_template_kwargs")},
            "add_special_tokens": _said(BOOLEAN, "add what belongs around a text; without this field, not to messages"),
            "return_token_strs": _said(BOOLEAN, "tell each token as the vocabulary has it too"),
        }
    )


def detokenize_schema(limits: ServerLimits) -> Schema:
    """What a body of /detokenize may say."""
    return _closed({"tokens": IDS, "model": _own(limits)["model"]}, "tokens")


def field_schema(parameter: Parameter, limits: ServerLimits) -> Schema:
    """The values of a field of SamplingParams."""
    default = parameter.default
    if isinstance(default, Mapping | tuple):
        default = {str(key): value for key, value in default.items()} if isinstance(default, Mapping) else [*default]
    return {**_said(_values(parameter, limits), parameter.help), "default": default}


def _values(parameter: Parameter, limits: ServerLimits) -> Schema:
    names, kind = {"type": "string", "enum": [*parameter.choices]}, parameter.kind
    if kind == "str | tuple[str, ...]":
        return {"anyOf": [names, {"type": "array", "items": {"enum": [*REQUESTABLE]}, "uniqueItems": True}]}
    if kind in ("bool", "str", "StructuredOutputs"):
        return {"bool": BOOLEAN, "str": names, "StructuredOutputs": OBJECT}[kind]
    if kind in ("float", "int"):
        number = _number(parameter, limits)
        return {"anyOf": [number, {"enum": [*parameter.off]}]} if parameter.off else number
    if kind == "Mapping[int, float]":
        values = {"type": "number", "minimum": -LARGEST, "maximum": LARGEST}
        keys = {"pattern": "^[0-9]+$", "maxLength": 20}
        return {**OBJECT, "propertyNames": keys, "additionalProperties": values, "maxProperties": MAX_ENTRIES}
    if kind == "tuple[int, ...]":
        most = None if parameter.name == "allowed_token_ids" else max_entries(parameter.name)
        return _list(_number(parameter, limits), most)
    text = {**NAME, "maxLength": MAX_CHARACTERS}
    words = {"anyOf": [text, {**_list(_number(parameter, limits), MAX_CHARACTERS), "minItems": 1}]}
    return {"anyOf": [text, _list(words if "int" in kind else text, max_entries(parameter.name))]}


def _number(parameter: Parameter, limits: ServerLimits) -> Schema:
    whole = "int" in parameter.kind
    low = parameter.low if whole or parameter.low is not None else -LARGEST
    high = parameter.high if whole or parameter.high is not None else LARGEST
    highest = min((bound for bound in (high, limits.maximum(parameter.name)) if bound is not None), default=None)
    schema: Schema = {"type": "integer" if whole else "number"}
    if low is not None:
        schema["exclusiveMinimum" if parameter.open_low else "minimum"] = low
    if highest is not None:
        schema["maximum"] = highest
    return schema


def _own(limits: ServerLimits) -> dict[str, Schema]:
    """The fields that endpoints have besides those of SamplingParams, or with another meaning than theirs."""
    part = _closed({"type": {"const": "text"}, "text": TEXT}, "type", "text")
    message = {"role": NAME, "content": {"anyOf": [TEXT, _list(part, None)]}}
    messages = _list({**OBJECT, "properties": message, "required": ["role", "content"]}, MOST_MESSAGES)
    several = ({**_list(one, limits.max_choices_per_request), "minItems": 1} for one in (TEXT, IDS))
    prompt = {"anyOf": [TEXT, {**IDS, "minItems": 1}, *several]}
    declared = {name: BeamParams.PARAMETERS.get(field) for name, field in FIELDS_OF_BEAMS.items()}
    searching = {
        name: _said(_number(parameter, limits), f"in a beam search: {parameter.help}")
        for name, parameter in declared.items()
        if parameter is not None
    }
    return {
        "prompt": {**prompt, "description": "text or token ids, or a list of either"},
        "messages": {**messages, "minItems": 1, "description": "a conversation of text"},
        "max_completion_tokens": field_schema(FIELDS["max_tokens"], limits),
        "top_logprobs": {**field_schema(FIELDS["logprobs"], limits), "description": "how many, with logprobs"},
        "best_of": _said(_number(FIELDS["n"], limits), "make so many answers, and tell the n likeliest of them"),
        "logprobs": _said(BOOLEAN, "whether to tell logprobs; top_logprobs says how many"),
        "echo": _said(BOOLEAN, "begin each answer with its prompt"),
        "stream": _said(BOOLEAN, "tell the answer in parts, as server-sent events"),
        "stream_options": _said(OBJECT, "only with stream: include_usage; include_obfuscation has no effect"),
        "chat_template_kwargs": _said(OBJECT, "more variables for the chat template, under names of their own"),
        "model": _said(NAME, "the name of the model"),
        RESPONSE: _said(OBJECT, "the form of the answer, as OpenAI has it; without strict as strict"),
        SWITCH: _said(BOOLEAN, "search for the likeliest answers, with best_of (or n) beams, instead of drawing any"),
        "early_stopping": {"enum": [False, True, "never", None], "description": "in a beam search: when to stop"},
        **searching,
    }


def _list(items: Schema, most: int | None) -> Schema:
    schema: Schema = {"type": "array", "items": items}
    return schema if most is None else {**schema, "maxItems": most}


def _closed(properties: Mapping[str, Schema], *required: str) -> Schema:
    """An object with these properties and no others."""
    return {**OBJECT, "properties": dict(properties), "required": [*required], "additionalProperties": False}


def _said(schema: Schema, about: str) -> Schema:
    """The same, or null."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}], "description": about}
    made = {**schema, "type": [schema["type"], "null"], "description": about}
    return {**made, "enum": [*schema["enum"], None]} if "enum" in schema else made
