"""JSON Schemas of what requests may say, made from the parameters and the limits themselves. Knows no route.

What no schema can say is left to prose: rules over several fields, the sum of lengths in a list, the vocabulary. An
integer is written without a fraction: 1.0 is none here, although JSON Schema takes it for one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from nucleate.core.parameter import Parameter
from nucleate.core.structured import FORMS, Policy, Whitespace
from nucleate.engine.beam import BeamParams
from nucleate.params import FIELDS
from nucleate.presets import WANTED
from nucleate.server.limits import EACH, Limits
from nucleate.server.wire.beams import FIELDS_OF_BEAMS, SWITCH
from nucleate.server.wire.forms import COMPACT, IDLE, KINDS, OUTPUTS, RESPONSE
from nucleate.server.wire.forms import NAME as SCHEMA_NAME
from nucleate.server.wire.messages import EMPTY, MOST_DEPTH
from nucleate.server.wire.requests import Endpoint

Schema = dict[str, Any]

LARGEST = sys.float_info.max
BOOLEAN: Schema = {"type": "boolean"}
TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
_POLICIES, _WHITESPACES = get_args(Policy), get_args(Whitespace)
_THERE: Schema = {"not": {"type": "null"}}
_VARIABLES = (
    "more variables for the chat template, under names of their own: not those that every template is told, nor those "
    f"of special tokens; nested {MOST_DEPTH} deep at most"
)


def body_schema(endpoint: Endpoint, limits: Limits) -> Schema:
    """What a body of one of OpenAI's endpoints may say. Every field that the endpoint knows is in it."""
    known, fields = _own(limits), {name: field_schema(parameter, limits) for name, parameter in FIELDS.items()}
    fields["max_tokens"]["default"] = limits.endpoint(endpoint).max_tokens
    if "echo" in endpoint.own:
        fields["max_tokens"] |= {"minimum": 0, "description": f"{FIELDS['max_tokens'].help}; 0 only with echo"}
    own = [*endpoint.subject, *sorted(endpoint.own)] + ["logprobs"] * ("top_logprobs" in endpoint.own)
    made = {name: known[name] for name in own}
    made = {**made, **{name: schema for name, schema in fields.items() if name not in made}}
    made |= {name: {"description": "has no effect"} for name in sorted(endpoint.ignored)}
    for name, idle in sorted(endpoint.not_yet.items()):
        made[name] = {"enum": [None, *idle], "description": "not supported, but for what asks for nothing"}
    return closed(made, endpoint.subject)


def closed(properties: Mapping[str, Schema], required: tuple[str, ...] | None = None) -> Schema:
    """An object with these properties and no others. required: all of them, unless it says which."""
    names = [*properties] if required is None else [*required]
    return {"type": "object", "properties": dict(properties), "required": names, "additionalProperties": False}


