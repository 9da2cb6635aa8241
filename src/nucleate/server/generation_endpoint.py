"""The two paths that answer, ``/v1/completions`` and ``/v1/chat/completions``: at once, or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from itertools import groupby
from operator import itemgetter
from time import perf_counter

from nucleate.outputs import Completion, CompletionChunk, EngineOutput, FinishReason, Usage
from nucleate.parameters.parameter import ParameterError
from nucleate.server.http_errors import HTTPError, answer_failed, closing, late, refusal_of, unexpected
from nucleate.server.metrics import Metrics
from nucleate.server.openai.responses import chat_body, completion_body, failure_message
from nucleate.server.openai.stream_chunks import KEEP_ALIVE, ChatStream, CompletionStream, ResponseStream, error_frame
from nucleate.server.request_context import RequestContext, written
from nucleate.server.service import EngineCall, Service

KEEP_ALIVE_SECONDS = 15.0
"""Seconds of silence after which a stream gets a comment, so that proxies do not hang up."""
LAST_WORDS = 1.0
"""Seconds for the frame that ends a stream in an error, to a client that may not read."""

Batch = list[tuple[int, EngineOutput]]
Batches = AsyncGenerator[Batch]


class GenerationEndpoint:
    """Answers to the bodies of one path."""

    def __init__(self, url: str, service: Service, metrics: Metrics) -> None:
        self._url, self._service, self._metrics = url, service, metrics

    async def __call__(self, exchange: RequestContext) -> None:
        """Answer, within the time for that. Raises what ``refusal_of`` knows, as long as nothing was sent."""
        limits = self._service.limits
        with self._service.place():
            try:
                async with asyncio.timeout(limits.request_seconds):
                    data = await exchange.body(limits.max_body)
                    await exchange.unless_left(self._answer(exchange, data))
            except TimeoutError:
                await _end(exchange, late("the answer did not end", limits.request_seconds))
            except Exception as error:  # noqa: BLE001  # a stream has an end, whatever happens
                await _end(exchange, refusal_of(error) or error)

    async def _answer(self, exchange: RequestContext, data: bytes) -> None:
        service, told = self._service, exchange.told
        try:
            call, chunks = await service.aside(partial(self._read, data))
            if call.form is not None:
                call = await service.aside(partial(service.prepare, call), form=True)
        except ParameterError as error:
            self._metrics.refused_form(error.field)
            raise
        if call.form is not None:
            told.structured = call.form
            self._metrics.form(call.form)
        told.stream, told.prompt = call.asked.stream, call.asked.messages or call.asked.prompts
        told.prompt_tokens = sum(map(len, call.prompts))
        self._metrics.prompt(told.prompt_tokens)
        with service.queue([call.asked.best_of] * len(call.prepared)) as leave:
            async with aclosing(service.engine.run_all(call.prepared, heartbeat_seconds=KEEP_ALIVE_SECONDS)) as batches:
                note = _StreamMetrics(exchange, self._metrics, leave, service, call)
                if chunks is None:
                    await self._whole(exchange, call, batches, note)
                else:
                    await _stream(exchange, chunks, batches, note)

    def _read(self, data: bytes) -> tuple[EngineCall, ResponseStream | None]:
        """On another thread: it may be long."""
        call = self._service.call(self._url, data)
        if not call.asked.stream:
            return call, None
        kind = CompletionStream if call.asked.messages is None else ChatStream
        return call, kind(call.head, call.asked, call.prompts, self._service.llm.tokenizer)

    async def _whole(self, exchange: RequestContext, call: EngineCall, batches: Batches, note: _StreamMetrics) -> None:
        pieces: list[list[CompletionChunk]] = [[] for _ in call.prepared]
        async for batch in batches:
            _, failed = note(batch)
            if failed is not None:
                raise failed
            for place, event in batch:
                pieces[place].append(event.piece)
        await exchange.reply(200, await self._service.aside(partial(self._body, call, pieces)))

    def _body(self, call: EngineCall, pieces: Sequence[Sequence[CompletionChunk]]) -> bytes:
        """On another thread, too."""
        tokenizer = self._service.llm.tokenizer
        completions = [Completion.of(ids, own) for ids, own in zip(call.prompts, pieces, strict=True)]
        if call.asked.messages is not None:
            return written(chat_body(call.head, call.asked, completions[0], tokenizer))
        return written(completion_body(call.head, call.asked, completions, tokenizer))


async def _stream(exchange: RequestContext, chunks: ResponseStream, batches: Batches, note: _StreamMetrics) -> None:
    async for batch in batches:
        told, failed = note(batch)
        if len(told) == 1:
            place, event = told[0]
            frames = chunks.pieces(place, [event.piece])
        elif told:
            places = groupby(told, itemgetter(0))
            frames = b"".join([chunks.pieces(place, [event.piece for _, event in own]) for place, own in places])
        else:
            frames = b"" if batch else KEEP_ALIVE
        if frames:
            if not exchange.status:
                await exchange.begin(200)
            await exchange.write(frames)
        if failed is not None:
            raise failed
    await exchange.write(chunks.end(note.usage), last=True)


class _StreamMetrics:
    """What comes, on its way into the figures. leave: told which prompts are answered."""

    def __init__(
        self,
        exchange: RequestContext,
        metrics: Metrics,
        leave: Callable[[int], None],
        service: Service,
        call: EngineCall,
    ) -> None:
        self.usage = Usage(0, 0)
        self._told, self._start, self._metrics = exchange.told, exchange.start, metrics
        self._leave, self._service, self._call = leave, service, call
        self._last: dict[tuple[int, int], float] = {}  # by answer, when its last token came

    def __call__(self, batch: Batch) -> tuple[Batch, HTTPError | None]:
        """All of it, and None; or what came before an answer failed, and how that is told."""
        now, last = perf_counter(), self._last
        for number, (place, event) in enumerate(batch):
            piece = event.piece
            key = place, piece.index
            if key in last:
                self._metrics.token(now - last[key])
            elif self._told.first_token_seconds is None:
                self._told.first_token_seconds = now - self._start
                self._metrics.first_token(now - self._start)
            last[key] = now
            if piece.finish_reason is not None:
                failed = self._finish(piece.finish_reason, piece.stop_reason)
                if failed is not None:
                    return batch[:number], failed
            if event.usage is not None:
                read, made = event.usage.prompt_tokens, event.usage.completion_tokens
                self.usage = Usage(self.usage.prompt_tokens + read, self.usage.completion_tokens + made)
                self._told.completion_tokens += made
                self._leave(place)
        return batch, None

    def _finish(self, reason: FinishReason, detail: str | int | None) -> HTTPError | None:
        self._metrics.finish(reason)
        self._told.finish_reasons.append(reason)
        if reason == "error":
            form_field = None if self._call.form is None else self._call.asked.form_field
            return answer_failed(failure_message(detail), form_field)
        return closing() if reason == "abort" and self._service.cut else None


async def _end(exchange: RequestContext, error: Exception) -> None:
    """Raise the error, or end the stream with it if one has begun and its client reads it."""
    if not exchange.status:
        raise error
    refusal = error if isinstance(error, HTTPError) else unexpected(exchange.id)
    exchange.broken = refusal
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORDS):
            await exchange.write(error_frame(refusal.body), last=True)
    if refusal is not error:
        raise error
