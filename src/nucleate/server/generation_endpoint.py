"""The generation endpoints, with and without streaming: OpenAI's, and those of other APIs (``ChatAPI``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from time import perf_counter
from typing import Any

from nucleate.chat.output_parser import ChunkParser
from nucleate.engine.beam_scheduler import ValidatedBeamRequest
from nucleate.engine.request import ValidatedRequest
from nucleate.outputs import Completion, CompletionChunk, EngineOutput, FinishReason, Usage
from nucleate.parameters.parameter import ParameterError
from nucleate.server.chat_api import ChatAPI, ChatEncoder, EncoderInput
from nucleate.server.http_errors import (
    HTTPError,
    generation_failed,
    shutting_down,
    timed_out,
)
from nucleate.server.metrics import Metrics
from nucleate.server.openai.json_encoding import json_parts, paced, pieces
from nucleate.server.openai.responses import chat_body, completion_body, failure_message, total_usage
from nucleate.server.openai.streams import ChatStream, CompletionStream, ResponseStream
from nucleate.server.request_context import RequestContext
from nucleate.server.service import WORKER_THREADS, GenerationCall, Service

Batch = list[tuple[int, EngineOutput]]
"""New outputs, each with the index of its prompt."""


@dataclass(eq=False)
class OutputRecorder:
    """Parses the engine outputs of a request, records them in metrics and log, and detects failures."""

    batches: AsyncGenerator[Batch]  #: to pass to ``record``; an empty one if there was no output for a while
    context: RequestContext
    metrics: Metrics
    release: Callable[[int], None]  #: frees the queue slots of a prompt
    service: Service
    sequences: Sequence[int]  #: of each prompt
    structured_field: str | None  #: the body field with the structured-output constraint, if there is one
    parser: ChunkParser | None  #: of the chunks of a chat

    def __post_init__(self) -> None:
        self.cached_tokens = [0] * len(self.sequences)  #: prompt tokens from the prefix cache, by prompt
        self._usage, self._log = Usage(0, 0), self.context.log
        self._last_token_times: dict[tuple[int, int], float] = {}  # by prompt and index of the output
        self._unfinished = dict(enumerate(self.sequences))  # by prompt

    def record(self, batch: Batch) -> tuple[Batch, HTTPError | None]:
        """Record outputs. Returns all of them and None; or those before the first failed one, and its error."""
        parser, now, last = self.parser, perf_counter(), self._last_token_times
        if parser is not None:
            batch = [(prompt, output._replace(chunk=parser.parse(output.chunk))) for prompt, output in batch]
        for number, (prompt, output) in enumerate(batch):
            chunk = output.chunk
            key = prompt, chunk.index
            if key in last:
                self.metrics.inter_token_latency.observe(now - last[key])
            elif self._log.time_to_first_token_seconds is None:
                self._log.time_to_first_token_seconds = now - self.context.start_time
                self.metrics.time_to_first_token.observe(now - self.context.start_time)
            last[key] = now
            if chunk.finish_reason is not None:
                self._unfinished[prompt] -= 1
                failure = self._finish(chunk.finish_reason, chunk.stop_reason)
                if failure is not None:
                    return batch[:number], failure
            if output.usage is not None:
                self._usage = total_usage([self._usage, output.usage])
                self.cached_tokens[prompt] = output.usage.cached_tokens
                self._log.completion_tokens += output.usage.completion_tokens
                self.release(prompt)
                del self._unfinished[prompt]
        return batch, None

    @property
    def usage(self) -> Usage:
        """The usage of the prompts that are complete."""
        reasoning = 0 if self.parser is None else self.parser.reasoning_tokens
        return replace(self._usage, reasoning_tokens=reasoning)

    def record_aborted(self) -> None:
        """Record the sequences that did not finish, because the client disconnected or another one failed."""
        for _ in range(sum(self._unfinished.values())):
            self._finish("abort", None)
        self._unfinished.clear()

    def _finish(self, reason: FinishReason, detail: str | int | None) -> HTTPError | None:
        self.metrics.count_finished_sequence(reason)
        self._log.finish_reasons.append(reason)
        if reason == "error":
            return generation_failed(failure_message(detail), self.structured_field)
        return shutting_down() if reason == "abort" and self.service.aborted else None


KEEP_ALIVE_SECONDS = 15.0
"""Interval of keep-alive comments in a stream without new text: otherwise proxies may close the connection."""
PARSED_AT_A_TIME = 2 * WORKER_THREADS
"""Requests of an endpoint that are parsed at a time: in a burst, the others wait before they take worker threads."""

Encoder = ResponseStream | ChatEncoder


@asynccontextmanager
async def running(
    context: RequestContext,
    service: Service,
    metrics: Metrics,
    requests: Sequence[ValidatedRequest | ValidatedBeamRequest],
    structured_field: str | None,
    parser: ChunkParser | None = None,
) -> AsyncIterator[OutputRecorder]:
    """Run requests. Yields their outputs as they are recorded. Raises HTTPError."""
    counts = [_sequences(request) for request in requests]
    with service.queue_slots([running for running, _ in counts]) as release:
        stream = service.engine.generate_all(requests, heartbeat_seconds=KEEP_ALIVE_SECONDS)
        async with aclosing(stream) as batches:
            finishing = [finishing for _, finishing in counts]
            recorder = OutputRecorder(batches, context, metrics, release, service, finishing, structured_field, parser)
            try:
                yield recorder
            finally:
                recorder.record_aborted()


def _sequences(request: ValidatedRequest | ValidatedBeamRequest) -> tuple[int, int]:
    """Return how many sequences a request runs, with its companions, and how many of them finish."""
    if isinstance(request, ValidatedBeamRequest):
        params = request.request.params
        return params.num_beams, params.num_return_sequences or params.num_beams
    n = request.request.params.n
    return n * (1 if request.companion is None else 2), n


class GenerationEndpoint:
    """The handler of one path. api: the API that the path belongs to, if it is not one of OpenAI's two."""

    def __init__(self, url: str, service: Service, metrics: Metrics, api: ChatAPI | None = None) -> None:
        self._url, self._service, self._metrics, self._api = url, service, metrics, api
        self._parsing = asyncio.Semaphore(PARSED_AT_A_TIME)

    async def __call__(self, context: RequestContext) -> None:

        async def generate(data: bytes) -> None:
            with nullcontext() if self._api is None else self._api.own_names():
                await self._generate(context, data)

        await handle_request(self._service, context, generate)

    async def _generate(self, context: RequestContext, data: bytes) -> None:
        service, log = self._service, context.log
        try:
            async with self._parsing:
                call, stream = await service.run_in_thread(partial(self._parse, context, data))
            if call.constraint is not None:
                call = await service.run_in_thread(partial(service.prepare, call), compiling=True)
        except ParameterError as error:
            self._metrics.count_rejected(error.field)
            raise
        field = None
        if call.constraint is not None:
            log.structured_outputs, field = call.constraint
            self._metrics.structured_outputs.labels(log.structured_outputs).inc()
        context.report_ignored_fields(call.ignored_fields)
        log.stream, log.prompt = call.parsed.stream, call.parsed.messages or call.parsed.prompts
        log.prompt_tokens = sum(map(len, call.prompt_token_ids))
        self._metrics.prompt_tokens.inc(log.prompt_tokens)
        parser = call.chunk_parser()
        async with running(context, service, self._metrics, call.prepared, field, parser) as recorder:
            if call.parsed.stream and stream is not None:
                await self._stream(context, stream, recorder)
            else:
                await self._respond(context, call, stream, recorder)

    def _parse(self, context: RequestContext, data: bytes) -> tuple[GenerationCall, Encoder | None]:
        """Parse a body. Runs on a worker thread, because it may take long."""
        if self._api is not None:
            call, new_encoder = self._service.parse_other(self._api, data)
            count = len(call.prompt_token_ids[0])
            tokenizer = self._service.llm.tokenizer
            return call, new_encoder(EncoderInput(call.head, call.parsed, count, tokenizer, context.timing))
        call = self._service.parse(self._url, data)
        if not call.parsed.stream:
            return call, None
        kind = CompletionStream if call.parsed.messages is None else ChatStream
        return call, kind(call.head, call.parsed, call.prompt_token_ids, self._service.llm.tokenizer)

    async def _respond(
        self, context: RequestContext, call: GenerationCall, encoder: Encoder | None, recorder: OutputRecorder
    ) -> None:
        chunks: list[list[CompletionChunk]] = [[] for _ in call.prepared]
        async for batch in recorder.batches:
            outputs, failure = recorder.record(batch)
            if failure is not None:
                raise failure
            for prompt, output in outputs:
                chunks[prompt].append(output.chunk)
        if isinstance(encoder, ChatEncoder):
            make = partial(encoder.whole, chunks[0], recorder.usage)
        else:
            make = partial(self._body, call, chunks, recorder.cached_tokens)
        context.report_load(lambda: self._service.engine.stats)
        await context.reply_in_pieces(self._made_pieces(make, chunks))

    async def _made_pieces(
        self, make: Callable[[], Iterator[str]], chunks: Sequence[list[CompletionChunk]]
    ) -> AsyncIterator[bytes]:
        """Yield the pieces of the response body, made on a worker thread without a time limit: the work is done."""

        def all_pieces() -> Iterator[bytes]:
            yield from pieces(paced(make()))
            for own in chunks:
                while own:  # one by one: to free a million objects at once would hold the GIL for 100 ms
                    own.pop()

        made = all_pieces()
        while (piece := await self._service.run_in_thread(partial(next, made, None), has_timeout=False)) is not None:
            yield piece

    def _body(
        self, call: GenerationCall, chunks: Sequence[Sequence[CompletionChunk]], cached_tokens: Sequence[int]
    ) -> Iterator[str]:
        tokenizer = self._service.llm.tokenizer
        parts = zip(call.prompt_token_ids, chunks, cached_tokens, strict=True)
        completions = [Completion.from_chunks(ids, own, cached_tokens=cached) for ids, own, cached in parts]
        if call.parsed.messages is not None:
            return json_parts(chat_body(call.head, call.parsed, completions[0], tokenizer, iter))
        return json_parts(completion_body(call.head, call.parsed, completions, tokenizer, iter))

    async def _stream(self, context: RequestContext, stream: Encoder, recorder: OutputRecorder) -> None:
        context.report_load(lambda: self._service.engine.stats)
        async for batch in recorder.batches:
            outputs, failure = recorder.record(batch)
            if stream.has_large_frame([output.chunk for _, output in outputs]):
                frames = await self._service.run_in_thread(partial(_frames, stream, outputs), has_timeout=False)
            else:
                frames = _frames(stream, outputs) if outputs or failure else stream.keep_alive()
            if frames:
                if not context.status:
                    await _start(context, stream)
                await context.write(frames)
            if failure is not None:
                raise failure
        if stream.has_large_frame(()):
            end = await self._service.run_in_thread(partial(stream.end, recorder.usage), has_timeout=False)
        else:
            end = stream.end(recorder.usage)
        await _start(context, stream)  # an empty output may have no frame before the last one
        await context.write(end, last=True)


