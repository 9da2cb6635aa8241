"""What Ollama's clients ask about the server and its model, and ``/api/pull``.

The served model is the only one, and always loaded: a request without a prompt, which asks to load it, is answered
here. Models are downloaded where the operator allows it.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from typing import Any

from nucleate.models.model_store import pull, read_hub_name, weights_size
from nucleate.models.protocol import ModelError
from nucleate.server.generation_endpoint import answer
from nucleate.server.http_errors import HTTPError, http_error, unavailable
from nucleate.server.ollama_api import LoadRequest, OllamaEncoder, now
from nucleate.server.openai import fields
from nucleate.server.openai.json_encoding import dumps
from nucleate.server.request_context import RequestContext, reply_with
from nucleate.server.service import Service


def _pull_line(**content: str) -> bytes:
    return (dumps(content) + "\n").encode()


VERSION = "0.12.0"
"""The version of Ollama whose API this is: clients check it."""
ARCHITECTURE = "nucleate"
SHOW: Mapping[str, fields.Declared] = {
    "model": fields.COMMON["model"],
    "name": fields.Field(fields.TEXT, "The model name, if model is not set."),
    **dict.fromkeys(("verbose", "system", "template", "options"), fields.NO_EFFECT),
}
PULL: Mapping[str, fields.Declared] = {
    "model": fields.Field(fields.TEXT, "The model: OWNER/NAME or OWNER/NAME:FILE on the Hugging Face hub."),
    "name": fields.Field(fields.TEXT, "The model, if model is not set."),
    "stream": fields.Field(fields.BOOLEAN, "Stream the progress as lines of JSON; the default."),
    "insecure": fields.NO_EFFECT,
}
PULL_SECONDS = 1.0
"""Time between two lines of progress."""
NEVER = "9999-12-31T23:59:59Z"
"""When the model is unloaded."""


class OllamaRoutes:
    """The handlers of these endpoints."""

    def __init__(self, service: Service) -> None:
        self._service, self._pulling = service, False
        llm = service.llm
        known = {
            name: getattr(llm.model, name, None) for name in ("architecture", "file_type", "num_parameters", "size")
        }
        is_file = llm.folder is not None and llm.folder.is_file()
        self._size = known["size"] or (weights_size(llm.folder) if llm.folder is not None and not is_file else 0)
        family, count = known["architecture"] or ARCHITECTURE, known["num_parameters"]
        self._details = {
            "parent_model": "",
            "format": "gguf" if is_file else "",
            "family": family,
            "families": [family],
            "parameter_size": f"{count / 1e6:.0f}M"
            if count and count < 1e9
            else f"{count / 1e9:.1f}B"
            if count
            else "",
            "quantization_level": re.sub(r" - (\w)\w*", r"_\1", known["file_type"] or ""),  # Q4_K - Medium: Q4_K_M
        }

    def routes(self) -> dict[str, tuple[str, Callable[[RequestContext], Awaitable[None]]]]:
        return {
            "/api/tags": ("GET", partial(reply_with, lambda: {"models": self._models()})),
            "/api/ps": ("GET", partial(reply_with, self._running)),
            "/api/show": ("POST", partial(answer, self._service, known=SHOW, make=self._show)),
            "/api/pull": ("POST", self._pull),
            "/api/version": ("GET", partial(reply_with, lambda: {"version": VERSION})),
        }

    def with_loading(
        self, generate: Callable[[RequestContext], Awaitable[None]]
    ) -> Callable[[RequestContext], Awaitable[None]]:
        """Return the handler of generation requests, which also answers those that only load the model."""

        async def handle(context: RequestContext) -> None:
            try:
                await generate(context)
            except LoadRequest as load:
                self._service.check_model(load.model)
                head = {"model": self._service.name, "created_at": now()}
                await context.reply(200, {**head, **load.content, "done": True, "done_reason": "load"})

        return handle

    def _models(self) -> list[dict[str, Any]]:
        return [self._model(name) for name in self._service.names]

    def _running(self) -> dict[str, Any]:
        """Return the served model under each of its names."""
        own = {"expires_at": NEVER, "size_vram": 0, "context_length": self._service.max_model_len}
        return {"models": [{**one, **own} for one in self._models()]}

    def _model(self, name: str) -> dict[str, Any]:
        digest = sha256(name.encode(errors="replace")).hexdigest()
        model = {"name": name, "model": name, "modified_at": self._created(), "size": self._size, "digest": digest}
        return {**model, "details": self._details}

    async def _pull(self, context: RequestContext) -> None:
        """Download a model; its progress are lines. A client that leaves does not end the download."""
        service = self._service
        with service.request_slot():
            data = await context.body(service.limits.max_request_body_bytes)
            body, ignored = service.known_fields(service.decode_body(data), PULL)
            context.report_ignored_fields(ignored)
            given = fields.present_fields(body, PULL)
            name = str(given.get("model") or given.get("name", ""))
            download = None if name.removesuffix(":latest") in service.names else self._download(name)
            if not given.get("stream", True):
                if download is not None:
                    await download
                await context.reply(200, {"status": "success"})
                return
            context.error_frame = lambda error: _pull_line(error=error.message)
            await context.start_response(200, content_type=OllamaEncoder.content_type)
            await context.write(_pull_line(status="pulling manifest"))
            while download is not None and not (await asyncio.wait({download}, timeout=PULL_SECONDS))[0]:
                await context.write(_pull_line(status=f"pulling {name}"))
            if download is not None:
                download.result()
                await context.write(_pull_line(status="verifying sha256 digest"))
            await context.write(_pull_line(status="success"), last=True)

    def _download(self, name: str) -> asyncio.Future[None]:
        """Begin a download on a thread that does not outlive the program. Raises HTTPError, ParameterError."""
        if not self._service.options.allow_pull:
            message = "This server does not download models (see --allow-pull)."
            raise HTTPError(403, message, code="pull_not_allowed", param="model")
        read_hub_name(name)
        if self._pulling:
            raise unavailable("Another model is being downloaded.", code="pull_in_progress")
        loop, self._pulling = asyncio.get_running_loop(), True
        future: asyncio.Future[None] = loop.create_future()

        def end(error: HTTPError | None) -> None:
            self._pulling = False
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
                future.exception()  # the client may have left: no warning that nobody read it

        def work() -> None:
            error: HTTPError | None = None
            try:
                pull(name, progress=False)
            except ModelError as failure:
                error = HTTPError(502, str(failure), code="pull_failed", param="model", kind="model")
            except Exception as failure:  # noqa: BLE001  # it must not be lost with its thread
                error = http_error(failure) or HTTPError(500, f"The download failed: {failure}", kind="internal")
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(end, error)

        threading.Thread(target=work, name="nucleate-pull", daemon=True).start()
        return future

    def _show(self, body: Any) -> dict[str, Any]:
        service, given = self._service, fields.present_fields(body, SHOW)
        name = given.get("model") or given.get("name", "")
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
            "details": self._details,
            "model_info": {
                "general.architecture": ARCHITECTURE,
                f"{ARCHITECTURE}.context_length": service.max_model_len,
                f"{ARCHITECTURE}.vocab_size": service.vocab_size,
            },
            "capabilities": capabilities,
        }

    def _created(self) -> str:
        return datetime.fromtimestamp(self._service.created, UTC).isoformat().replace("+00:00", "Z")
