"""The ASGI application: routes, middleware, and the endpoints that generate nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from nucleate import __version__
from nucleate.chat.chat_format import NO_TOOLS
from nucleate.chat.tools import ToolUse
from nucleate.inspector.page import inspector_file, page_files
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError, invalid_value
from nucleate.server.access import ANY, APIKeyMiddleware, APIKeys, HostMiddleware
from nucleate.server.chat_api import ChatAPI
from nucleate.server.generation_endpoint import GenerationEndpoint, answer
from nucleate.server.inspector_routes import InspectorRoutes, Routes, page_routes
from nucleate.server.messages_api import COUNT_URL, MESSAGES, count_tokens
from nucleate.server.metrics import Metrics
from nucleate.server.ollama_api import CHAT_API, GENERATE_API
from nucleate.server.ollama_routes import OllamaRoutes
from nucleate.server.openai.endpoints import ENDPOINTS, INVOCATIONS
from nucleate.server.openai.fields import are_token_ids, present_fields, reject_deep_nesting
from nucleate.server.openai.messages import DETOKENIZE, TEMPLATE_FIELDS, TOKENIZE, read_messages, read_template_options
from nucleate.server.openapi_document import document
from nucleate.server.request_context import (
    IGNORED_FIELDS_HEADER,
    Handler,
    RequestContext,
    RequestMiddleware,
    reply_with,
)
from nucleate.server.request_log import RequestLog
from nucleate.server.responses_api import RESPONSES
from nucleate.server.service import Service
from nucleate.tokenization.chat_template import ChatTemplateOptions

APIS: Sequence[ChatAPI] = (RESPONSES, MESSAGES, CHAT_API, GENERATE_API)
OPEN_ROUTES = frozenset({"", "chat/{file}", "health", "ping", "docs", "docs/{file}", "inspector", "inspector/{file}"})
"""Names of the routes that need no API key: the pages are the same for everybody, what they show is not."""
RUNNING = b"Ollama is running"
"""What programs get at the front page. Clients of Ollama's API look for this text before they send a request."""


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
    info = InfoRoutes(service, metrics, bool(keys), root_path)
    inspector, ollama = InspectorRoutes(service, metrics, needs_key=bool(keys)), OllamaRoutes(service)
    generation = {url: ("POST", GenerationEndpoint(url, service, metrics)) for url in (*ENDPOINTS, INVOCATIONS)}
    endpoints = {api.url: GenerationEndpoint(api.url, service, metrics, api) for api in APIS}
    loading = (CHAT_API.url, GENERATE_API.url)
    others = {url: ("POST", ollama.with_loading(one) if url in loading else one) for url, one in endpoints.items()}
    handlers: dict[str, tuple[str, Callable[[RequestContext], Awaitable[None]]]] = {
        **generation,
        **others,
        COUNT_URL: ("POST", partial(count_tokens, service)),
        "/v1/models": ("GET", partial(reply_with, info.models)),
        "/v1/models/{model:path}": ("GET", info.model),
        "/tokenize": ("POST", partial(answer, service, known=TOKENIZE, make=info.tokenize)),
        "/detokenize": ("POST", partial(answer, service, known=DETOKENIZE, make=info.detokenize)),
        "/tokenizer_info": ("GET", partial(reply_with, info.tokenizer)),
        "/health": ("GET", info.health),
        "/ping": ("GET POST", info.health),
        "/load": ("GET", partial(reply_with, lambda: {"server_load": service.num_requests})),
        "/version": ("GET", partial(reply_with, lambda: {"version": __version__})),
        "/metrics": ("GET", info.metrics),
        "/openapi.json": ("GET", partial(reply_with, lambda: info.document)),
        **page_routes("/docs", "The API page", page_files("nucleate.server", "api_page").get),
        **ollama.routes(),
        **inspector.routes(),
        **chat_routes(inspector.describe),
    }
    routes = [
        Route(path, Handler(handler), methods=method.split(), name=path.strip("/"))
        for path, (method, handler) in handlers.items()
    ]
    router = Router(routes, redirect_slashes=False, lifespan=lambda _: service.running())
    app: ASGIApp = APIKeyMiddleware(router, router, keys, OPEN_ROUTES) if keys else router
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


def chat_file(name: str) -> tuple[bytes, str] | None:
    """The content and the content type of a file of the chat page, or of the inspector's, which it shares."""
    return page_files("nucleate.server", "chat_page").get(name) or inspector_file(name)


