"""All other APIs: malformed bodies, the OpenAPI document, and limits that apply to them as to chat completions."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
import tiers
from odd_requests import LITERALS, VALUES, mutated
from request_bodies import OTHERS as VALID
from served_apps import ask, begin, bundled_app, until

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.server import generation_endpoint
from nucleate.server.app import APIS
from nucleate.server.limits import ServerLimits
from nucleate.server.metrics import GENERATION_ROUTES
from nucleate.server.ollama_api import LoadRequest
from nucleate.server.openai.endpoints import CHAT, LONG_NAMES_CHAT, TEXT
from nucleate.server.openai.requests import read_body
from nucleate.server.openapi_document import document

jsonschema = pytest.importorskip("jsonschema")

HELLO = [{"role": "user", "content": "hi"}]
PLAIN = tuple(value for value in VALUES if not (isinstance(value, str) and value in LITERALS))
BY_URL = {api.url: api for api in APIS}


def schema_of(path: str) -> Any:
    made = document("tiny", "1", ServerLimits())
    reference = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return jsonschema.Draft202012Validator(made["components"]["schemas"][reference.rpartition("/")[2]])


@pytest.mark.slow
@pytest.mark.parametrize("path", VALID)
def test_malformed_bodies_raise_parameter_errors_only(path: str) -> None:
    api, rng, validator, accepted = BY_URL[path], random.Random(path), schema_of(path), 0
    limits, endpoints = ServerLimits(), {one.url: one for one in (LONG_NAMES_CHAT, TEXT)}
    validator.validate(VALID[path])
    for _ in range(tiers.count(150, 5000)):
        body = VALID[path]
        for _ in range(rng.randrange(1, 4)):
            body = mutated(body, rng, PLAIN) if isinstance(body, dict | list) and body else body
        try:
            made = api.translate(body)
            limits.check_body(made.body, 4096)
            read_body(endpoints[made.url], made.body, nc.SamplingParams())
        except (ParameterError, LoadRequest):
            continue
        accepted += 1
        assert not (errors := [error.message for error in validator.iter_errors(body)]), (body, errors)
    assert accepted


@pytest.mark.parametrize("path", VALID)
def test_deep_nesting_is_an_error(path: str) -> None:
    nested: Any = "x"
    for _ in range(5000):
        nested = [nested]
    api = BY_URL[path]

    def read(name: str) -> None:
        read_body(CHAT, api.translate({**VALID[path], name: nested}).body, nc.SamplingParams())

    for name in VALID[path]:
        with pytest.raises(ParameterError):
            read(name)


LONG: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "hi", "ignore_eos": True},
    "/v1/messages": {"messages": HELLO, "max_tokens": 900, "ignore_eos": True},
    "/api/chat": {"messages": HELLO, "options": {"ignore_eos": True}},
    "/api/generate": {"prompt": "hi", "options": {"ignore_eos": True}},
}


@pytest.mark.parametrize("path", LONG)
@bundled_app(limits=ServerLimits(max_concurrent_requests=1))
async def test_requests_take_slots_are_counted_and_kept_alive(
    app: Any, service: Any, path: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(generation_endpoint, "KEEP_ALIVE_SECONDS", 0.0001)
    for stream in (True, False):
        call = begin(app, path, {**LONG[path], "stream": stream})
        await until(lambda: service.num_sequences)
        busy = await ask(app, path, LONG[path])
        assert (busy.status, busy.headers["retry-after"]) == (503, "1")
        await until(lambda call=call, stream=stream: len(call.data) > 2000 or not stream)
        call.leave()
        await asyncio.wait_for(call.task, 60)
        assert service.num_sequences == 0
    metrics = (await ask(app, "/metrics")).data.decode()
    assert f'nucleate_http_requests_total{{model_name="tiny",route="{path}",status="503"}} 2.0' in metrics
    assert 'nucleate_finished_sequences_total{finish_reason="abort",model_name="tiny"} 2.0' in metrics


ENDS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"type": "response.failed"},
    "/v1/messages": {"type": "error", "error": {"type": "overloaded_error", "message": "Server is shutting down."}},
    "/api/chat": {"error": "Server is shutting down."},
    "/api/generate": {"error": "Server is shutting down."},
}


@pytest.mark.parametrize("path", LONG)
@bundled_app()
async def test_a_stream_that_fails_ends_with_an_error(app: Any, service: Any, path: str) -> None:
    call = begin(app, path, {**LONG[path], "stream": True})
    await until(lambda: len(call.data) > 2000)
    service.abort()
    await asyncio.wait_for(call.task, 60)
    assert call.over
    last = json.loads(call.data.splitlines()[-1 if path.startswith("/api") else -2].removeprefix(b"data: "))
    assert {name: last[name] for name in ENDS[path]} == ENDS[path]
    if path == "/v1/responses":
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"] == {"code": "server_error", "message": "Server is shutting down."}


@pytest.mark.parametrize("path", LONG)
@bundled_app()
async def test_there_is_one_output_whatever_the_defaults_are(app: Any, service: Any, path: str) -> None:
    service.defaults = service.defaults.replace(n=3, max_tokens=4)
    more = {"max_tokens": 4} if path == "/v1/messages" else {}
    call = await ask(app, path, {**LONG[path], **more, "stream": False})
    usage = call.json.get("usage", {})
    assert usage.get("output_tokens", call.json.get("eval_count")) == 4


def test_every_endpoint_has_its_own_metrics() -> None:
    assert {api.url for api in APIS} <= {*GENERATION_ROUTES}