def optional(schema: Schema) -> Schema:
    """The same, or null."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    made = {**schema, "type": [schema["type"], "null"]} if "type" in schema else {**schema}
    return {**made, "enum": [*schema["enum"], None]} if "enum" in schema else made


def field_schema(parameter: Parameter, limits: Limits, name: str = "") -> Schema:
    """The values of a field of SamplingParams. name: of the field in the body, where it has another one."""
    default = parameter.default
    if isinstance(default, Mapping | tuple):
        default = {str(key): value for key, value in default.items()} if isinstance(default, Mapping) else [*default]
    of_form = parameter.kind == "Structured"
    schema = optional(_own_form(limits) if of_form else _values(parameter, limits, name or parameter.name))
    return {**schema, "description": parameter.help, "default": default}


def _values(parameter: Parameter, limits: Limits, name: str) -> Schema:
    texts, kind = {"type": "string", "enum": [*parameter.choices]}, parameter.kind
    if kind == "str | tuple[str, ...]":
        return {"anyOf": [texts, {"type": "array", "items": {"enum": [*WANTED]}, "uniqueItems": True}]}
    if kind in ("bool", "str"):
        return BOOLEAN if kind == "bool" else texts
    if kind in ("float", "int"):
        number = _number(parameter, limits.most(name))
        return {"anyOf": [number, {"enum": [*parameter.off]}]} if parameter.off else number
    if kind == "Mapping[int, float]":
        return _table(limits.entries(name))
    if kind == "tuple[int, ...]":
        return _list(_number(parameter, None), limits.entries(name))
    return _texts(parameter, limits, name)


def _number(parameter: Parameter, most: int | None) -> Schema:
    whole = "int" in parameter.kind
    low = parameter.low if whole or parameter.low is not None else -LARGEST
    high = parameter.high if whole or parameter.high is not None else LARGEST
    highest = min((bound for bound in (high, most) if bound is not None), default=None)
    schema: Schema = {"type": "integer" if whole else "number"}
    if low is not None:
        schema["exclusiveMinimum" if parameter.open_low else "minimum"] = low
    if highest is not None:
        schema["maximum"] = highest
    return schema


def _list(items: Schema, entries: int | None, least: int = 0) -> Schema:
    schema: Schema = {"type": "array", "items": items}
    if least:
        schema["minItems"] = least
    return schema if entries is None else {**schema, "maxItems": entries}


def _texts(parameter: Parameter, limits: Limits, name: str) -> Schema:
    """A text, or a list of texts; where the kind has it, of lists of token ids too."""
    entries, characters = limits.entries(name), limits.characters(name)
    text = NAME if characters is None else {**NAME, "maxLength": characters}
    items = text
    if "int" in parameter.kind:
        items = {"anyOf": [text, _list(_number(parameter, None), characters, least=1)]}
    several = _list(items, entries)
    if name not in EACH and characters is not None:
        several["description"] = f"of at most {characters} characters (or ids in lists) in all"
    return {"anyOf": [several] if entries == 0 else [text, several]}


def _table(entries: int | None) -> Schema:
    schema = {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]+$", "maxLength": 20},
        "additionalProperties": {"type": "number", "minimum": -LARGEST, "maximum": LARGEST},
    }
    return schema if entries is None else {**schema, "maxProperties": entries}


def _own(limits: Limits) -> dict[str, Schema]:
    """The fields that endpoints have besides those of SamplingParams, or with another meaning than theirs."""
    options = closed({"include_usage": BOOLEAN, "include_obfuscation": BOOLEAN}, ())
    best_of = _number(replace(FIELDS["n"], name="best_of"), limits.most("best_of"))
    top_logprobs = field_schema(FIELDS["logprobs"], limits, "top_logprobs")
    return {
        "prompt": prompt_schema(limits),
        "messages": messages_schema(limits),
        "max_completion_tokens": field_schema(FIELDS["max_tokens"], limits, "max_completion_tokens"),
        "top_logprobs": {**top_logprobs, "description": "only with logprobs: how many to tell beside the one drawn"},
        "best_of": _said(best_of, "make so many answers, and tell the n likeliest of them"),
        "logprobs": _said(BOOLEAN, "whether to tell logprobs; top_logprobs says how many"),
        "echo": _said(BOOLEAN, "begin each answer with its prompt"),
        "stream": _said(BOOLEAN, "tell the answer in parts, as server-sent events"),
        "stream_options": _said(options, "only with stream; include_obfuscation has no effect"),
        "chat_template_kwargs": _said({"type": "object", "maxProperties": limits.max_listed}, _VARIABLES),
        "model": _said(NAME, "the name of the model"),
        RESPONSE: _said(_response_format(), "the form of the answer; without strict, or where it is true, as strict"),
        OUTPUTS: _said(_structured_outputs(limits), "the form of the answer, as vLLM has it"),
        SWITCH: _said(BOOLEAN, "search for the likeliest answers, with best_of (or n) beams, instead of drawing any"),
        **_searching(),
    }


def _searching() -> dict[str, Schema]:
    """The fields that say how to search."""
    found: dict[str, Schema] = {}
    for name, field in FIELDS_OF_BEAMS.items():
        parameter = BeamParams.PARAMETERS.get(field)
        if parameter is None:
            found[name] = {"enum": [False, True, "never", None], "description": "only in a beam search: when to stop"}
        else:
            found[name] = _said(_number(parameter, None), f"only in a beam search: {parameter.help}")
    return found


def _own_form(limits: Limits) -> Schema:
    """The field ``structured``: exactly one form, and how it is meant."""
    more = {name: {"enum": [*choices, None]} for name, choices in (("policy", _POLICIES), ("whitespace", _WHITESPACES))}
    return _one_form({name: name for name in FORMS}, limits, more)


def _structured_outputs(limits: Limits) -> Schema:
    idle = {name: {"enum": [*values, None]} for name, values in IDLE.items()}
    return _one_form(KINDS, limits, {COMPACT: optional(BOOLEAN), **idle})


def _one_form(names: Mapping[str, str], limits: Limits, more: Mapping[str, Schema]) -> Schema:
    """An object with exactly one of some fields. names: those, and what we call them. more: other fields."""
    text = {**NAME, "maxLength": limits.max_form_text}
    kinds = {
        "json_schema": {"anyOf": [{"type": "object"}, {**NAME, "description": "JSON"}]},
        "json_object": BOOLEAN,
        "regex": text,
        "choice": _list(text, limits.max_form_values, least=1),
        "grammar": text,
    }
    one = [
        {"properties": {name: {"const": True} if kind == "json_object" else _THERE}, "required": [name]}
        for name, kind in names.items()
    ]
    said = {name: optional(kinds[kind]) for name, kind in names.items()}
    return {"anyOf": [{**closed({**said, **more}, ()), "oneOf": one}]}


def _response_format() -> Schema:
    schema = closed(
        {
            "name": {"type": "string", "pattern": f"^{SCHEMA_NAME}$"},
            "schema": {"type": "object"},
            "strict": optional(BOOLEAN),
            "description": optional(TEXT),
        },
        ("name", "schema"),
    )
    plain: dict[str, Schema] = {"type": {"enum": ["text", "json_object"]}, "json_schema": {"type": "null"}}
    of_schema: dict[str, Schema] = {"type": {"const": "json_schema"}, "json_schema": schema}
    return {"anyOf": [closed(plain, ("type",)), closed(of_schema)]}


def _said(schema: Schema, about: str) -> Schema:
    return {**optional(schema), "description": about}


def prompt_schema(limits: Limits) -> Schema:
    """One prompt or several, each text or token ids."""
    ids = _list({"type": "integer", "minimum": 0}, limits.max_prompt_tokens, least=1)
    several = (_list(one, limits.max_prompts, least=1) for one in (TEXT, ids))
    return {"anyOf": [TEXT, ids, *several], "description": "text or token ids, or a list of either"}


def messages_schema(limits: Limits) -> Schema:
    """A conversation of text."""
    part = closed({"type": {"const": "text"}, "text": TEXT})
    message = {
        "role": NAME,
        "content": {"anyOf": [TEXT, _list(part, limits.max_messages)]},
        "name": optional(NAME),
        **{key: {"enum": [None, [], ""]} for key in EMPTY},
    }
    return _list(closed(message, ("role", "content")), limits.entries("messages"), least=1)


def tokenize_schema(limits: Limits) -> Schema:
    """What a body of /tokenize may say: a text or a conversation, not both."""
    known, nothing = _own(limits), {"type": "null"}
    made = closed(
        {
            "prompt": optional(TEXT),
            "messages": optional(messages_schema(limits)),
            **{name: known[name] for name in ("model", "chat_template_kwargs")},
            "add_special_tokens": _said(BOOLEAN, "add what belongs around a text; without this field, not to messages"),
            "return_token_strs": _said(BOOLEAN, "tell each token as the vocabulary has it too"),
        },
        (),
    )
    of_text = {"prompt": TEXT, "messages": nothing, "chat_template_kwargs": nothing}
    of_chat = {"messages": {"type": "array"}, "prompt": nothing}
    made["anyOf"] = [
        {"properties": of_text, "required": ["prompt"]},
        {"properties": of_chat, "required": ["messages"]},
    ]
    return made


def detokenize_schema(limits: Limits) -> Schema:
    """What a body of /detokenize may say."""
    return closed(
        {"tokens": _list({"type": "integer", "minimum": 0}, None), "model": _own(limits)["model"]}, ("tokens",)
    )
