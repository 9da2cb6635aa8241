"""The inspector: its page, its files and the endpoints below ``/inspector/api``."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from hashlib import sha256
from typing import Any, Final

from nucleate.inspector.page import inspector_file
from nucleate.inspector.protocol import describe_others
from nucleate.inspector.session import Inspector, OutputEvents
from nucleate.inspector.store import InspectionStore, InspectorError
from nucleate.models.loader import EMBEDDED
from nucleate.outputs import CompletionChunk, Usage
from nucleate.server.generation_endpoint import OutputRecorder, handle_request, running
from nucleate.server.http_errors import HTTPError, unavailable
from nucleate.server.metrics import Metrics
from nucleate.server.openai.streams import KEEP_ALIVE, error_frame
from nucleate.server.request_context import RequestContext
from nucleate.server.service import Service
from nucleate.tokenization.tokenizer import token_text

POLICY: Final = "default-src 'self'; img-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
MAX_QUESTIONS: Final = 32
"""Traces and draws in progress or waiting; more get status 503."""
FRAME_SECONDS: Final = 0.02
"""Pause after each frame of a stream. The tokens of this time come together, which costs other requests less."""
STATUS: Final = {"run_not_found": 404, "step_not_stored": 410}


Routes = dict[str, tuple[str, Callable[[RequestContext], Any]]]
"""Handlers with their method, by path."""


def page_routes(path: str, title: str, find: Callable[[str], tuple[bytes, str] | None]) -> Routes:
    """Return the routes of a page and its files. find: returns the content and the type of a file; None: no such file.

    Clients that accept gzip get about a third of the bytes.
    """
    compressed = cache(partial(gzip.compress, mtime=0))

    async def send(context: RequestContext) -> None:
        name = context.scope["path_params"].get("file", "index.html")
        found = find(name)
        if found is None:
            raise HTTPError(404, f"{title} has no file {name[:60]!r}.")
        content, content_type = found
        headers = {**HEADERS, "vary": "accept-encoding"}
        if _accepts_gzip(context):
            content, headers["content-encoding"] = compressed(content), "gzip"
        await context.reply(200, content, headers, content_type)

    return {path: ("GET", send), f"{path}/{{file}}": ("GET", send)}


class InspectorRoutes:
    """The handlers of the inspector. Its work runs on threads of its own, so that no other request waits for it.

    Unavailable (status 403) if the server watermarks its outputs: traces would show which tokens a key prefers.
    """

    def __init__(self, service: Service, metrics: Metrics, *, needs_key: bool) -> None:
        self._service, self._metrics, self._needs_key = service, metrics, needs_key
        store = InspectionStore(service.limits.max_inspector_bytes)
        defaults, length = service.defaults, service.max_model_len
        self._inspector = Inspector(
            service.llm, service.engine.prepare, store, defaults, name=service.name, length=length
        )
        self._threads = ThreadPoolExecutor(2, "nucleate-inspector")
        self._questions = 0

    def routes(self) -> Routes:
        if not self._service.limits.max_inspector_bytes:
            return {}
        return {
            "/inspector/api/settings": ("GET", self.settings),
            "/inspector/api/generate": ("POST", self.generate),
            "/inspector/api/trace": ("POST", partial(self._answer, self._inspector.trace)),
            "/inspector/api/draws": ("POST", partial(self._answer, self._inspector.draws)),
            **page_routes("/inspector", "The inspector", inspector_file),
        }

    def describe(self) -> dict[str, Any]:
        """What the chat page needs: the settings, whether steps can be inspected, and what the model can do."""
        service = self._service
        found, most = self._inspector.settings(needs_key=self._needs_key), service.limits.max_logprobs
        formats = service.llm.chat_format
        has_tools = found["model"]["chat"] and formats.tool_format is not None
        found["model"] |= {
            "tools": has_tools,
            "reasoning": formats.reasoning is not None,
            "bundled": service.llm.folder == EMBEDDED,
            "ends": [token_text(service.llm.tokenizer, token) for token in sorted(service.llm.tokenizer.eos_token_ids)],
        }
        found["limits"]["max_logprobs"] = service.vocab_size if most == -1 else most
        found["parameters"] = describe_others(service.vocab_size, companion=service.llm.companion_model is not None)
        off = not service.limits.max_inspector_bytes or service.llm.watermark is not None
        return {**found, "inspector": not off}

    async def settings(self, context: RequestContext) -> None:
        self._check_watermark()
        found = self._inspector.settings(needs_key=self._needs_key)
        await context.reply(200, found)

    async def generate(self, context: RequestContext) -> None:
        self._check_watermark()
        await handle_request(self._service, context, partial(self._generate, context))

    async def _generate(self, context: RequestContext, data: bytes) -> None:
        service, log = self._service, context.log
        try:
            body = await service.run_in_thread(partial(service.decode_body, data))
            limits = service.limits
            limits.check_body(body.get("params") if isinstance(body, dict) else None, service.vocab_size)
            start = partial(self._inspector.start, body, _owner(context))
            run, validated, event = await self._run(start)
        except InspectorError as error:
            raise _http_error(error) from None
        log.stream, log.prompt, log.prompt_tokens = True, run.prompt or run.messages, len(run.prompt_ids)
        self._metrics.prompt_tokens.inc(log.prompt_tokens)
        spec = run.params.structured_outputs
        field = None if spec is None else "params"
        async with running(context, service, self._metrics, [validated], field) as recorder:
            context.error_frame = lambda error: error_frame(error.body)
            await context.start_response(200, HEADERS)
            await context.write(_frame(event))
            await self._stream(context, OutputEvents(self._inspector, run), recorder)

    async def _stream(self, context: RequestContext, events: OutputEvents, recorder: OutputRecorder) -> None:
        async for batch in recorder.batches:
            outputs, failure = recorder.record(batch)
            chunks, usage = [output.chunk for _, output in outputs], outputs[-1][1].usage if outputs else None
            frames = KEEP_ALIVE
            if outputs or failure:
                frames = await self._run(partial(_frames, events, chunks, usage))
            await context.write(frames)
            if failure is not None:
                raise failure
            await asyncio.sleep(FRAME_SECONDS)
        await context.write(b"", last=True)

    async def _answer(self, question: Callable[[Any, str], dict[str, Any]], context: RequestContext) -> None:
        """Answer a question about a recorded step."""
        self._check_watermark()
        if self._questions >= MAX_QUESTIONS:
            raise unavailable("The inspector is busy. Retry after 1 s.", "inspector_busy")
        self._questions += 1
        try:
            data = await context.body(self._service.limits.max_request_body_bytes)
            answer = await self._run(partial(self._answered, question, data, _owner(context)))
        except InspectorError as error:
            raise _http_error(error) from None
        finally:
            self._questions -= 1
        await context.reply(200, answer, {"cache-control": "no-store"})

    def _answered(self, question: Callable[[Any, str], dict[str, Any]], data: bytes, owner: str) -> bytes:
        service = self._service
        body = service.decode_body(data)
        service.limits.check_body(body.get("params") if isinstance(body, dict) else None, service.vocab_size)
        return _json(question(body, owner))

    async def _run(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _check_watermark(self) -> None:
        if self._service.llm.watermark is not None:
            message = "The inspector is off, because this server watermarks its outputs."
            raise HTTPError(403, message, code="inspector_off")


def _accepts_gzip(context: RequestContext) -> bool:
    given = b",".join(value for name, value in context.scope["headers"] if name == b"accept-encoding")
    codings = [coding.replace(b" ", b"").lower() for coding in given.split(b",")]
    return any(coding.partition(b";")[0] == b"gzip" and not coding.endswith((b";q=0", b";q=0.0")) for coding in codings)


def _owner(context: RequestContext) -> str:
    """A digest of the client's API key: only it can read its runs. Without keys, a run's id is its secret."""
    given = next((value for name, value in context.scope["headers"] if name == b"authorization"), b"")
    return sha256(given.partition(b" ")[2].strip(b" ")).hexdigest()


def _http_error(error: InspectorError) -> HTTPError:
    return HTTPError(STATUS[error.code], str(error), code=error.code)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace")


def _frames(events: OutputEvents, chunks: list[CompletionChunk], usage: Usage | None) -> bytes:
    return b"".join(map(_frame, events.of(chunks, usage)))


def _frame(event: dict[str, Any]) -> bytes:
    return b"data: " + _json(event) + b"\n\n"
