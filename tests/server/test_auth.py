"""API keys: valid and invalid keys, open routes, and where keys are read from."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiers
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Host, Mount, Route, Router, WebSocketRoute

from nucleate.parameters.parameter import ParameterError
from nucleate.server import access as module
from nucleate.server.access import VARIABLE, APIKeyMiddleware, read_keys

KEYS = ("sk-first", "sk-second", "sk-first-and-more")
GOOD = (b"authorization", b"Bearer sk-second")
Header = tuple[bytes, bytes]


def respond(text: str) -> Any:
    async def endpoint(request: Request) -> PlainTextResponse:
        return PlainTextResponse(text)

    return endpoint


async def greet(socket: Any) -> None:
    await socket.accept()
    await socket.close()


def router() -> Router:
    """One open route, and others with similar paths."""
    inner = [Route("/health", respond("mounted"), name="health"), Route("/models", respond("inner models"))]
    return Router(
        [
            Route("/v1/models", respond("models"), name="models"),
            Route("/health", respond("health"), name="health"),
            Route("/healthy", respond("healthy"), name="healthy"),
            Route("/echo/{path:path}", respond("echo"), name="echo"),
            Mount("/sub", routes=inner),
            Mount("/named", routes=inner, name="health"),
            Host("health.example", Router(inner), name="health"),
            WebSocketRoute("/health", greet, name="health"),
            Route("/{name}", respond("any"), name="any"),
        ]
    )


def scope_of(path: str, method: str = "GET", root_path: str = "", headers: tuple[Header, ...] = ()) -> dict[str, Any]:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(errors="replace"),
        "query_string": b"",
        "root_path": root_path,
        "headers": list(headers),
        "scheme": "http",
        "server": ("localhost", 80),
    }


def call(app: Any, scope: dict[str, Any]) -> tuple[int, dict[str, str], str]:
    """Status, headers and body of an app's response; fails if the app reads the request body."""
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    if sent[0]["type"] == "websocket.close":
        return sent[0]["code"], {}, ""
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:]).decode()


def status(app: Any, path: str, *headers: Header, **more: Any) -> int:
    return call(app, scope_of(path, headers=headers, **more))[0]


def guarded(keys: tuple[str, ...] = KEYS, **more: Any) -> APIKeyMiddleware:
    routes = router()
    return APIKeyMiddleware(routes, routes, keys, **more)


def bearer(key: str) -> Header:
    return b"authorization", b"Bearer " + key.encode("latin-1")


def test_without_keys_every_request_is_accepted() -> None:
    assert call(guarded(()), scope_of("/v1/models"))[2] == "models"
    assert status(guarded(()), "/a/b/c") == 404


@pytest.mark.parametrize("key", KEYS)
def test_every_configured_key_is_accepted(key: str) -> None:
    assert call(guarded(), scope_of("/v1/models", headers=(bearer(key),)))[2] == "models"
    assert status(guarded(), "/a/b/c", bearer(key)) == 404
    assert status(guarded(), "/v1/models", bearer(key), method="POST") == 405


def test_the_response_to_an_invalid_key() -> None:
    code, headers, body = call(guarded(), scope_of("/v1/models", headers=(bearer("sk-secret"),)))
    error = json.loads(body)["error"]
    assert (code, headers["www-authenticate"], headers["content-type"]) == (401, "Bearer", "application/json")
    assert int(headers["content-length"]) == len(body)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
    assert "Authorization: Bearer" in error["message"]
    assert "sk-" not in body


