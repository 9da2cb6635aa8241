"""HTTP: Host and Origin headers, CORS, API keys that change, and requests whose bytes are cut anywhere."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from server_process import Server, wait_until
from starlette.types import Receive, Scope, Send
from stream_clients import Stream, Wire, raw
from uvicorn.config import Config
from uvicorn.server import ServerState

from nucleate.parameters.parameter import ParameterError
from nucleate.server.access import APIKeys, HostMiddleware, check_origins
from nucleate.server.http_errors import HTTPError
from nucleate.server.run import HTTPProtocol

STORY = {"prompt": "Once upon a time", "temperature": 0.9, "ignore_eos": True}
PATH = "/v1/completions"
SDK_HEADERS = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-retry-count"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server without keys, on loopback, that allows pages of one origin."""
    with Server("--allow-origin", "https://a.example", "--log-format", "json") as running:
        yield running
        assert "Traceback" not in running.log


def logged(server: Server, **fields: object) -> dict[str, object]:
    """The first line of the log with these fields."""
    found: list[dict[str, object]] = []

    def search() -> bool:
        lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
        found[:] = [line for line in lines if fields.items() <= line.items()]
        return bool(found)

    wait_until(search)
    return found[0]


def allows(middleware: HostMiddleware, *headers: tuple[bytes, bytes]) -> bool:
    scope = {"type": "http", "headers": headers}
    try:
        asyncio.run(middleware(scope, None, None))  # type: ignore[arg-type]
    except HTTPError as error:
        return error.code != "forbidden_host"
    return True


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    """Accepts everything."""


LOCAL = ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.9.9.9", "[::1]:80", "localhost.", "app.localhost:3000"]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "",
    ":80",
    "[::1",
    "a b",
]


@pytest.mark.parametrize(("host", "allowed"), [*((host, True) for host in LOCAL), *((host, False) for host in FOREIGN)])
def test_hosts(host: str, allowed: bool) -> None:
    assert allows(HostMiddleware(_app), (b"host", host.encode())) == allowed
    assert allows(HostMiddleware(_app))  # HTTP/1.0 without the header: no browser


def test_allowed_hosts_and_origins() -> None:
    proxied = HostMiddleware(_app, ["llm.Example"], ["https://a.example"])
    host = (b"host", b"llm.example:443")
    assert allows(proxied, host)
    assert not allows(proxied, (b"host", b"other.example"))
    for origin in (b"https://a.example", b"https://llm.example", b"http://localhost:3000"):
        assert allows(proxied, host, (b"origin", origin))
    for origin in (b"http://a.example", b"https://evil.example", b"null", b""):
        assert not allows(proxied, host, (b"origin", origin))
    assert allows(HostMiddleware(_app, (), ["*"]), (b"host", b"localhost"), (b"origin", b"null"))


def test_origins() -> None:
    check_origins(["*", "null", "https://a.example", "http://localhost:3000", "http://[::1]:80", "moz-extension://abc"])
    bad = [
        "a.example",
        "https://a.example/",
        "https://a.example/path",
        "https://",
        "http://A.example",
        "",
        "https://u@a",
    ]
    for origin in [*bad, "http://a:x", "http://a:0"]:
        with pytest.raises(ParameterError, match="--allow-origin must be an origin such as"):
            check_origins([origin])


@pytest.mark.slow
def test_a_rebound_name_is_rejected(server: Server) -> None:
    for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
        for method, path in (("POST", PATH), ("GET", "/v1/models"), ("GET", "/health"), ("GET", "/metrics")):
            response = server.request(method, path, STORY if method == "POST" else None, headers)
            assert (response.status, response.json["error"]["code"]) == (403, "forbidden_host")
            assert "access-control-allow-origin" not in response.headers
    assert server.request("GET", "/health", headers={"host": "localhost:1"}).status == 200


def test_browsers_can_use_the_sdk(server: Server) -> None:
    preflight = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": SDK_HEADERS,
        "access-control-request-private-network": "true",
    }
    response = server.request("OPTIONS", PATH, headers=preflight)
    assert response.status == 200
    assert set(response.headers["access-control-allow-headers"].split(",")) >= set(SDK_HEADERS.split(","))
    assert response.headers["access-control-allow-private-network"] == "true"
    response = server.request("POST", PATH, {**STORY, "max_tokens": 1}, {"origin": "https://a.example"})
    assert response.status == 200
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    assert "x-request-id" in response.headers["access-control-expose-headers"]
    assert server.request("OPTIONS", PATH, headers={**preflight, "origin": "https://b.example"}).status == 400


