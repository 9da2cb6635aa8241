"""What Ollama's clients ask about the server and its model: ``/api/tags``, ``/api/show`` and ``/api/version``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from typing import Any

from nucleate.server.chat_api import present_fields, read_text
from nucleate.server.openai.fields import read_model
from nucleate.server.request_context import RequestContext
from nucleate.server.service import Service

VERSION = "0.12.0"
"""The version of Ollama whose API this is: clients check it."""
ARCHITECTURE = "nucleate"
SHOW = frozenset({"model", "name", "verbose", "system", "template", "options"})
_DETAILS = {"parent_model": "", "format": "", "family": ARCHITECTURE, "families": [ARCHITECTURE]}


class OllamaRoutes:
    """The handlers of these endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> dict[str, tuple[str, Callable[[RequestContext], Awaitable[None]]]]:
        """The handlers with their method, by path."""
        return {
            "/api/tags": ("GET", self.tags),
            "/api/show": ("POST", self.show),
            "/api/version": ("GET", self.version),
        }

    async def tags(self, context: RequestContext) -> None:
        await context.reply(200, {"models": [self._model(name) for name in self._service.names]})

    def _model(self, name: str) -> dict[str, Any]:
        digest = sha256(name.encode(errors="replace")).hexdigest()
        model = {"name": name, "model": name, "modified_at": self._created(), "size": 0, "digest": digest}
        return {**model, "details": self._details()}

    async def show(self, context: RequestContext) -> None:
        with self._service.request_slot():
            data = await context.body(self._service.limits.max_request_body_bytes)
            await context.reply(200, await self._service.run_in_thread(partial(self._show, context, data)))

    async def version(self, context: RequestContext) -> None:
        await context.reply(200, {"version": VERSION})

    def _show(self, context: RequestContext, data: bytes) -> dict[str, Any]:
        service = self._service
        body, ignored = service.decode_fields(data, SHOW)
        context.report_ignored_fields(ignored)
        given = present_fields(body, SHOW)
        other = read_text(given, "name", default="")
        name = read_model(given) or other
        service.check_model(name.removesuffix(":latest") or None)
        chat, template = service.llm.chat_format, service.llm.tokenizer.chat_template
        capabilities = ["completion"]
        capabilities += ["tools"] if template and chat.tool_format is not None else []
        capabilities += ["thinking"] if chat.reasoning is not None else []
        return {
            "modelfile": "",
            "parameters": "",
            "template": template or "",
            "modified_at": self._created(),
            "details": self._details(),
            "model_info": {
                "general.architecture": ARCHITECTURE,
                f"{ARCHITECTURE}.context_length": service.max_model_len,
                f"{ARCHITECTURE}.vocab_size": service.vocab_size,
            },
            "capabilities": capabilities,
        }

    def _created(self) -> str:
        return datetime.fromtimestamp(self._service.created, UTC).isoformat().replace("+00:00", "Z")

    def _details(self) -> dict[str, Any]:
        return {**_DETAILS, "parameter_size": "", "quantization_level": ""}
