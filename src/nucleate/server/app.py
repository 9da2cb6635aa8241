"""The ASGI application: routes, middleware and the informational endpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from nucleate import __version__
from nucleate.parameters.keywords import with_suggestions
from nucleate.server.access import ANY, APIKeyMiddleware, APIKeys, HostMiddleware
from nucleate.server.chat_api import ChatAPI
from nucleate.server.generation_endpoint import GenerationEndpoint
from nucleate.server.inspector_routes import OPEN_ROUTES, InspectorRoutes
from nucleate.server.messages_api import COUNT_URL, MESSAGES, count_tokens
from nucleate.server.metrics import Metrics
from nucleate.server.ollama_api import CHAT_API, GENERATE_API, OllamaRoutes
from nucleate.server.openai.endpoints import ENDPOINTS
from nucleate.server.openapi_document import OPEN_PAGE_ROUTES, document, page_routes
from nucleate.server.request_context import IGNORED_FIELDS_HEADER, Handler, RequestContext, RequestMiddleware
from nucleate.server.request_log import RequestLog
from nucleate.server.responses_api import RESPONSES
from nucleate.server.service import Service
from nucleate.server.tokenize import TokenizeRoutes

APIS: Sequence[ChatAPI] = (RESPONSES, MESSAGES, CHAT_API, GENERATE_API)


@with_suggestions
def application(
    service: Service,
    log: RequestLog,
    *,
    keys: APIKeys | Collection[str] = (),
    origins: Collection[str] = (),
    hosts: Collection[str] = (ANY,),
    root_path: str = "",
) -> ASGIApp:
    """Build the ASGI application. Its lifespan runs the engine of the service.

    log: of requests and events. keys: accepted API keys; none: no authentication. origins: allowed CORS origins ("*":
    any). hosts: allowed Host names besides those of this machine ("*": any). root_path: path prefix of a proxy in
    front, such as "/llm".
    """
    metrics = Metrics(service.name, lambda: service.engine.stats)
    info, text = InfoRoutes(service, bool(keys), root_path), TokenizeRoutes(service)
    generation = {url: ("POST", GenerationEndpoint(url, service, metrics)) for url in ENDPOINTS}
    others = {api.url: ("POST", GenerationEndpoint(api.url, service, metrics, api)) for api in APIS}
    handlers: dict[str, tuple[str, Callable[[RequestContext], Awaitable[None]]]] = {
        **generation,
        **others,
        COUNT_URL: ("POST", partial(count_tokens, service)),
        "/v1/models": ("GET", info.models),
        "/v1/models/{model:path}": ("GET", info.model),
        "/tokenize": ("POST", text.tokenize),
        "/detokenize": ("POST", text.detokenize),
        "/tokenizer_info": ("GET", text.info),
        "/health": ("GET", info.health),
        "/ping": ("GET POST", info.health),
        "/load": ("GET", info.load),
        "/version": ("GET", info.version),
        "/metrics": ("GET", partial(_metrics, metrics)),
        "/openapi.json": ("GET", info.openapi),
        **page_routes(),
        **OllamaRoutes(service).routes(),
        **InspectorRoutes(service, metrics, needs_key=bool(keys)).routes(),
    }
    routes = [
        Route(path, Handler(handler), methods=method.split(), name=path.strip("/"))
        for path, (method, handler) in handlers.items()
    ]
    router = Router(routes, redirect_slashes=False, lifespan=lambda _: service.running())
    open_routes = frozenset({"health", "ping"}) | OPEN_ROUTES | OPEN_PAGE_ROUTES
    app: ASGIApp = APIKeyMiddleware(router, router, keys, open_routes) if keys else router
    app = app if ANY in hosts else HostMiddleware(app, hosts, origins)
    app = RequestMiddleware(app, log, metrics, root_path)
    if origins:
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's JavaScript SDK sends a dozen of its own
            allow_private_network=True,  # pages of public sites may call a server on localhost, if their origin may
            expose_headers=["x-request-id", "retry-after", IGNORED_FIELDS_HEADER],
        )
    return app


class InfoRoutes:
    """Endpoints that describe the server: models, health, version, OpenAPI document."""

    def __init__(self, service: Service, needs_key: bool, root_path: str) -> None:
        self._service = service
        self._document = document(
            service.name,
            __version__,
            service.limits,
            needs_key=needs_key,
            root_path=root_path,
            ignore_unknown=service.options.ignore_unknown_fields,
        )

    async def models(self, context: RequestContext) -> None:
        await context.reply(200, {"object": "list", "data": [self._model(name) for name in self._service.names]})

    async def model(self, context: RequestContext) -> None:
        name = context.scope["path_params"]["model"]
        self._service.check_model(name)
        await context.reply(200, self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        service = self._service
        own = {"id": name, "object": "model", "created": service.created, "owned_by": "nucleate"}
        root = service.options.root or service.name
        return {**own, "root": root, "parent": None, "max_model_len": service.max_model_len}

    async def health(self, context: RequestContext) -> None:
        self._service.check_available()
        await context.reply(200, {"status": "ok"})

    async def load(self, context: RequestContext) -> None:
        await context.reply(200, {"server_load": self._service.num_requests})

    async def version(self, context: RequestContext) -> None:
        await context.reply(200, {"version": __version__})

    async def openapi(self, context: RequestContext) -> None:
        await context.reply(200, self._document)


async def _metrics(metrics: Metrics, context: RequestContext) -> None:
    body, content_type = metrics.render()
    await context.reply(200, body, content_type=content_type)
