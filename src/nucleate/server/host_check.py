"""Checks the Host and Origin headers, so that web pages cannot reach a server without API keys through a browser.

DNS rebinding: a page of evil.example resolves its own name to 127.0.0.1, and the browser sends its requests here, with
``Host: evil.example``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from nucleate.parameters.parameter import ParameterError
from nucleate.server.http_errors import CLOSE, HTTPError

ANY = "*"


class HostMiddleware:
    """ASGI middleware that rejects requests for other hosts, or from pages of other hosts, with status 403.

    hosts: allowed host names, besides those of this machine. origins: allowed origins of pages, besides pages of these
    hosts; "*" allows any.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str] = (), origins: Collection[str] = ()) -> None:
        self._app, self._hosts, self._origins = app, frozenset(host.lower() for host in hosts), origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            host, origin = headers.get(b"host"), headers.get(b"origin")
            if host is not None and not self._allows(f"//{host}"):  # every browser sends it
                raise _forbidden("Host", host, "--allowed-host")
            if origin is not None and not self._origins_allow(origin):
                raise _forbidden("Origin", origin, "--allow-origin")
        await self._app(scope, receive, send)

    def _origins_allow(self, origin: str) -> bool:
        return ANY in self._origins or origin in self._origins or self._allows(origin)

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
            raise ParameterError(
                "allow_origin", f"--allow-origin must be an origin {example}, or *, got {origin!r:.80}"
            )


def _forbidden(header: str, value: str, flag: str) -> HTTPError:
    message = f"{header} {value[:80]!r} is not allowed. The operator of the server can allow it with {flag}."
    return HTTPError(403, message, code="forbidden_host", headers=CLOSE)