def test_the_log_has_the_reason_of_a_rejected_request(server: Server) -> None:
    server.request("POST", PATH, {**STORY, "top_p": 7})
    line = logged(server, status=400, error_param="top_p")
    assert line["error_message"] == "top_p must be a number >= 0 and <= 1, got 7"
    server.request("POST", PATH, {**STORY, "model": "other"})
    assert logged(server, error_code="model_not_found")["status"] == 404
    server.request("POST", PATH, {"prompt": ["a secret", 5]})
    assert "error_message" not in logged(server, error_param="prompt")
    assert "a secret" not in server.log


def test_sequences_of_a_client_that_disconnects_are_counted(server: Server) -> None:
    name = "nucleate_finished_sequences_total"
    before = server.metric(name, finish_reason="abort")
    body = json.dumps({**STORY, "max_tokens": 900, "n": 3, "stream": True}).encode()
    with Wire(server) as wire:
        wire.send(raw("POST", PATH, body))
        assert wire.head() == 200
    wait_until(lambda: server.metric(name, finish_reason="abort") == before + 3)
    assert logged(server, client_disconnected=True)["finish_reasons"] == ["abort"] * 3


@pytest.mark.slow
def test_a_hangup_reloads_the_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n")

    def status(key: str) -> int:
        return server.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"}).status

    with Server("--api-key-file", str(file), "--log-format", "json") as server:
        assert (status("one"), status("two")) == (200, 401)
        stream = Stream(server, {**STORY, "max_tokens": 100}, {"authorization": "Bearer one"})
        wait_until(lambda: stream.frames)
        file.write_text("two\nthree\n")
        server.process.send_signal(signal.SIGHUP)
        assert logged(server, event="API keys reloaded")["count"] == 2
        assert (status("one"), status("two"), status("three")) == (401, 200, 200)
        assert stream.wait().frames[-1] == "[DONE]"  # the requests in flight go on
        file.write_text("not a key\n")
        server.process.send_signal(signal.SIGHUP)
        assert "line 1" in str(logged(server, event="API keys not reloaded")["error_message"])
        assert status("two") == 200
        assert server.stop() == 0


def test_a_hangup_without_a_key_file_changes_nothing(server: Server) -> None:
    server.process.send_signal(signal.SIGHUP)
    assert logged(server, event="API keys reloaded")["count"] == 0
    assert server.request("GET", "/health").status == 200


def test_replaced_keys() -> None:
    keys = APIKeys(["a"])
    with pytest.raises(ParameterError):
        keys.replace(["b", "not valid"])
    assert keys.accepts(b"a")
    keys.replace(["b"])
    assert (keys.accepts(b"a"), keys.accepts(b"b"), bool(keys), bool(APIKeys())) == (False, True, True, False)


