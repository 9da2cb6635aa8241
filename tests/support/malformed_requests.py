"""Many kinds of invalid requests, each with the field that the error must name."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from nucleate.parameters.parameter import Parameter
from nucleate.sampling_params import FIELDS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VOCABULARY, CONTEXT = 4096, 1024
HELLO = [{"role": "user", "content": "Hello"}]
SUBJECT: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "Once"}, CHAT: {"messages": HELLO}}
JSON_TYPE = {"content-type": "application/json"}


class Bad(NamedTuple):
    """An invalid request. field: the ``param`` of the error (None: no param; several: any of them)."""

    name: str
    path: str
    data: bytes
    field: str | tuple[str, ...] | None
    status: int = 400
    method: str = "POST"
    headers: dict[str, str] = JSON_TYPE


def malformed(count: int, seed: int = 0) -> list[Bad]:
    """``count`` requests in random order: nine tenths from ``fixed``, the others with random values."""
    rng = random.Random(seed)
    known = list(fixed())
    rng.shuffle(known)
    known = known[: count * 9 // 10]
    made = [*known, *(rng.choice(RANDOM)(rng) for _ in range(count - len(known)))]
    rng.shuffle(made)
    return made


def fixed() -> Iterator[Bad]:
    """The hand-written cases."""
    for path in SUBJECT:
        for name, parameter in FIELDS.items():
            yield from _of_field(path, name, parameter)
        yield from _of_body(path)
    yield from _of_completions()
    yield from _of_chat()
    yield from _of_tokens()
    yield from _of_http()


def _body(path: str, name: str, value: Any, field: str | tuple[str, ...] | None = None, **more: Any) -> Bad:
    data = json.dumps({**SUBJECT[path], **more, name: value}).encode()
    return Bad(f"{path} {name}={str(value)[:40]}", path, data, field or name)


def _bodies(path: str, name: str, values: Iterable[Any], *field: str, **more: Any) -> Iterator[Bad]:
    return (_body(path, name, value, *field, **more) for value in values)


def _literal(path: str, name: str, literal: str, field: str) -> Bad:
    """A value that json.dumps cannot write."""
    data = json.dumps(SUBJECT[path]).encode()[:-1] + f', "{name}": {literal}}}'.encode()
    return Bad(f"{path} {name}={literal[:40]}", path, data, field)


def _of_field(path: str, name: str, parameter: Parameter) -> Iterator[Bad]:
    """Values of a field with a wrong type, out of range, or not finite."""
    wrong: list[Any] = [{"a": {"b": 1}}, [[["x"]]], [None], [{}], {"1": []}]
    if parameter.kind != "bool":
        wrong += [True]
    if "str" not in parameter.kind and not parameter.choices:
        wrong += ["x", ""]
    if "str" in parameter.kind or parameter.choices or parameter.kind == "bool":
        wrong += [7]
    if path == CHAT and name == "logprobs":  # a boolean in chat requests
        wrong = [value for value in wrong if not isinstance(value, bool)] + [5]
    yield from _bodies(path, name, wrong)
    if parameter.kind in ("int", "float") and not (path == CHAT and name == "logprobs"):
        low = -(2**63) if name == "seed" else parameter.low
        numbers: list[Any] = [bound - 1 for bound in (low,) if bound is not None]
        numbers += [bound + 1 for bound in (parameter.high,) if bound is not None]
        numbers += [-(10**30)] if parameter.low is not None else []
        numbers += [parameter.low] if parameter.open_low else []
        numbers += [1.5, 10**400] if parameter.kind == "int" else [10**400]
        for number in numbers:
            if not (path == COMPLETIONS and name == "max_tokens" and number == 0) and not parameter.admits(number):
                yield _body(path, name, number)
    if parameter.kind in ("int", "float"):
        for literal in ("NaN", "Infinity", "-Infinity"):
            yield _literal(path, name, literal, "body")
        yield _literal(path, name, "1e999", name)


def _of_body(path: str) -> Iterator[Bad]:
    """Invalid bodies."""
    subject = json.dumps(SUBJECT[path])
    texts = ["", " ", "{", "[]", "null", "1", '"text"', "{]", "{'a': 1}", "\x00", "{}}", subject[:-1], subject + "x"]
    texts += [subject[:-1] + ",}", subject[:-1] + ', "seed": 01}', "[" * 100_000, '{"a":' * 50_000]
    texts += [subject[:-1] + ', "seed": ' + "9" * 5000 + "}", "[" * 50_000 + "]" * 50_000, "\ufeff" + subject]
    texts += [subject[:-1] + ', "seed": 1, "seed": 2}', subject[:-1] + ', "temperature": 1, "temperature": 1}']
    for text in texts:
        yield Bad(f"{path} {text[:40]!r}", path, text.encode(), "body")
    for data in (b"\xff\xfe" + subject.encode("utf-16-le"), b"\x80", subject.encode()[:-1] + b', "user": "\xc3"}'):
        yield Bad(f"{path} {data[:20]!r}", path, data, "body")
    yield Bad(f"{path} {{}}", path, b"{}", "prompt" if path == COMPLETIONS else "messages")
    for name in ("tempreature", "frob", "", "__class__", "a" * 100_000, "\ud800", "constructor", "logit_bias "):
        yield _body(path, name, 1, (name[:100], "?"))
    for depth in (50, 200, 500, 900):
        nested: Any = 1
        for _ in range(depth):
            nested = [nested]
        yield _body(path, "stop", nested, ("stop", "body"))
        yield _body(path, "frob", nested, ("frob", "body"))
    for name in ("stream", "stream_options", "model"):
        yield from _bodies(path, name, (7, ["x"], "yes" if name != "model" else ""))
    yield Bad("another model", path, json.dumps({**SUBJECT[path], "model": "gpt-4"}).encode(), "model", 404)
    yield _body(path, "stream_options", {"include_usage": True})
    yield _body(path, "stream_options", {"frob": 1}, ("stream_options", "frob"), stream=True)
    yield _body(path, "stream_options", {"include_usage": 1}, "stream_options.include_usage", stream=True)
    patterns = ("(", "[", "*", "(?P<a>", "\\", "(?P=b)", "x{9999999999}", "(?R)", "a" * 1025)
    yield from _bodies(path, "stop_regex", [[pattern] for pattern in patterns])
    yield from _bodies(path, "stop", (["x"] * 1025, [""], ["x" * 20_000]))
    keys = ("x", "-1", "1.5", str(VOCABULARY), "9" * 50, "")
    yield from _bodies(path, "logit_bias", ({str(number): 1 for number in range(2000)}, *({key: 1} for key in keys)))
    yield from _bodies(path, "logit_bias", [{"5": value} for value in ("x", None, [1], {"a": 1}, True)])
    for name in ("stop_token_ids", "allowed_token_ids", "suppress_tokens", "logprob_token_ids"):
        if name in FIELDS:
            yield from _bodies(path, name, ([VOCABULARY], [-1], [2**64], ["5"], [1.5], [True]))
    yield _body(path, "min_tokens", 9, max_tokens=8)
    yield _body(path, "n", 129)
    yield from _of_structured_output(path)
    yield from _of_vllm(path)


def _of_vllm(path: str) -> Iterator[Bad]:
    """Fields of vLLM."""
    strange: list[Any] = ["x", "", 1.5, [], [1], {}, {"a": 1}, [[None]], "9" * 500, "\ud800"]
    for name in ("echo", "return_token_ids", "return_tokens_as_token_ids"):
        yield from _bodies(path, name, (*strange, 0, 1))
    for name in ("priority", "truncate_prompt_tokens"):
        yield from _bodies(path, name, (*strange, True, False, 2**63, -(2**63) - 1, 10**400))
    yield from _bodies(path, "priority", (1, -1, -(2**63), 2**63 - 1))
    yield from _bodies(path, "truncate_prompt_tokens", (0, -2, -(2**63)))
    yield from _bodies(path, "truncation_side", (*strange, 0, True, "middle"))
    options = [{"include_usage": True, "continuous_usage_stats": value} for value in (*strange[:6], 0, 1)]
    yield from _bodies(path, "stream_options", options, "stream_options.continuous_usage_stats", stream=True)
    for name in ("cache_salt", "request_id", "vllm_xargs", "kv_transfer_params", "logits_processors", "detokenize"):
        yield from _bodies(path, name, ("x", 7, [1], {"a": {"b": [None]}}))
    top = {"logprobs": True} if path == CHAT else {}
    yield _body(path, "top_logprobs" if path == CHAT else "logprobs", -1, **top)
    yield _body(path, "prompt_logprobs", -1)
    if path == COMPLETIONS:
        yield from _bodies(path, "suffix", [value for value in (*strange, 0, True) if value != ""])
        yield _body(path, "truncate_prompt_tokens", 5, echo=True)


def _of_structured_output(path: str) -> Iterator[Bad]:
    """Invalid structured-output fields."""
    schema = {"name": "x", "schema": {"type": "object"}}
    formats: list[Any] = ["text", 7, {}, [], {"type": "xml"}, {"type": ["text"]}, {"type": "text", "frob": 1}]
    formats += [{"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}, {"schema": {}}]
    formats += [{"type": kind, "json_schema": schema} for kind in ("text", "json_object")]
    for name, value in (
        *(("name", wrong) for wrong in (None, "", "a b", "a" * 65, 7)),
        *(("schema", wrong) for wrong in (None, "{}", [], True, {"type": "strnig"}, {"not": {}}, {"type": 7})),
        *(("strict", wrong) for wrong in (1, "true", [])),
        *(("description", 7), ("frob", 1)),
    ):
        formats.append({"type": "json_schema", "json_schema": {**schema, name: value}})
    yield from _bodies(path, "response_format", formats)
    outputs: list[Any] = ["json", 7, {}, [], {"json": 7}, {"json": "{"}, {"json": {"type": 7}}, {"regex": "("}]
    outputs += [{"regex": "a", "choice": ["a"]}, {"choice": []}, {"choice": "a"}, {"choice": [7]}, {"frob": 1}]
    outputs += [{"json_object": value} for value in (1, False)]
    outputs += [{"grammar": "start: foo"}, {"json_object": True, "json": {}}]
    outputs += [{"regex": "a", "disable_any_whitespace": True}, {"json_object": True, "disable_any_whitespace": 1}]
    outputs += [{"regex": "a", name: "x"} for name in ("structural_tag", "whitespace_pattern", "disable_fallback")]
    outputs += [7, "a", {"regex": "["}, {"regex": "a", "on_unsupported": "x"}, {"json_schema": []}, {"grammar": "\0"}]
    outputs += [{"regex": "a", "whitespace": "none"}, {"json_schema": {"oneOf": [{}, {}]}}, {"choice": ["x" * 30_000]}]
    yield from _bodies(path, "structured_outputs", outputs)
    yield _body(path, "structured_outputs", {"regex": "a"}, response_format={"type": "json_object"})
    yield _body(path, "guided_json", {})


def _of_completions() -> Iterator[Bad]:
    prompts: list[Any] = ["", [], [[]], [""], 7, True, {}, [None], ["a", 7], [["a"]], [1.5], [True], [[1], "a"]]
    prompts += [
        [[[1]]],
        [VOCABULARY],
        [-1],
        [10**30],
        [[1, VOCABULARY]],
        [5] * (CONTEXT + 1),
        "a " * 20_000,
        ["a"] * 600,
    ]
    yield from _bodies(COMPLETIONS, "prompt", prompts)
    yield _body(COMPLETIONS, "messages", HELLO)
    yield _body(COMPLETIONS, "suffix", "x")
    yield _body(COMPLETIONS, "max_tokens", 0)
    yield _body(COMPLETIONS, "echo", "yes")
    yield _body(COMPLETIONS, "logprobs", 21)
    yield _body(COMPLETIONS, "best_of", 1, n=2)
    yield _body(COMPLETIONS, "best_of", 3, n=2, stream=True)
    yield _body(COMPLETIONS, "prompt_logprobs", 21)
    yield from _bodies(COMPLETIONS, "best_of", (0, -1, 1.5, "x", 200, [1]))


def _of_chat() -> Iterator[Bad]:
    messages: list[Any] = [[], {}, "Hello", 7, [None], ["Hello"], [[]], [{}], [{"role": "user"}], [{"content": "a"}]]
    messages += [[{"role": 7, "content": "a"}], [{"role": "", "content": "a"}], [{"role": "user", "content": 7}]]
    messages += [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/"}}]}]]
    messages += [[{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [7]}]]
    messages += [[{"role": "user", "content": "a", "frob": 1}], [{"role": "user", "content": "a", "tool_calls": [{}]}]]
    messages += [HELLO * 3000, [{"role": "user", "content": [{"type": "text", "text": ""}] * 3000}]]
    messages += [[{"role": "user", "content": "a " * 20_000}]]
    for value in messages:
        yield _body(CHAT, "messages", value, ("messages", "prompt"))  # the tokenized conversation is the prompt
    yield _body(CHAT, "prompt", "Hello")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for value in (
        *([{}], {}, "f", [7], [tool] * 2, [tool] * 200, [{"type": "x"}], [{"type": "function", "function": 1}]),
        *([{"function": {"name": name}}] for name in ("", "a b", 1, None, "x" * 65, ["f"])),
        *([{"function": {"name": "f", "parameters": schema}}] for schema in (1, [], {"type": "array"}, "{}")),
        *([{"function": {"name": "f", name: 1}}] for name in ("description", "strict", "parametres")),
    ):
        yield _body(CHAT, "tools", value)
    choices: list[Any] = ["f", 1, {}, [], {"type": "x"}, {"type": "function", "function": {"name": "g"}}]
    yield from _bodies(CHAT, "tool_choice", ["required", *choices])
    yield from _bodies(CHAT, "tool_choice", [{"a": value} for value in choices], tools=[tool])
    allowed = ({}, {"mode": "none", "tools": [tool]}, {"mode": "auto", "tools": []}, {"tools": [{"name": "g"}]})
    choices = [{"type": "allowed_tools", "allowed_tools": value} for value in allowed]
    yield from _bodies(CHAT, "tool_choice", choices, tools=[tool])
    yield from _bodies(CHAT, "parallel_tool_calls", (1, "true", []), tools=[tool])
    yield _body(CHAT, "tools", [tool], use_beam_search=True, best_of=2)
    yield _body(CHAT, "structured_outputs", {"regex": "a"}, tools=[tool], tool_choice="required")
    for call in ({}, 7, {"function": {}}, {"function": {"name": 1}}, {"function": {"name": "f", "arguments": "{"}}):
        yield _body(CHAT, "messages", [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}])
    yield _body(CHAT, "messages", [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}])
    yield _body(CHAT, "messages", [{"role": "tool", "content": None, "tool_call_id": "1"}])
    yield from _bodies(CHAT, "max_reasoning_tokens", (-1, 1.5, "x"))
    for name in ("audio", "functions", "reasoning_effort", "modalities", "web_search_options"):
        yield _body(CHAT, name, "x")
    yield _body(CHAT, "top_logprobs", 2)
    yield _body(CHAT, "top_logprobs", 21, logprobs=True)
    yield _body(CHAT, "top_logprobs", -1, logprobs=True)
    yield _body(CHAT, "max_completion_tokens", 0)
    yield _body(CHAT, "max_completion_tokens", 5, max_tokens=6)
    keywords = (7, "x", {"messages": []}, {"bos_token": "x"}, {"a b": 1}, {"a": [[[[[[[[[[1]]]]]]]]]]})
    yield from _bodies(CHAT, "chat_template_kwargs", keywords)


def _of_tokens() -> Iterator[Bad]:
    for body, field in (({}, "prompt"), ({"prompt": 7}, "prompt"), ({"prompt": "a", "frob": 1}, "frob")):
        yield Bad(f"/tokenize {body}", "/tokenize", json.dumps(body).encode(), field)
    for tokens in ("a", [-1], [VOCABULARY], [2**70], ["a"], [1.5], [[1]], 7, None, [True]):
        yield Bad(f"/detokenize {tokens}", "/detokenize", json.dumps({"tokens": tokens}).encode(), "tokens")


def _of_http() -> Iterator[Bad]:
    """Invalid HTTP requests: content types, methods, paths, sizes."""
    for path, subject in SUBJECT.items():
        data = json.dumps(subject).encode()
        form = "application/x-www-form-urlencoded"
        for kind in ("", "text/plain", form, "multipart/form-data; boundary=x", "json", "é"):
            yield Bad(f"type {kind}", path, data, None, 415, headers={"content-type": kind})
        yield Bad("gzip", path, data, None, 415, headers={**JSON_TYPE, "content-encoding": "gzip"})
        yield Bad("too large", path, b'{"prompt": "' + b"x" * 300_000 + b'"}', None, 413)
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
            yield Bad(method, path, b"", None, 405, method, {})
    unknown = "/ /v1 /v1/ /v1/completions/ /v1/embeddings /../../etc/passwd /%00 /v1//models"
    for path in (*unknown.split(), "/x" * 2000):
        yield Bad(path[:40], path, b"{}", None, 404)
    yield Bad("a model", "/v1/models/gpt-4", b"", "model", 404, "GET")
    yield Bad("a model's path", "/v1/models/../../etc", b"", "model", 404, "GET")


def _out_of_range(rng: random.Random) -> Bad:
    path = rng.choice([COMPLETIONS, CHAT])
    without = ("logprobs", "seed")
    numbers = [p for p in FIELDS.values() if p.kind in ("int", "float") and p.low is not None and p.name not in without]
    parameter = rng.choice(numbers)
    value: float = -rng.expovariate(1e-3) - 2 - abs(parameter.low or 0)
    return _body(path, parameter.name, int(value) if parameter.kind == "int" else value)


def _cut(rng: random.Random) -> Bad:
    path = rng.choice([COMPLETIONS, CHAT])
    whole = json.dumps({**SUBJECT[path], "stop": ["é", "\n"], "seed": 5}).encode()
    return Bad("cut", path, whole[: rng.randrange(1, len(whole))], "body")


def _noise(rng: random.Random) -> Bad:
    return Bad("noise", rng.choice([COMPLETIONS, CHAT]), b"\xff" + rng.randbytes(rng.randrange(2000)), "body")


def _strange_name(rng: random.Random) -> Bad:
    name = "x" + "".join(chr(rng.choice([rng.randrange(1, 0xD800), rng.randrange(32, 127)])) for _ in range(20))
    return _body(rng.choice([COMPLETIONS, CHAT]), name, 1)


def _strange_ids(rng: random.Random) -> Bad:
    ids = [rng.randrange(5, VOCABULARY) for _ in range(rng.randrange(50))]
    ids.insert(rng.randrange(len(ids) + 1), rng.choice([-1, VOCABULARY, rng.getrandbits(70) + VOCABULARY, -(2**63)]))
    return _body(COMPLETIONS, "prompt", ids)


RANDOM = (_out_of_range, _cut, _noise, _strange_name, _strange_ids)

GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
    b"GET\r\n\r\n",
    b"FROB /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n",
    b"\r\n" * 10 + b"x\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx: \x00\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n",
    b"GET /health HTTP/1.0\r\nhost: localhost\r\nhost: evil.example\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"GET /health\r\nhost: localhost\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked, gzip\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n",
)
"""Bytes that are not HTTP, or are contradictory."""