async def _start(context: RequestContext, stream: Encoder) -> None:
    """Send the head of a stream, unless it was sent."""
    if not context.status:
        context.error_frame = stream.error
        await context.start_response(200, content_type=stream.content_type)


def _frames(stream: Encoder, outputs: Batch) -> bytes:
    if len(outputs) == 1:
        prompt, output = outputs[0]
        return stream.frames(prompt, [output.chunk])
    groups = groupby(outputs, itemgetter(0))
    return b"".join([stream.frames(prompt, [output.chunk for _, output in own]) for prompt, own in groups])


async def handle_request(
    service: Service, context: RequestContext, generate: Callable[[bytes], Coroutine[Any, Any, None]]
) -> None:
    """Read the body of a generation request and handle it within its timeout. generate: gets the body."""
    seconds = service.limits.request_timeout_seconds
    with service.request_slot():
        try:
            async with asyncio.timeout(seconds):
                data = await context.body(service.limits.max_request_body_bytes)
                await context.until_disconnect(generate(data))
        except TimeoutError:
            raise timed_out("The request", seconds) from None


async def answer(service: Service, context: RequestContext, known: Collection[str], make: Callable[[Any], Any]) -> None:
    """Answer a request that generates nothing. make: gets the decoded body, on a worker thread. known: its fields."""

    def work(data: bytes) -> Any:
        body, ignored = service.known_fields(service.decode_body(data), known)
        context.report_ignored_fields(ignored)
        return make(body)

    with service.request_slot():
        data = await context.body(service.limits.max_request_body_bytes)
        await context.reply(200, await service.run_in_thread(partial(work, data)))