@pytest.mark.slow
def test_a_large_response_arrives_in_pieces(server: Server) -> None:
    prompts = [[5 + index] * 300 for index in range(16)]
    response = server.request("POST", PATH, {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 5, "seed": 1})
    assert response.status == 200
    assert response.headers["transfer-encoding"] == "chunked"
    assert len(response.data) > 2**20
    choices = response.json["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [300] * 16
    one = server.request("POST", PATH, {"prompt": prompts[3], "max_tokens": 1, "prompt_logprobs": 5, "seed": 1})
    assert "transfer-encoding" not in one.headers
    expected = one.json["choices"][0]["prompt_logprobs"]
    for step, alone in zip(choices[3]["prompt_logprobs"][1:], expected[1:], strict=True):
        token = str(prompts[3][0])
        assert step[token]["logprob"] == pytest.approx(alone[token]["logprob"], abs=1e-3)  # a batch rounds differently
        assert {1, 2, 3, 4, 5} <= {one["rank"] for one in step.values()}


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
BODY = b'{"prompt": "Once"}'


def request(
    method: str, path: str, body: bytes = b"", *headers: str, host: str = "host: x", chunked: bool = False
) -> bytes:
    length = ["transfer-encoding: chunked"] if chunked else [f"content-length: {len(body)}"] if body else []
    data = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    return "\r\n".join([f"{method} {path} HTTP/1.1", host, *headers, *length, "", ""]).encode() + data


H2C = "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAB"
PLAIN = request("POST", "/v1/completions", BODY)
WIRES = {
    "plain": (PLAIN, 1),
    "get": (request("GET", "/health?a=%20b"), 1),
    "body that looks like a request": (request("POST", "/health", SMUGGLED), 1),
    "h2c": (request("POST", "/v1/completions", BODY, *H2C), 1),
    "h2c with another case and spaces": (request("POST", "/a", BODY, "connection:  uPGRADE", "UPGRADE:   H2C  "), 1),
    "h2c after other headers": (request("POST", "/a", BODY, "x: ", "Upgrade: h2c", "Connection: upgrade"), 1),
    "h2c whose body looks like a request": (
        request("GET", "/health", SMUGGLED, "Connection: Upgrade", "Upgrade: h2c"),
        1,
    ),
    "websocket": (request("GET", "/health", b"", "Connection: Upgrade", "Upgrade: websocket"), 1),
    "two offers": (request("POST", "/a", BODY, "Connection: Upgrade", "Upgrade: h2c", "Upgrade: websocket"), 1),
    "h2c in chunks": (request("POST", "/a", BODY, *H2C, chunked=True), 1),
    "chunks that look like a request": (request("POST", "/a", SMUGGLED, *H2C, chunked=True), 1),
    "an offer without a connection header": (request("POST", "/a", BODY, "Upgrade: h2c"), 1),
    "pipelined": (PLAIN + request("POST", "/b", SMUGGLED, *H2C) + request("GET", "/c", b"", *H2C) + PLAIN, 4),
}


class Transport(asyncio.Transport):
    """Collects what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = bytearray(), False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        """Everything is sent at once anyway."""

    def resume_reading(self) -> None:
        """See above."""


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Responds with what the application got."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    names = sorted(name.decode() for name, _ in scope["headers"] if name not in (b"upgrade", b"connection"))
    got = [scope["method"], scope["raw_path"].decode(), scope["query_string"].decode(), names, body.decode()]
    text = json.dumps(got).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


CONFIG = Config(echo, http=HTTPProtocol, ws="none", log_config=None, access_log=False, date_header=False)


async def responses(segments: Sequence[bytes]) -> list[Any]:
    """What the application got for each request; a status where it got none."""
    state, transport = ServerState(), Transport()
    protocol = HTTPProtocol(CONFIG, state, {})
    protocol.connection_made(transport)
    for segment in segments:
        if not transport.closed:
            protocol.data_received(segment)
            await asyncio.sleep(0)
    while state.tasks:
        await asyncio.wait(state.tasks)
    protocol.connection_lost(None)
    texts = bytes(transport.written).split(b"HTTP/1.1 ")[1:]
    return [json.loads(text.partition(b"\r\n\r\n")[2]) if text[:3] == b"200" else int(text[:3]) for text in texts]


def cuts(data: bytes, places: Sequence[int]) -> list[bytes]:
    ends = [*sorted(places), len(data)]
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("name", WIRES)
def test_requests_are_the_same_however_they_are_cut(name: str) -> None:
    data, count = WIRES[name]
    rng = random.Random(name)

    async def run() -> None:
        whole = await responses([data])
        assert len(whole) == count
        assert all(isinstance(one, list) for one in whole), whole
        assert await responses([data[i : i + 1] for i in range(len(data))]) == whole
        for place in range(1, len(data)):
            assert await responses(cuts(data, [place])) == whole, data[:place]
        for _ in range(60):
            places = rng.sample(range(1, len(data)), rng.randint(2, 6))
            assert await responses(cuts(data, places)) == whole, places

    asyncio.run(run())


def test_an_offer_changes_nothing_but_its_own_header() -> None:
    body = asyncio.run(responses([request("POST", "/a?b=c", BODY, "x-a: 1", *H2C, "x-a: 2")]))
    assert body == [["POST", "/a", "b=c", ["content-length", "host", "http2-settings", "x-a", "x-a"], BODY.decode()]]


@pytest.mark.slow
def test_many_offers_in_one_segment() -> None:
    data = request("GET", "/health", b"", *H2C) * 2000
    assert len(asyncio.run(responses([data]))) == 2000


@pytest.mark.parametrize(
    "data",
    [
        b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n" + SMUGGLED,
        request("POST", "/a", BODY, "Connection: Upgrade", "Upgrade: h2c", "transfer-encoding: chunked"),
        request("POST", "/a", BODY, "Connection: Upgrade", "Upgrade: h2c", "host: y"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_two_servers_may_read_differently_is_refused_once(data: bytes) -> None:
    async def run() -> None:
        assert await responses([data]) == [400]
        for place in range(1, len(data)):
            found = await responses(cuts(data, [place]))
            assert found == [400], (found, data[:place])

    asyncio.run(run())