def chat_routes(describe: Callable[[], Mapping[str, Any]]) -> Routes:
    """Return the routes of the chat page: the front page of the server for browsers, its files and its settings.

    describe: returns the model, the stages with their parameters, and the defaults.
    """
    routes = page_routes("/chat", "The chat page", chat_file)
    _, send = routes.pop("/chat")

    async def front(context: RequestContext) -> None:
        accepted = [value for name, value in context.scope["headers"] if name == b"accept"]
        if any(b"text/html" in value for value in accepted):
            await send(context)
        else:
            await context.reply(200, RUNNING, {"vary": "accept"}, "text/plain; charset=utf-8")

    return {"/": ("GET", front), "/chat/api/settings": ("GET", partial(reply_with, describe)), **routes}


class InfoRoutes:
    """Endpoints that generate nothing: models, health, metrics, OpenAPI document; tokenization, as in vLLM."""

    def __init__(self, service: Service, metrics: Metrics, needs_key: bool, root_path: str) -> None:
        self._service, self._metrics = service, metrics
        self.document = document(
            service.name,
            __version__,
            service.limits,
            needs_key=needs_key,
            root_path=root_path,
            ignore_unknown=service.options.ignore_unknown_fields,
        )

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model(name) for name in self._service.names]}

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

    async def metrics(self, context: RequestContext) -> None:
        body, content_type = self._metrics.render()
        await context.reply(200, body, content_type=content_type)

    def tokenizer(self) -> dict[str, Any]:
        tokenizer = self._service.llm.tokenizer
        info = {
            "tokenizer_class": tokenizer.config.get("tokenizer_class") or "PreTrainedTokenizerFast",
            "vocab_size": self._service.vocab_size,
            "max_model_len": self._service.max_model_len,
            "eos_token_ids": sorted(tokenizer.eos_token_ids),
            "bos_token_id": tokenizer.bos_token_id,
            "chat_template": tokenizer.chat_template,
        }
        return {**tokenizer.config, **tokenizer.special_tokens, **info}

    def tokenize(self, body: Any) -> dict[str, Any]:
        service, tokenizer, request = self._service, self._service.llm.tokenizer, read_tokenize(body)
        service.check_model(request.model)
        if request.messages is not None:
            ids = service.llm.encode_chat(request.messages, request.template_options, request.tool_use)
        else:
            ids = tokenizer.encode(request.prompt or "", request.template_options.add_special_tokens)
        strings = [tokenizer.pieces.tokens[token] for token in ids] if request.return_token_strs else None
        return {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": strings}

    def detokenize(self, body: Any) -> dict[str, Any]:
        tokens, model = read_detokenize(body)
        self._service.check_model(model)
        try:
            return {"prompt": self._service.llm.tokenizer.decode(tokens, skip_special_tokens=False)}
        except ValueError as error:
            raise ParameterError("tokens", str(error)) from None


@dataclass(frozen=True)
class TokenizeRequest:
    """A text or a chat to tokenize: one of the two is None."""

    prompt: str | None
    messages: Sequence[Mapping[str, Any]] | None
    template_options: ChatTemplateOptions  #: for a text, only add_special_tokens matters
    return_token_strs: bool = False  #: also return the tokens as strings
    model: str | None = None
    tool_use: ToolUse = NO_TOOLS


@reject_deep_nesting
def read_tokenize(body: Any) -> TokenizeRequest:
    """Parse a body of ``/tokenize``. Raises ParameterError, which names the field."""
    given = present_fields(body, TOKENIZE)
    prompt, messages = given.get("prompt"), given.get("messages")
    if (prompt is None) == (messages is None):
        raise ParameterError("prompt", "prompt or messages must be set, but not both")
    if prompt is not None:
        for name in (*TEMPLATE_FIELDS, "tools"):
            if name in given and name != "add_special_tokens":
                raise ParameterError(name, f"{name} needs messages")
        given = {"add_special_tokens": True, **given}
    return TokenizeRequest(
        prompt,
        None if messages is None else read_messages(messages),
        read_template_options(given),
        given.get("return_token_strs", False),
        given.get("model"),
        ToolUse.read(given["tools"]) if "tools" in given else NO_TOOLS,
    )


@reject_deep_nesting
def read_detokenize(body: Any) -> tuple[list[int], str | None]:
    """Parse a body of ``/detokenize``: the tokens and the model. Raises ParameterError, which names the field."""
    given = present_fields(body, DETOKENIZE)
    tokens = given.get("tokens")
    if not isinstance(tokens, list) or not are_token_ids(tokens) or (tokens and min(tokens) < 0):
        raise invalid_value("tokens", "a list of token ids", tokens)
    return tokens, given.get("model")
