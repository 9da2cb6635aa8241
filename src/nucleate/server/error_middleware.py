"""The front: every request gets an id, one answer and a line in the log, and no error leaves as a traceback."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from nucleate.server.http_errors import HTTPError, refusal_of, unexpected
from nucleate.server.request_context import ClientDisconnected, RequestContext


class ErrorMiddleware:
    """Middleware around all others. over: told of every exchange that is over, and of the error nobody planned for."""

    def __init__(self, app: ASGIApp, over: Callable[[RequestContext, BaseException | None], None]) -> None:
        self._app, self._over = app, over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = RequestContext(scope, receive, send)
        scope["nucleate.exchange"] = exchange
        scope["app"] = self  # then the router raises what it has no route for
        problem: BaseException | None = None
        try:
            await self._app(scope, receive, exchange.send)
        except ClientDisconnected:
            pass
        except HTTPException as error:
            await exchange.refuse(_of_router(error, scope))
        except Exception as error:  # noqa: BLE001  # whatever it is, the client gets an answer
            refusal = refusal_of(error)
            if refusal is None or exchange.status:
                problem = error
            if not exchange.status:
                await exchange.refuse(refusal or unexpected(exchange.id))
        finally:
            self._over(exchange, problem)


def _of_router(error: HTTPException, scope: Scope) -> HTTPError:
    path, method = scope["path"][:100], scope["method"][:20]
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{path} does not take {method}"
    elif error.status_code == HTTPStatus.NOT_FOUND:
        message = f"there is nothing at {path}"
    else:
        message = HTTPStatus(error.status_code).phrase
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    return HTTPError(error.status_code, message, headers=headers)
