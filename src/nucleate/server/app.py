"""The server as an ASGI application: which path is answered by what. Knows no socket and no signal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from nucleate import __version__
from nucleate.server.auth import APIKeyMiddleware
from nucleate.server.error_middleware import ErrorMiddleware
from nucleate.server.generation_endpoint import GenerationEndpoint
from nucleate.server.metrics import Metrics
from nucleate.server.openai.requests import ENDPOINTS
from nucleate.server.openapi_document import document
from nucleate.server.request_context import RequestContext
from nucleate.server.request_log import RequestLog
from nucleate.server.service import Service
from nucleate.server.tokenize_routes import TokenizeRoutes

Handler = Callable[[RequestContext], Awaitable[None]]


def application(
    service: Service, log: RequestLog, *, keys: Collection[str] = (), origins: Collection[str] = ()
) -> ASGIApp:
    """All of it. It runs the engine of the service for as long as it lives, as ASGI's lifespan says.

    keys: those of clients; without any, nobody needs one. origins: of pages in browsers that may ask ("*": any).
    """
    metrics = Metrics(service.name, lambda: service.engine.stats)
    told, text = InfoRoutes(service, bool(keys)), TokenizeRoutes(service)
    answering = {url: ("POST", GenerationEndpoint(url, service, metrics)) for url in ENDPOINTS}
    handlers: dict[str, tuple[str, Handler]] = {
        **answering,
        "/v1/models": ("GET", told.models),
        "/v1/models/{model:path}": ("GET", told.model),
        "/tokenize": ("POST", text.tokenize),
        "/detokenize": ("POST", text.detokenize),
        "/tokenizer_info": ("GET", text.info),
        "/health": ("GET", told.health),
        "/version": ("GET", told.version),
        "/metrics": ("GET", partial(_metrics, metrics)),
        "/openapi.json": ("GET", told.openapi),
    }
    routes = [
        Route(path, _Handler(handler), methods=[method], name=path.strip("/"))
        for path, (method, handler) in handlers.items()
    ]
    router = Router(routes, redirect_slashes=False, lifespan=lambda _: service.running())
    app: ASGIApp = ErrorMiddleware(APIKeyMiddleware(router, router, keys), partial(_over, log, metrics))
    if origins:
        headers = ["authorization", "content-type"]
        app = CORSMiddleware(app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=headers)
    return app


class _Handler:
    """A handler as an ASGI application."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(scope["nucleate.exchange"])


class InfoRoutes:
    """What the server tells of itself."""

    def __init__(self, service: Service, closed: bool) -> None:
        self._service = service
        self._document = document(service.name, __version__, service.limits, keys=closed)

    async def models(self, exchange: RequestContext) -> None:
        await exchange.reply(200, {"object": "list", "data": [self._model()]})

    async def model(self, exchange: RequestContext) -> None:
        asked = exchange.scope["path_params"]["model"]
        self._service.check_model(asked)
        await exchange.reply(200, self._model())

    def _model(self) -> dict[str, Any]:
        service = self._service
        own = {"id": service.name, "object": "model", "created": service.created, "owned_by": "nucleate"}
        return {**own, "max_model_len": service.max_model_len}

    async def health(self, exchange: RequestContext) -> None:
        self._service.check()
        await exchange.reply(200, {"status": "ok"})

    async def version(self, exchange: RequestContext) -> None:
        await exchange.reply(200, {"version": __version__})

    async def openapi(self, exchange: RequestContext) -> None:
        await exchange.reply(200, self._document)


async def _metrics(metrics: Metrics, exchange: RequestContext) -> None:
    body, content_type = metrics.render()
    await exchange.reply(200, body, content_type=content_type)


def _over(log: RequestLog, metrics: Metrics, exchange: RequestContext, error: BaseException | None) -> None:
    """An exchange is over: into the figures and the log."""
    told, scope, broken = exchange.told, exchange.scope, exchange.broken
    fault = broken.fault if broken is not None else None if error is None else "internal"
    metrics.request(exchange.route, exchange.status, exchange.seconds, error=fault, disconnected=exchange.left)
    client = scope.get("client")
    log.request(
        id=exchange.id,
        client=client and f"{client[0]}:{client[1]}",
        method=scope["method"],
        route=exchange.route or scope["path"],
        status=exchange.status,
        seconds=exchange.seconds,
        stream=told.stream,
        structured_outputs=told.structured_outputs,
        prompt_tokens=told.prompt_tokens,
        completion_tokens=told.completion_tokens if told.prompt_tokens is not None else None,
        first_token_seconds=told.first_token_seconds,
        finish_reasons=told.finish_reasons or None,
        disconnected=exchange.left or None,
        error=error,
        prompt=str(told.prompt) if log.prompts and told.prompt is not None else None,
    )
