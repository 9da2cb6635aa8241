"""Shares one engine among the callers of a process, and collects the outputs of their requests into completions.

It has no thread: a caller that waits runs the next step for all. A caller that leaves early aborts its own requests.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nucleate.chat.output_parser import ChunkParser
from nucleate.engine.beam_scheduler import AnyRequest
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request, ValidatedRequest
from nucleate.outputs import Completion, CompletionChunk, EngineOutput


class SharedEngine:
    """Thread-safe. make: creates the engine when it is first needed.

    If a step is interrupted (KeyboardInterrupt), the engine is discarded, and the next caller gets a new one.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make
        self._engine: Engine | None = None
        self._lock = threading.Lock()
        self._queues: dict[str, deque[EngineOutput]] = {}  # by request id, the queue of its caller

    def prepare(self, request: Request) -> ValidatedRequest:
        """Validate a request, which may be run then. Raises ParameterError."""
        with self._lock:
            engine = self._running()
        return engine.prepare(request)

    def run(self, requests: Iterable[AnyRequest]) -> Iterator[tuple[int, EngineOutput]]:
        """Run requests, and yield their outputs as they come, each with the index of its request.

        All are admitted before the first one runs. The requests must have no ids. Raises ParameterError.
        """
        queue: deque[EngineOutput] = deque()
        places: dict[str, int] = {}
        with self._lock:
            engine = self._running()
        try:
            for place, request in enumerate(requests):
                with self._lock:
                    self._check_current(engine)
                    number = engine.add(request)
                    places[number], self._queues[number] = place, queue
            while places:
                if not queue:
                    self._wait(engine, queue)
                while queue:
                    output = queue.popleft()
                    place = places.pop(output.request_id) if output.finished else places[output.request_id]
                    yield place, output
        finally:
            with self._lock:
                for number in places if engine is self._engine else ():
                    engine.abort(number)
                    self._queues.pop(number, None)

    def _running(self) -> Engine:
        if self._engine is None:
            self._engine, self._queues = self._make(), {}
        return self._engine

    def _check_current(self, engine: Engine) -> None:
        """Raise RuntimeError if the engine was discarded: the next one reuses its request ids."""
        if engine is not self._engine:
            raise RuntimeError("the engine has stopped, as another caller's step was interrupted")

    def _wait(self, engine: Engine, queue: deque[EngineOutput]) -> None:
        """Run a step, unless another caller has just run one with outputs for this one."""
        with self._lock:
            if queue:
                return
            self._check_current(engine)
            try:
                outputs = engine.step()
            except BaseException:
                self._engine = None
                raise
            for output in outputs:
                own = self._queues.pop(output.request_id) if output.finished else self._queues[output.request_id]
                own.append(output)


def with_progress(
    outputs: Iterator[tuple[int, EngineOutput]], total: int, use_tqdm: bool
) -> Iterator[tuple[int, EngineOutput]]:
    """Yield the outputs; with ``use_tqdm``, show the number of finished requests, and tokens per second."""
    tokens, start = 0, time.perf_counter()
    with progress_bar(total=total, unit="prompt", shown=use_tqdm) as bar:
        for index, output in outputs:
            tokens += len(output.chunk.token_ids)
            if output.finished:
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
                bar.update()
            yield index, output


def progress_bar(items: Iterable[Any] | None = None, *, total: int | None = None, unit: str, shown: bool = True) -> Any:
    """Return a tqdm progress bar on stderr, over items or advanced by ``update``. total: number of items, if known."""
    from tqdm import tqdm

    return tqdm(items, total=total, unit=unit, disable=not shown, file=sys.stderr, dynamic_ncols=True)


def completions(
    requests: Sequence[Request],
    outputs: Iterable[tuple[int, EngineOutput]],
    prompts: Sequence[str | None],
    parsers: Sequence[ChunkParser | None] = (),
) -> list[Completion]:
    """Return the completion of each request. prompts: their texts. parsers: of the chunks of chats."""
    chunks: list[list[CompletionChunk]] = [[] for _ in requests]
    cached = [0] * len(requests)
    for index, output in outputs:
        parser = parsers[index] if parsers else None
        chunks[index].append(output.chunk if parser is None else parser.parse(output.chunk))
        if output.usage is not None:
            cached[index] = output.usage.cached_tokens
    parts = zip(requests, chunks, prompts, cached, strict=True)
    return [Completion.from_chunks(one.prompt_ids, own, text, count) for one, own, text, count in parts]


def in_order(chunks: Iterable[CompletionChunk]) -> Iterator[CompletionChunk]:
    """Yield the chunks of one output after the other. Those of later outputs are buffered."""
    buffered: dict[int, list[CompletionChunk]] = {}
    index = 0
    for chunk in chunks:
        buffered.setdefault(chunk.index, []).append(chunk)
        while own := buffered.pop(index, None):
            yield from own
            index += own[-1].finish_reason is not None