INVALID_KEYS = (
    *("", " ", "sk-firs", "sk-first-", "sk-first-and-more-still", "k-first", "SK-FIRST", "sk-first sk-second"),
    *("sk-first,sk-second", "sk-first\x00", "sk-first\t", "sk-f\xefrst", "\xff" * 5000, '"sk-first"'),
)
OTHER_SCHEMES = (
    *(b"sk-first", b"Bearersk-first", b"Bearer\tsk-first", b"Basic sk-first", b"Token sk-first"),
    *(b"Bearer Bearer sk-first", b"", b" "),
)
OTHER_HEADERS = (
    *((name, b"sk-first") for name in (b"x-api-key", b"api-key")),
    *((name, b"Bearer sk-first") for name in (b"proxy-authorization", b"authorization\x00")),
    (b"cookie", b"authorization=Bearer sk-first"),
)


@pytest.mark.parametrize(
    "headers",
    [
        (),
        *((bearer(key),) for key in INVALID_KEYS),
        *(((b"authorization", value),) for value in OTHER_SCHEMES),
        *((header,) for header in OTHER_HEADERS),
        (bearer(KEYS[0]), bearer(KEYS[0])),
        (bearer("nothing"), bearer(KEYS[0])),
        (bearer(KEYS[0]), (b"authorization", b"")),
    ],
)
def test_requests_without_a_valid_key(headers: tuple[Header, ...]) -> None:
    assert status(guarded(), "/v1/models", *headers) == 401
    assert status(guarded(), "/health", *headers) == 200


@pytest.mark.parametrize("value", [b"bearer sk-first", b"BEARER sk-first", b"Bearer   sk-first "])
def test_the_authentication_scheme_is_case_insensitive(value: bytes) -> None:
    assert status(guarded(), "/v1/models", (b"authorization", value)) == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", "/nothing/there", "/", "", "//health", "/health/", "/HEALTH", "/health?x", "/health/.."),
        *("/health/../v1/models", "/v1/models/../health", "/v1/models/../../health", "/./health", "/health;x"),
        *("/health#", "/health\x00", "/health%2f", "/%68ealth", "/health\\", "\\health", "health", "/health\n\n"),
        *("/health\r", "/ health", "/healthy", "//v1/models", "/v1/models/", "http://localhost/health"),
        *("/sub/health", "/named/health", "/named/models", "/echo/health", "/\uff48ealth"),
    ],
)
def test_a_path_similar_to_an_open_route_is_not_open(path: str) -> None:
    assert status(guarded(), path) == 401
    assert status(guarded(), path, GOOD) != 401


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get", "", "X"])
def test_other_methods_of_an_open_route_need_a_key(method: str) -> None:
    assert status(guarded(), "/health", method=method) == 401
    assert status(guarded(), "/v1/models", method=method) == 401
    assert status(guarded(), "/health", GOOD, method=method) == 405


def test_open_routes() -> None:
    assert call(guarded(), scope_of("/health"))[2] == "health"
    assert status(guarded(), "/health", method="HEAD") == 200
    assert status(guarded(), "/v1/models", method="HEAD") == 401
    assert status(guarded(), "/api/health", root_path="/api") == 200
    assert status(guarded(open_routes=frozenset()), "/health") == 401
    assert status(guarded(open_routes=frozenset({"models"})), "/health") == 401
    assert status(guarded(open_routes=frozenset({"models"})), "/v1/models") == 200


def test_a_host_header_does_not_bypass_authentication() -> None:
    for host in (b"health.example", b"HEALTH.example:80", b"x/health", b"localhost/health?", b""):
        assert status(guarded(), "/v1/models", (b"host", host)) == 401
        assert status(guarded(), "/models", (b"host", host)) == 401


