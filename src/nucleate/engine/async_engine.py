"""AsyncEngine: runs an engine on a background thread, for asyncio programs.

The event loop never waits for a forward pass, and the engine never waits for a caller: requests whose outputs are not
consumed are paused (back-pressure), and may lose their KV cache blocks to others.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Self, overload

from nucleate.engine.beam_params import BeamRequest
from nucleate.engine.beam_scheduler import AnyRequest, ValidatedBeamRequest
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request, ValidatedRequest
from nucleate.outputs import EngineOutput, EngineStats
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stage import Pipeline
from nucleate.sampling_params import SamplingParams
from nucleate.tokenization.prompts import encode_prompt


class EngineStoppedError(RuntimeError):
    """The engine has stopped: it was closed, or it failed as a whole (see ``__cause__``)."""


@with_suggestions
class AsyncEngine:
    """Runs an ``Engine`` for one event loop: ``async with AsyncEngine(engine) as running: ...``.

    Nothing else may use the engine. max_pending: outputs per sequence that a caller may leave unconsumed before its
    requests are paused (default 64).
    """

    def __init__(self, engine: Engine, *, max_pending: int = 64) -> None:
        self._engine, self._max_pending = engine, max_pending
        self._commands: deque[Callable[[], object]] = deque()  # run by the thread before its next step
        self._wake = threading.Event()
        self._waiting: set[_Caller] = set()  # all of them; used on the event loop only
        self._callers: dict[str, _Caller] = {}  # by id of an unfinished request
        self._closing = False
        self._stopped: EngineStoppedError | None = None
        self._thread = threading.Thread(target=self._work, name="nucleate-engine", daemon=True)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop after the current step. Callers that wait for unfinished requests get an EngineStoppedError."""
        self._closing = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)
        self._stop(None)

    @property
    def stats(self) -> EngineStats:
        """State and counters, see ``EngineStats``."""
        return self._engine.stats

    @property
    def stopped(self) -> EngineStoppedError | None:
        """Why the engine has stopped; None while it runs."""
        return self._stopped

    @overload
    def prepare(self, request: Request) -> ValidatedRequest: ...

    @overload
    def prepare(self, request: AnyRequest) -> ValidatedRequest | ValidatedBeamRequest: ...

    def prepare(self, request: AnyRequest) -> ValidatedRequest | ValidatedBeamRequest:
        """Validate a request, on any thread. This leaves little to do for the engine's thread."""
        return self._engine.prepare(request)

    async def generate(
        self,
        prompt: str | Sequence[int] | AnyRequest,
        sampling_params: SamplingParams | Pipeline | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[EngineOutput]:
        """Complete a prompt and yield outputs as they come; the text of a ``chunk`` is what is new.

        prompt: text, token ids, or a whole request (``Request``, ``BeamRequest``, or what ``prepare`` returns) without
        the other arguments. sampling_params: of this prompt; recommended values of the model do not apply, unless they
        come from ``LLM.default_params``. request_id: for ``abort``; None: the engine assigns one. priority: lower runs
        first.

        Raises ParameterError for an invalid request, and EngineStoppedError. Leaving before the last output, by
        cancellation, an error or ``aclose``, aborts the request.
        """
        if isinstance(prompt, Request | BeamRequest | ValidatedRequest | ValidatedBeamRequest):
            request: AnyRequest = prompt
            if sampling_params is not None or request_id is not None or priority:
                message = "a Request has its own sampling parameters, id and priority: pass it without other arguments"
                raise ParameterError("prompt", message)
        else:
            params: Any = SamplingParams() if sampling_params is None else sampling_params
            request = Request(encode_prompt(self._engine.tokenizer, prompt), params, request_id, priority)
        async with aclosing(self.generate_all([request])) as batches:
            async for batch in batches:
                for _, output in batch:
                    yield output

    async def generate_all(
        self, requests: Sequence[AnyRequest], *, heartbeat_seconds: float | None = None
    ) -> AsyncGenerator[list[tuple[int, EngineOutput]]]:
        """Like ``generate``, for several requests: yields lists of outputs, each with the index of its request.

        Either all requests are admitted or none. heartbeat_seconds: the longest time between two lists, which may then
        be empty; None: no limit.
        """
        self._check()
        given: list[Any] = [getattr(one, "request", one) for one in requests]  # of those that were validated
        caller = _Caller(self._loop, max(1, sum(one.params.n for one in given)) * self._max_pending)
        self._waiting.add(caller)
        try:
            self._run_on_thread(lambda: self._admit(caller, requests))
            if heartbeat_seconds is not None:
                caller.heartbeat(heartbeat_seconds)
            while caller.places or not caller.admitted:
                batch = await self._next(caller)
                if batch or heartbeat_seconds is not None:
                    yield batch
        finally:
            self._waiting.discard(caller)
            caller.close()
            for number in caller.places:
                if self._callers.pop(number, None) is caller:
                    self._run_on_thread(partial(self._engine.abort, number))

    def abort(self, request_id: str) -> None:
        """Abort a request soon: its last outputs have finish_reason "abort". Nothing happens if it has finished."""
        self._run_on_thread(lambda: self._send(self._engine.abort(request_id)))

    def abort_all(self) -> None:
        """Abort all requests soon, also those that are not admitted yet."""
        for caller in self._waiting:
            caller.unwanted = not caller.admitted
        for number in self._callers:
            self.abort(number)

    def _admit(self, caller: _Caller, requests: Sequence[AnyRequest]) -> None:
        """Add requests, on the engine's thread (like everything that touches the engine)."""
        numbers: list[str] = []
        try:
            for request in requests:
                numbers.append(self._engine.add(request))
        except Exception as error:  # noqa: BLE001  # raised again in the caller
            for number in numbers:
                self._engine.abort(number)
            self._call(caller.reject, error)
        else:
            self._call(self._admitted, caller, numbers)

    def _admitted(self, caller: _Caller, numbers: list[str]) -> None:
        if caller not in self._waiting:  # any more
            for number in numbers:
                self._run_on_thread(partial(self._engine.abort, number))
            return
        caller.admitted = True
        caller.places = {number: place for place, number in enumerate(numbers)}
        self._callers |= dict.fromkeys(numbers, caller)
        if caller.unwanted:
            for number in numbers:
                self.abort(number)
        if not numbers:
            caller.wake()

    async def _next(self, caller: _Caller) -> list[tuple[int, EngineOutput]]:
        if not caller.outputs:
            self._check(caller)
            await caller.wait()
            if not caller.outputs:
                self._check(caller)
        batch, caller.outputs = caller.outputs, []
        for _, output in batch:
            if output.usage is not None:
                del caller.places[output.request_id]
        if caller.paused:
            self._pause(caller, paused=False)
        return batch

    def _pause(self, caller: _Caller, *, paused: bool) -> None:
        caller.paused = paused
        for number in caller.places:
            self._run_on_thread(partial(self._engine.pause, number, paused=paused))

    def _deliver(self, outputs: Iterable[EngineOutput]) -> None:
        """Pass outputs to their callers, on the event loop."""
        for output in outputs:
            caller = self._callers.get(output.request_id)
            if caller is None:  # the caller has left
                continue
            caller.outputs.append((caller.places[output.request_id], output))
            if output.usage is not None:
                del self._callers[output.request_id]
            if len(caller.outputs) >= caller.max_pending and not caller.paused:
                self._pause(caller, paused=True)
            caller.wake()

    def _check(self, caller: _Caller | None = None) -> None:
        if caller is not None and caller.error is not None:
            raise caller.error
        if self._stopped is not None:
            raise EngineStoppedError(str(self._stopped)) from self._stopped.__cause__

    def _stop(self, cause: BaseException | None) -> None:
        """Record why the engine stopped and wake all callers, on the event loop."""
        if self._stopped is None:
            why = "it was closed" if cause is None else f"{type(cause).__name__}: {cause}"
            self._stopped = EngineStoppedError(f"the engine has stopped: {why}")
            self._stopped.__cause__ = cause
        for caller in self._waiting:
            caller.wake()

    def _run_on_thread(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self._wake.set()

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the event loop, in the order of these calls."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def _send(self, outputs: list[EngineOutput]) -> None:
        if outputs:
            self._call(self._deliver, outputs)

    def _work(self) -> None:
        """The main loop of the thread."""
        try:
            while not self._closing:
                self._wake.clear()
                while self._commands:
                    self._commands.popleft()()
                before = self._engine.num_steps
                outputs = self._engine.step()
                self._send(outputs)
                if not outputs and self._engine.num_steps == before:
                    self._wake.wait()
        except BaseException as error:  # noqa: BLE001  # passed to all callers
            with suppress(RuntimeError):  # the loop is closed
                self._call(self._stop, error)


class _Caller:
    """A caller that waits for outputs. max_pending: how many it may leave unconsumed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_pending: int) -> None:
        self.max_pending, self._loop = max_pending, loop
        self.places: dict[str, int] = {}  #: index by request id, of requests whose last output was not consumed
        self.outputs: list[tuple[int, EngineOutput]] = []
        self.admitted = self.paused = False
        self.unwanted = False  #: its requests are to be aborted as soon as they are admitted
        self.error: Exception | None = None  #: why its requests were rejected
        self._future: asyncio.Future[None] | None = None  # while it waits
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self) -> None:
        """Wait for outputs, an error or the end of the engine."""
        self._future = self._loop.create_future()
        try:
            await self._future
        finally:
            self._future = None

    def wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def reject(self, error: Exception) -> None:
        self.error = error
        self.wake()

    def heartbeat(self, seconds: float) -> None:
        """Wake up every ``seconds``."""
        self._timer = self._loop.call_later(seconds, self.heartbeat, seconds)
        self.wake()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
