"""Outermost middleware: gives every request an id, turns exceptions into error responses and reports the end."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from nucleate.server.http_errors import HTTPError, http_error, internal_error
from nucleate.server.request_context import ClientDisconnected, RequestContext


class ErrorMiddleware:
    """Middleware around all others. on_end: called after every request, with the unexpected exception if any."""

    def __init__(self, app: ASGIApp, on_end: Callable[[RequestContext, BaseException | None], None]) -> None:
        self._app, self._on_end = app, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = RequestContext(scope, receive, send)
        scope["nucleate.context"] = context
        scope["app"] = self  # makes the router raise for unknown routes
        unexpected: BaseException | None = None
        try:
            await self._app(scope, receive, context.send)
        except ClientDisconnected:
            pass
        except HTTPException as error:
            await context.send_error(_router_error(error, scope))
        except Exception as error:  # noqa: BLE001  # every exception becomes an error response
            known = http_error(error)
            if known is None or context.status:
                unexpected = error
            if not context.status:
                await context.send_error(known or internal_error(context.id))
        finally:
            self._on_end(context, unexpected)


def _router_error(error: HTTPException, scope: Scope) -> HTTPError:
    path, method = scope["path"][:100], scope["method"][:20]
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"Method {method} is not allowed for {path}."
    elif error.status_code == HTTPStatus.NOT_FOUND:
        message = f"Path {path} does not exist."
    else:
        message = HTTPStatus(error.status_code).phrase
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    return HTTPError(error.status_code, message, headers=headers)