def test_scopes_other_than_http() -> None:
    socket_scope = {**scope_of("/health"), "type": "websocket", "subprotocols": []}
    del socket_scope["method"]
    assert call(guarded(), socket_scope)[0] == 1008
    assert status(guarded(), "/health", GOOD) == 200
    assert call(guarded(), {**scope_of("/v1/models"), "type": "something new"})[0] == 401
    scope_types = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope_types.append(scope["type"])

    asyncio.run(APIKeyMiddleware(app, router(), KEYS)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    asyncio.run(APIKeyMiddleware(app, router(), KEYS)({**socket_scope, "headers": [GOOD]}, None, None))  # type: ignore[arg-type]
    assert scope_types == ["lifespan", "websocket"]


PARTS = st.sampled_from(["/", "health", "v1", "models", "sub", "named", "echo", "..", "%2f", "\n", "y", "api"])


ROUTERS = [
    router(),
    Starlette(
        routes=[
            Route("/v1/models", respond("models"), name="models"),
            Mount("/sub", Starlette(routes=[Route("/health", respond("mounted"), name="health")])),
            Route("/health", respond("health"), name="health", methods=["GET", "HEAD"]),
            Route("/{path:path}", respond("any"), name="any"),
        ]
    ).router,
]


@settings(max_examples=tiers.count(37, 150))
@given(
    which=st.integers(0, 1),
    parts=st.lists(PARTS, max_size=6),
    root_path=st.sampled_from(["", "", "/api", "/health", "/sub", "/v1"]),
    method=st.sampled_from(["GET", "HEAD", "POST", "OPTIONS"]),
)
def test_exactly_the_requests_that_the_router_matches_to_an_open_route_are_open(
    which: int, parts: list[str], root_path: str, method: str
) -> None:
    routes = ROUTERS[which]
    chosen: dict[str, Any] = scope_of(root_path + "/" + "".join(parts), method, root_path)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        chosen["passed"] = True

    endpoints = {id(route.endpoint) for route in routes.routes if isinstance(route, Route) and route.name == "health"}
    matched = dict(chosen)
    asyncio.run(routed(routes, matched))
    is_open = id(matched.get("endpoint")) in endpoints and method in matched["route"].methods
    try:
        call(APIKeyMiddleware(app, routes, KEYS), chosen)
    except IndexError:  # nothing was sent
        assert chosen.pop("passed")
        assert is_open
    else:
        assert not is_open


async def routed(routes: Any, scope: dict[str, Any]) -> None:
    """Let a router respond, and store the matched route in the scope."""

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        pass

    scope["app"] = None
    try:
        await routes(scope, receive, send)
    except Exception:  # noqa: BLE001  # 404, 405, or an endpoint that misses its application
        return


def test_all_keys_are_compared_even_after_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare = module.compare_digest

    def noticed(own: bytes, given: bytes) -> bool:
        compared.append((own, given))
        return compare(own, given)

    monkeypatch.setattr(module, "compare_digest", noticed)
    app = guarded()
    for key in (*KEYS, "none", "", "\xff"):
        compared.clear()
        assert (status(app, "/v1/models", bearer(key)) == 200) == (key in KEYS)
        assert len({own for own, _ in compared}) == len(compared) == len(KEYS)
        assert {len(digest) for pair in compared for digest in pair} == {32}


@pytest.mark.parametrize("key", ["", " ", "sk first", "sk-\u00e9", "sk\n", "\ud800", "sk\x7f"])
def test_a_key_that_no_client_could_send_is_rejected(key: str) -> None:
    for make in (lambda: guarded(("good", key)), lambda: read_keys(["good", key], None, None)):
        with pytest.raises(ParameterError, match=r"API key.* must ") as caught:
            make()
        assert caught.value.field == "api_key"
        assert not key.strip() or key not in str(caught.value)


def test_keys_are_read_from_flags_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbf# ours\r\n\r\n  one \r\n\t# theirs\ntwo#2\n")
    found = read_keys(["flag", "flag", "a,b"], file, "env, three ,one")
    assert found == {"flag", "a,b", "one", "two#2", "env", "three"}
    assert read_keys([], None, None) == frozenset()


@pytest.mark.parametrize("text", ["", " ", "a,", ",a", "a,,b", "a b", "a,\u00e9", "a\n"])
def test_an_invalid_environment_variable(text: str) -> None:
    with pytest.raises(ParameterError, match=f"{VARIABLE}: key number [12] must"):
        read_keys(["good"], None, text)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has no keys"),
        (b"# only\n\n", "has no keys"),
        (b"a\nb c # laptop\n", "line 2 of .* without spaces"),
        ("a\n\n\u00e9\n".encode(), "line 3 of .* visible ASCII"),
        (b"a\x0bb\n", "line 1"),
        (b"good\n\x0ba\n", "line 2"),
        (b"a\x00\n", "line 1"),
        (b"\xff\xfea\x00", "not a UTF-8 text file"),
    ],
)
def test_an_invalid_key_file(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "keys").write_bytes(data)
    with pytest.raises(ParameterError, match=message) as caught:
        read_keys(["good"], tmp_path / "keys", None)
    assert caught.value.field == "api_key_file"


