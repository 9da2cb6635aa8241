"""Who may use the server: API keys, and the Host and Origin headers of browsers.

With keys configured, every request needs one, except for the open routes; so do requests for unknown paths. The headers
are checked so that web pages cannot reach a server without API keys through a browser (DNS rebinding): a page of
evil.example resolves its own name to 127.0.0.1, and the browser sends its requests here, with ``Host: evil.example``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from nucleate.parameters.parameter import ParameterError, invalid_value
from nucleate.server.http_errors import CLOSE, HTTPError, error_response, is_anthropic

VARIABLE = "NUCLEATE_API_KEYS"
"""The environment variable with API keys."""

MESSAGE = "Missing or invalid API key. Send it in one header 'Authorization: Bearer KEY'."


class APIKeys:
    """The accepted API keys; none: no authentication. Raises ParameterError for an invalid key."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self.replace(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def replace(self, keys: Iterable[str]) -> None:
        """Replace all keys, also while the server runs. Raises ParameterError, without any effect."""
        self._digests = tuple(sha256(_checked(key, "api_key", "an API key").encode()).digest() for key in keys)

    def accepts(self, key: bytes) -> bool:
        """Return whether a key is valid, in constant time."""
        digest, valid = sha256(key).digest(), False
        for own in self._digests:  # no early exit: constant time
            valid |= compare_digest(own, digest)
        return valid


class APIKeyMiddleware:
    """ASGI middleware directly around the router: rejects requests without a valid key with status 401.

    router: used to find the route of a request. keys: the valid keys; none: every request passes. open_routes: names
    of routes that need no key. On paths of Anthropic's API, the key may be in the header x-api-key, or in both headers.
    The body of a rejected request is not read. Raises ParameterError for an invalid key.
    """

    def __init__(
        self,
        app: ASGIApp,
        router: Router,
        keys: APIKeys | Iterable[str],
        open_routes: frozenset[str] = frozenset({"health"}),
    ) -> None:
        self._app, self._router, self._open_routes = app, router, open_routes
        self._keys = keys if isinstance(keys, APIKeys) else APIKeys(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unprotected = not self._keys or scope["type"] == "lifespan"
        if unprotected or self._is_open(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "no valid API key"})
        else:
            body = error_response(scope, HTTPError(401, MESSAGE, code="invalid_api_key"))
            await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        """Return whether the route that the router will choose, the first full match, is open."""
        copied = dict(scope)  # matching may modify it
        chosen = next((route for route in self._router.routes if route.matches(copied)[0] is Match.FULL), None)
        return isinstance(chosen, Route) and chosen.name in self._open_routes  # a mount has many paths

    def _has_key(self, scope: Scope) -> bool:
        bearer = _only(scope, b"authorization")
        scheme, _, key = (bearer or b"").partition(b" ")
        keys = [key.strip(b" ")] if scheme.lower() == b"bearer" else []
        if is_anthropic(scope) and (other := _only(scope, b"x-api-key")) is not None:
            keys.append(other.strip(b" "))  # clients may send both headers, and set only one to the key
        return any(self._keys.accepts(one) for one in keys)


def _only(scope: Scope, name: bytes) -> bytes | None:
    """Return the value of a header that occurs once: of two, a proxy may have checked the other one."""
    values = [value for header, value in scope["headers"] if header == name]
    return values[0] if len(values) == 1 else None


def read_keys(given: Iterable[str], file: Path | None, environment: str | None) -> frozenset[str]:
    """Collect the API keys from flags, a file and the environment.

    given: keys from flags. file: one key per line; blank lines and lines that start with "#" are skipped. environment:
    the value of NUCLEATE_API_KEYS, comma-separated keys; None: not set.

    Raises ParameterError, which never shows a key, for a key that is blank or not visible ASCII, for an unreadable
    file, and for a file or variable without keys: otherwise the server would be open by mistake.
    """
    keys = [_checked(key, "api_key", f"API key number {number}") for number, key in enumerate(given, 1)]
    keys += [] if file is None else _read_file(file)
    if environment is not None:
        parts = enumerate(environment.split(","), 1)
        keys += [_checked(part.strip(" "), VARIABLE, f"{VARIABLE}: key number {number}") for number, part in parts]
    return frozenset(keys)


def _read_file(file: Path) -> list[str]:
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a UTF-8 text file"
        raise ParameterError("api_key_file", f"API key file {file} cannot be read: {reason}") from None
    lines = enumerate((line.strip(" \t\r") for line in text.split("\n")), 1)
    keys = [
        _checked(line, "api_key_file", f"API key in line {number} of {file}")
        for number, line in lines
        if line and not line.startswith("#")
    ]
    if not keys:
        raise ParameterError("api_key_file", f"API key file {file} has no keys")
    return keys


def _checked(key: str, field: str, what: str) -> str:
    if not key:
        raise ParameterError(field, f"{what} must not be blank")
    if not all("!" <= character <= "~" for character in key):
        raise ParameterError(field, f"{what} must consist of visible ASCII characters without spaces")
    return key


ANY = "*"


class HostMiddleware:
    """ASGI middleware that rejects requests for other hosts, or from pages of other hosts, with status 403.

    hosts: allowed host names, besides those of this machine. origins: further allowed origins of pages; "*" allows any.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str] = (), origins: Collection[str] = ()) -> None:
        self._app, self._hosts, self._origins = app, frozenset(host.lower() for host in hosts), origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            host, origin = headers.get(b"host"), headers.get(b"origin")
            if host is not None and not self._allows(f"//{host}"):  # every browser sends it
                raise _forbidden("Host", host, "--allowed-host")
            if origin is not None and not {ANY, origin}.intersection(self._origins) and not self._allows(origin):
                raise _forbidden("Origin", origin, "--allow-origin")
        await self._app(scope, receive, send)

    def _allows(self, url: str) -> bool:
        try:
            host = (urlsplit(url).hostname or "").rstrip(".")
        except ValueError:
            return False
        return host in self._hosts or is_loopback(host) or host.endswith(".localhost")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_origins(origins: Iterable[str]) -> None:
    """Check allowed origins: "*", or scheme, host and port as browsers send them. Raises ParameterError."""
    for origin in origins:
        try:
            url = urlsplit(origin)
            valid = bool(url.scheme and url.hostname) and f"{url.scheme}://{url.netloc}" == origin == origin.lower()
            valid = valid and "@" not in url.netloc and (url.port is None or url.port > 0)
        except ValueError:
            valid = False
        if not valid and origin not in (ANY, "null"):
            example = "such as https://example.com or http://localhost:3000, without a path"
            raise invalid_value("--allow-origin", f"an origin {example}, or *", origin, "allow_origin")


def _forbidden(header: str, value: str, flag: str) -> HTTPError:
    message = f"{header} {value[:80]!r} is not allowed. The operator of the server can allow it with {flag}."
    return HTTPError(403, message, code="forbidden_host", headers=CLOSE)
