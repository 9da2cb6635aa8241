"""API keys: who may ask. Knows the header that carries a key, and the router; knows nothing of what is asked for.

Closed by default: whatever no open route would answer needs a key, also a path that is not there.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from nucleate.parameters.parameter import ParameterError
from nucleate.server.openai.responses import error_body

VARIABLE = "NUCLEATE_API_KEYS"
"""The variable of the environment that may hold keys."""

MESSAGE = "this server needs an API key, in one header of the form 'Authorization: Bearer KEY'; got none that it knows"


class APIKeyMiddleware:
    """An ASGI middleware, to be put right around the router: a request passes with a key, or to an open route.

    router: asked which route it would choose, for the very scope that it will get. keys: all that are good; without
    any, every request passes. open: names of routes that need none. What is refused gets status 401 and OpenAI's error
    object; its body is not read. Raises ParameterError for a key that ``read_keys`` would not take.
    """

    def __init__(
        self, app: ASGIApp, router: Router, keys: Iterable[str], open: frozenset[str] = frozenset({"health"})
    ) -> None:
        self._app, self._router, self._open = app, router, open
        self._digests = tuple(sha256(_checked(key, "api_key", "an API key").encode()).digest() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        free = not self._digests or scope["type"] == "lifespan"
        if free or self._is_open(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "no valid API key"})
        else:
            body = error_body(MESSAGE, code="invalid_api_key")
            await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        """Whether the route that the router will choose, the first that matches in full, is an open one."""
        seen = dict(scope)  # matching may leave notes in it
        chosen = next((route for route in self._router.routes if route.matches(seen)[0] is Match.FULL), None)
        return isinstance(chosen, Route) and chosen.name in self._open  # what is mounted under a name is more than it

    def _has_key(self, scope: Scope) -> bool:
        """Whether the request carries a key that is good. How long it takes says nothing about the keys."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:  # of two, another program on the way may have looked at the other one
            return False
        scheme, _, key = given[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        digest = sha256(key.strip(b" ")).digest()
        good = False
        for own in self._digests:  # all of them, also after the right one
            good |= compare_digest(own, digest)
        return good


def read_keys(given: Iterable[str], file: Path | None, environment: str | None) -> frozenset[str]:
    """The keys that a server is told of, in any of three ways.

    given: keys themselves. file: a key a line; blank lines, and lines that begin with "#", are left out. environment:
    what the variable NUCLEATE_API_KEYS says, keys with commas between them; none if it is not set.

    Raises ParameterError, which never shows a key, for a key that is blank or not visible ASCII, for a file that cannot
    be read, and where a file or the variable is there but has no key: nobody is let in by mistake.
    """
    keys = [_checked(key, "api_key", f"API key number {number}") for number, key in enumerate(given, 1)]
    keys += [] if file is None else _of_file(file)
    if environment is not None:
        parts = enumerate(environment.split(","), 1)
        keys += [_checked(part.strip(" "), VARIABLE, f"{VARIABLE}: key number {number}") for number, part in parts]
    return frozenset(keys)


def _of_file(file: Path) -> list[str]:
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not a text file in UTF-8"
        raise ParameterError("api_key_file", f"the file of API keys cannot be read: {why}: {file}") from None
    lines = enumerate((line.strip(" \t\r") for line in text.split("\n")), 1)
    keys = [
        _checked(line, "api_key_file", f"the API key in line {number} of {file}")
        for number, line in lines
        if line and not line.startswith("#")
    ]
    if not keys:
        raise ParameterError("api_key_file", f"the file of API keys has none: {file}")
    return keys


def _checked(key: str, field: str, what: str) -> str:
    if not key:
        raise ParameterError(field, f"{what} must not be blank")
    if not all("!" <= character <= "~" for character in key):
        raise ParameterError(field, f"{what} must be of visible ASCII characters only, without spaces")
    return key
