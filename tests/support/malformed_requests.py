"""Invalid requests with the field that the error names: values of all fields, bodies that are no JSON, and HTTP."""

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
    """The cases without random values."""
    for path in SUBJECT:
        for name, parameter in FIELDS.items():
            yield from _of_field(path, name, parameter)
        yield from _of_body(path)
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


def _cut(rng: random.Random) -> Bad:
    path = rng.choice([COMPLETIONS, CHAT])
    whole = json.dumps({**SUBJECT[path], "stop": ["é", "\n"], "seed": 5}).encode()
    return Bad("cut", path, whole[: rng.randrange(1, len(whole))], "body")


def _noise(rng: random.Random) -> Bad:
    return Bad("noise", rng.choice([COMPLETIONS, CHAT]), b"\xff" + rng.randbytes(rng.randrange(2000)), "body")


RANDOM = (_cut, _noise)

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