def test_a_missing_key_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ParameterError, match=r"cannot be read: (Is a directory|No such file)"):
            read_keys([], path, None)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server that requires API keys, on loopback."""
    health = Route("/health", respond("health"), name="health", methods=["GET", "HEAD"])
    models = Route("/v1/models", respond("models"), name="models", methods=["GET", "POST"])
    page = Starlette(routes=[health, models])
    page.add_middleware(APIKeyMiddleware, router=page.router, keys=KEYS)  # type: ignore[arg-type]
    config = uvicorn.Config(page, port=0, http="httptools", ws="none", log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join()


def talk(port: int, *requests: bytes) -> list[int]:
    """The status codes of the responses to raw requests on one connection."""
    found = []
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection, connection.makefile("rb") as replies:
        for request in requests:
            connection.sendall(request)
            found.append(int(replies.readline().split()[1]))
            length = 0
            for line in iter(replies.readline, b"\r\n"):
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            if not request.startswith(b"HEAD"):
                assert len(replies.read(length)) == length
    return found


def raw(target: str, *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "host: localhost", *headers, f"content-length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


KEY = "Authorization: Bearer sk-first"


def test_a_connection_stays_usable_after_a_401_with_an_unread_body(port: int) -> None:
    large = raw("/v1/models", method="POST", body=b"x" * 3_000_000)
    requests = (large, raw("/v1/models", KEY), raw("/v1/models", "a: b"), large, raw("/health"))
    assert talk(port, *requests) == [401, 200, 401, 401, 200]


OPEN_TARGETS = ("/health", "/health?x=/v1/models", "/%68ealth", "http://elsewhere/health")
CLOSED_TARGETS = (
    *("http://elsewhere/v1/models", "http://health/v1/models?/health", "//health", "/health/", "/health%00"),
    *("/health%2f..%2fv1%2fmodels", "/v1/models/../health", "/health/../v1/models", "//v1/models", "/v1%2fmodels"),
    *("/v1/models?/health", "/nothing", "/openapi.json", "/docs"),
)


@pytest.mark.parametrize(
    ("target", "expected"), [*((one, 200) for one in OPEN_TARGETS), *((one, 401) for one in CLOSED_TARGETS)]
)
def test_request_targets_over_a_socket(port: int, target: str, expected: int) -> None:
    assert talk(port, raw(target), raw("/health")) == [expected, 200]


def test_headers_over_a_socket(port: int) -> None:
    for headers, expected in [
        ((KEY,), 200),
        (("AUTHORIZATION: bearer sk-first",), 200),
        ((KEY, KEY), 401),
        (("Authorization: Bearer none", KEY), 401),
        (("Authorization:",), 401),
        (("X-Forwarded-Prefix: /health", "X-Original-URL: /health", "X-Rewrite-URL: /health"), 401),
    ]:
        assert talk(port, raw("/v1/models", *headers)) == [expected]
    for method in ("POST", "OPTIONS", "DELETE", "TRACE"):
        assert talk(port, raw("/health", method=method)) == [401]
    assert talk(port, raw("/health", method="HEAD"), raw("/v1/models", method="HEAD")) == [200, 401]
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA==")
    assert talk(port, raw("/v1/models", *upgrade)) == [401]
