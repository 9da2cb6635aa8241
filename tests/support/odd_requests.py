"""Odd requests to all endpoints with a body: mutations, extreme parameters, contradictions, valid combinations."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import request_bodies
from request_bodies import BODIES, CHAT, COMPLETIONS, HELLO, MEASURED, OPENAI, OTHERS, SCHEMA, TAG, TOOL

from nucleate.sampling_params import FIELDS

_DEEP = ("[" * 700 + "]" * 700, "[" * 9000 + "]" * 9000, '{"a":' * 700 + "1" + "}" * 700)
_LITERALS = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e308", "-1.797e308", "-0", "-0.0", "5e-324", "1E400"),
    *("9" * 400, "-" + "9" * 30, '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '{"a":1,"a":2}', "tru", "01", "'x'"),
    *_DEEP,
)
LITERALS = {f"@{index}@": text for index, text in enumerate(_LITERALS)}
"""JSON, valid or not, that ``json.dumps`` cannot write, by the string that stands for it."""


def nested(depth: int, *, as_object: bool = False) -> Any:
    """A list in a list, and so on; or objects."""
    made: Any = 1
    for _ in range(depth):
        made = {"a": made} if as_object else [made]
    return made


def recursive_schemas() -> list[Any]:
    """Schemas with references: recursive, circular, missing, foreign."""
    loop = {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}}}
    itself = {"$ref": "#"}
    tree = {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"type": "array", "items": {"$ref": "#"}}}}
    missing = [{"$ref": name} for name in ("#/no", "http://localhost/x", "file:///etc/passwd", "", "#/$defs/\ud800", 5)]
    wide = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(2000)}}
    enum = {"enum": [f"v{index}" for index in range(5000)]}
    every = [{"allOf": [tree] * 20}, {"anyOf": [loop] * 20}, {"oneOf": [{"type": "string"}] * 30}, {"not": tree}]
    deep = {"type": "object", "properties": {"a": nested(100, as_object=True)}}
    big = [{"type": "string", "minLength": 10**9}, {"type": "array", "minItems": 10**9}, {"multipleOf": 5e-324}]
    big += [{"type": "string", "pattern": "(a|a)*" * 50}, {"type": "integer", "minimum": -(10**300), "maximum": 1e300}]
    return [loop, itself, tree, *missing, wide, enum, *every, deep, *big]


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2.5, 1e308, 10**30, 2**63, -(2**63) - 1, "", "x", "\ud800", "\0", "json", "auto"),
    *("required", "none", [], {}, [[]], [None], [1], ["x"], [{}], {"type": "x"}, {"type": ["x"]}, {"type": {}}),
    *({"type": "text"}, {"type": "function"}, {"type": "text", "text": "a"}, {"x": None}, {"": 1}, "a" * 5000),
    *("é" * 500, "😀", "\u202e", "a\u0301", "<tool_call>", "</think>", "<|end|>", "{{ 7 * 7 }}", "{% raise %}"),
    *(nested(30), nested(200), nested(150, as_object=True), [HELLO[0]] * 3, [0] * 3000, [TOOL] * 2, [TOOL] * 3000),
    *([{"type": "function", "function": {"name": f"f{index}"}} for index in range(count)] for count in (128, 129)),
    *({"type": "function", "function": {"name": name}} for name in ("", *("n" * n for n in (65, 129, 9000)))),
    *({"type": "function", "function": {"name": name}} for name in ("名前", "a b", 5)),
    *recursive_schemas(),
    *(
        TOOL,
        request_bodies.OPENAI_CALL,
        TAG,
        request_bodies.LEGACY_TAG,
        {"type": "structural_tag", "format": nested(50, as_object=True)},
        SCHEMA,
    ),
    *LITERALS,
)
NAMES = (
    *("x", "", "type", "role", "content", "n", "messages", "tools", "\ud800", "a" * 3000, "__proto__", "名", "stream"),
)


def mutated(value: Any, rng: random.Random, values: tuple[Any, ...] = VALUES) -> Any:
    """A copy with one random part replaced, removed, doubled, wrapped, moved, renamed, or with an unknown key."""
    made = {"root": copy.deepcopy(value)}
    places: list[tuple[Any, Any]] = []

    def collect(parent: Any) -> None:
        for key in [*parent] if isinstance(parent, dict) else range(len(parent)):
            places.append((parent, key))
            if isinstance(parent[key], dict | list):
                collect(parent[key])

    collect(made["root"])
    parent, key = rng.choice([*places, (made, "root")])
    action = rng.randrange(10)
    if action == 0 and parent is not made:
        del parent[key]
    elif action == 1 and isinstance(parent, list):
        parent.extend(copy.deepcopy(parent[key]) for _ in range(rng.choice([1, 1, 1, 200])))
    elif action == 2 and isinstance(parent, dict) and parent is not made:
        parent[rng.choice(NAMES)] = parent.pop(key)
    elif action == 3 and isinstance(parent, dict) and parent is not made:
        parent[rng.choice(NAMES)] = copy.deepcopy(rng.choice(values))
    elif action == 4:
        parent[key] = [parent[key]] if rng.random() < 0.5 else {rng.choice(NAMES): parent[key]}
    elif action == 5:
        other, place = rng.choice([*places, (made, "root")])
        parent[key] = copy.deepcopy(other[place])
    else:
        parent[key] = copy.deepcopy(rng.choice([*values, *values, rng.choice([*places, (made, "root")])[0]]))
    return made["root"]


class Odd(NamedTuple):
    """A request. must_work: it is valid."""

    path: str
    data: bytes
    must_work: bool = False


def encode(path: str, body: Any, *, must_work: bool = False) -> Odd:
    """A request with this body, whose literals are replaced."""
    text = re.sub('"(@[0-9]+@)"', lambda found: LITERALS[found[1]], json.dumps(body))
    return Odd(path, text.encode(), must_work)


def _mutation(rng: random.Random) -> Odd:
    path = rng.choice([*BODIES, CHAT, CHAT, COMPLETIONS])
    body: Any = rng.choice(BODIES[path])
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 6])):
        body = mutated(body, rng) if isinstance(body, dict | list) and body else body
    return encode(path, body)


def _extremes(rng: random.Random) -> Odd:
    """Several numeric parameters at once at the ends of their ranges, or beyond."""
    path = rng.choice([*OPENAI, *OTHERS])
    huge = (1.7976931348623157e308, 1e300, 1e39, 3.4e38, 1e-300, 5e-324, -0.0, 0.0, 1.0, 2.0**63, -1e308, 1e-45, 100.0)
    numeric = [one for one in FIELDS.values() if one.kind in ("int", "float") and one.name not in ("n", "max_tokens")]
    fields: dict[str, Any] = {}
    for one in rng.sample(numeric, rng.randrange(1, 5)):
        ends: list[Any] = [one.low, one.high, *(huge if one.kind == "float" else (2**31 - 1, 2**31, 2**63, 1))]
        fields[one.name] = rng.choice([end for end in ends if end is not None])
    if "guidance_scale" in fields:
        fields["negative_prompt"] = rng.choice(["", "no", [], [5]])
    if rng.random() < 0.2:
        ids = [str(rng.randrange(4096)) for _ in range(rng.choice([1, 9]))]
        fields["logit_bias"] = {token: rng.choice([*huge, -1.797e308]) for token in ids}
    if path in OPENAI:
        subject = {"messages": HELLO} if path == CHAT else {"prompt": "Once"}
        fields |= {"logprobs": True, "top_logprobs": 1} if path == CHAT else {}
        return encode(path, {**subject, "max_tokens": 3, **fields})
    subject = {name: OTHERS[path][name] for name in ("input", "messages", "prompt") if name in OTHERS[path]}
    if path.startswith("/api"):
        return encode(path, {**subject, "stream": False, "options": {"num_predict": 3, **fields}})
    fields.pop("logprobs", None)
    return encode(path, {**subject, MEASURED[path]: 3, **fields})


CONTRADICTIONS: tuple[dict[str, Any], ...] = (
    {"tools": [TOOL], "tool_choice": "auto", "structured_outputs": {"grammar": 'root ::= "a"'}},
    {"tools": [TOOL], **request_bodies.LAZY_GRAMMAR},
    {"tools": [TOOL], "grammar_lazy": True},
    {"tools": [], "tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"tools": [TOOL, TOOL]},
    {"tools": [TOOL], "use_beam_search": True, "n": 2},
    *(
        {"tools": [TOOL], "tool_choice": "required", **other}
        for other in [
            *({"stop": ["<tool_call>", "{"]}, {"min_tokens": 3}, {"ignore_eos": True}, {"allowed_token_ids": [5]}),
            *({"suppress_token_ids": [*range(1000)]}, {"logit_bias": {"5": -1e308, "6": 1e308}}, {"stop_regex": ["."]}),
            *({"continue_final_message": True}, {"response_format": {"type": "json_object"}}),
            {"structured_outputs": {"regex": "a"}},
        ]
    ),
    {"tools": [TOOL], "n": 4, "echo": True, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 2},
    {"continue_final_message": True, "add_generation_prompt": True},
    {"truncate_prompt_tokens": 1, "tools": [TOOL]},
    {"truncate_prompt_tokens": 1, "max_reasoning_tokens": 0},
    {"truncate_prompt_tokens": -1, "prompt_logprobs": 1, "return_token_ids": True},
    {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
    {"reasoning_effort": "max", "max_reasoning_tokens": 0, "response_format": {"type": "json_object"}},
    {"max_reasoning_tokens": 2**31 - 1, "stop": ["</think>"]},
    {"stop_json": True, "tools": [TOOL]},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    {"response_format": TAG, "structured_outputs": {"structural_tag": TAG}},
    {"response_format": TAG, "stop": ["<a"], "ignore_eos": True, "n": 3},
    {"response_format": TAG, "tools": [TOOL]},
    {"prompt": "x", "messages": HELLO},
    {"max_tokens": 3, "max_completion_tokens": 4},
    {"min_tokens": 5, "max_tokens": 4},
    {"logprobs": -1, "top_logprobs": -1},
    {"logprobs": True, "top_logprobs": -1},
    {"best_of": 2, "stream": True},
    {"temperature": 0, "n": 3, "seed": 1, "draw": "categorical"},
    {"allowed_token_ids": [5], "suppress_token_ids": [5]},
    {"allowed_token_ids": []},
    {"pipeline": [{"stage": "temperature"}], "temperature": 2},
    {"pipeline": [{"stage": "guidance", "guidance_scale": 1e308}]},
    {"skip_special_tokens": False, "tools": [TOOL]},
    {"kv_transfer_params": {"a": 1}},
    {"logits_processors": ["os.system"]},
)
"""Fields that contradict or have no sense together, added to a valid body."""


def _contradiction(rng: random.Random) -> Odd:
    path = rng.choice([*OPENAI, *OTHERS])
    base = rng.choice(BODIES[path])
    bound = {} if path.startswith("/api") else {MEASURED[path]: 3}
    plain = {name: base[name] for name in ("messages", "input", "prompt") if name in base}
    body = {**(plain if rng.random() < 0.6 else base), **bound}
    body |= rng.choice(CONTRADICTIONS) | rng.choice(CONTRADICTIONS)
    if path.startswith("/api"):
        body |= {"stream": False, "options": {"num_predict": 3}}
    return encode(path, body)


def _large(rng: random.Random) -> Odd:
    """Bodies of 10 MB, in which the size is in one place."""
    path = rng.choice([*BODIES])
    body = dict(rng.choice(BODIES[path]))
    name = rng.choice([*body])
    content: list[Callable[[], Any]] = [
        lambda: "x" * 10**7,
        lambda: [0] * (3 * 10**6),
        lambda: [{"a": index} for index in range(500_000)],
        lambda: {f"k{index}": index for index in range(500_000)},
        lambda: [{"role": "user", "content": "a" * 5000}] * 1900,
        lambda: [{"type": "function", "function": {"name": "f", "description": "d" * 9 * 10**6}}],
        lambda: " " * 9 * 10**6,
    ]
    return encode(path, {**body, name: rng.choice(content)()})


BOTH, TOKENS = [True, False], ("return_token_ids", "return_tokens_as_token_ids")
MIXES: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        "messages": [HELLO, request_bodies.CONVERSATION, [*HELLO, {"role": "assistant", "content": ""}, *HELLO]],
        **dict.fromkeys(("parallel_tool_calls", "logprobs", "echo", "skip_special_tokens", "stream", *TOKENS), BOTH),
        "priority": [0],
        "tools": [[TOOL], [TOOL, {"type": "function", "function": {"name": "g-1_" + "n" * 60}}], []],
        "reasoning_effort": ["none", "minimal", "low", "high", "xhigh", "max"],
        "max_reasoning_tokens": [0, 1, 1000],
        "chat_template_kwargs": [{}, {"a": 1, "名": [1, {"b": None}]}],
        "prompt_logprobs": [0, 2],
        "truncate_prompt_tokens": [-1, 1, 5, 10**6],
        "truncation_side": ["left", "right"],
        "n": [1, 3],
        "stop": ["x", ["a", "é"], []],
        "temperature": [0, 1, 2.0, 1e30],
        "metadata": [{"a": "b"}],
    },
    COMPLETIONS: {
        "prompt": ["Once", ["Once", "Twice"], [5, 6], [[5], [6, 7]], "名\0😀"],
        **dict.fromkeys(("stream", *TOKENS), BOTH),
        "priority": [0],
        "logprobs": [0, 3],
        "prompt_logprobs": [0, 2],
        "truncate_prompt_tokens": [-1, 1, 10**6],
        "n": [1, 2],
        "response_format": [{"type": "text"}, {"type": "json_object"}, TAG],
        "suffix": ["", None],
    },
    "/v1/responses": {
        "input": ["hi", OTHERS["/v1/responses"]["input"]],
        "stream": BOTH,
        "priority": [0],
        "tools": [OTHERS["/v1/responses"]["tools"], []],
        "reasoning": [{"effort": "none"}, {"effort": "high", "summary": None}, {}],
        "text": [{"format": {"type": "text"}}, {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}],
        "truncation": ["auto", "disabled"],
        "top_logprobs": [0, 2],
        "truncate_prompt_tokens": [-1, 1, 5],
    },
    "/v1/messages": {
        "messages": [HELLO, OTHERS["/v1/messages"]["messages"]],
        "stream": BOTH,
        "priority": [0],
        "tools": [OTHERS["/v1/messages"]["tools"], [{"name": "n" * 128, "input_schema": SCHEMA}], []],
        "thinking": [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}],
        "output_config": [{"effort": "max"}, {"format": {"type": "json_schema", "schema": SCHEMA}}],
        "stop_sequences": [[], ["a", "b"]],
        "metadata": [{"user_id": "x"}],
        "truncate_prompt_tokens": [-1, 1, 5],
    },
    "/api/chat": {
        "messages": [HELLO, OTHERS["/api/chat"]["messages"]],
        **dict.fromkeys(("stream", "logprobs"), BOTH),
        "priority": [0],
        "tools": [[TOOL], []],
        "think": [True, False, "high"],
        "format": ["", "json", SCHEMA],
        "keep_alive": [0, "5m", -1],
        "truncate_prompt_tokens": [-1, 1, 5],
    },
    "/api/generate": {
        "prompt": ["hi", "名\0"],
        "stream": BOTH,
        "system": ["", "be"],
        "format": ["", "json", SCHEMA],
        "context": [[], None],
        "think": BOTH,
    },
}
"""Fields whose values can all be combined: the first field is required."""


def _mix(rng: random.Random) -> Odd:
    path = rng.choice([*MIXES])
    fields = MIXES[path]
    first, *others = fields
    chosen = [first, *rng.sample(others, rng.randrange(len(others) + 1))]
    body = {name: rng.choice(fields[name]) for name in chosen}
    length = rng.choice([1, 4])
    body |= {"options": {"num_predict": length}} if path.startswith("/api") else {MEASURED[path]: length}
    return encode(path, body, must_work=True)


def odd_requests(count: int, seed: int = 0) -> list[Odd]:
    """Seeded requests in random order: mutations, extremes, contradictions, valid mixes; one in a hundred has 10 MB."""
    rng = random.Random(seed)
    kinds, weights = (_mutation, _extremes, _contradiction, _mix), (66, 12, 10, 11)
    return [_large(rng) if index % 100 == 50 else rng.choices(kinds, weights)[0](rng) for index in range(count)]
