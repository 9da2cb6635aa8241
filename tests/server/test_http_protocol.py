"""Requests mean the same however their bytes are cut into segments, also those that offer another protocol."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra 'server'")
from uvicorn.config import Config
from uvicorn.server import ServerState

from nucleate.server.run import HTTPProtocol

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
