"""AsyncEngine: an engine on a thread of its own, for programs that serve many callers from one event loop.

Knows threads and ``asyncio``; knows no network. The event loop never waits for a forward, and the engine never waits
for a caller: requests whose events are not taken are paused, and their blocks of keys and values go to others in need.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Self

from nucleate.engine.beam.params import BeamRequest
from nucleate.engine.beam.scheduling import AnyRequest, ValidatedBeamRequest
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request, ValidatedRequest
from nucleate.engine.stats import EngineStats
from nucleate.outputs import EngineOutput


class EngineStoppedError(RuntimeError):
    """The engine runs no longer: it was closed, or it failed in a way that is no request's own (see ``__cause__``)."""


class AsyncEngine:
    """Runs an ``Engine``, in one event loop: ``async with AsyncEngine(engine) as running: ...``.

    The engine must not be used by anybody else. room: events that a caller may leave for each answer that it waits for,
    before its requests are paused.
    """

    def __init__(self, engine: Engine, *, room: int = 64) -> None:
        self._engine, self._room = engine, room
        self._orders: deque[Callable[[], object]] = deque()  # what the thread does before its next step
        self._wake = threading.Event()
        self._waiting: set[_Caller] = set()  # all of them; of the loop, the thread knows ids only
        self._callers: dict[str, _Caller] = {}  # by request, of those that have not ended
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
        """Stop after the step at hand. Who waits for a request that has not ended gets an EngineStoppedError."""
        self._closing = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)
        self._stop(None)

    @property
    def stats(self) -> EngineStats:
        """The engine in figures."""
        return self._engine.stats

    @property
    def stopped(self) -> EngineStoppedError | None:
        """Why the engine runs no longer, if so."""
        return self._stopped

    def prepare(self, request: Request | BeamRequest) -> ValidatedRequest | ValidatedBeamRequest:
        """Check a request, on any thread: what is left to do for it on the engine's own is little."""
        return self._engine.prepare(request)

    async def run(self, request: AnyRequest) -> AsyncGenerator[EngineOutput]:
        """The events of a request as they come, in an asynchronous generator.

        Raises ParameterError if the engine refuses the request, EngineStoppedError. Whoever leaves before the last
        event, by cancellation, an error, or ``aclose`` of the generator, ends the request.
        """
        async with aclosing(self.run_all([request])) as batches:
            async for batch in batches:
                for _, event in batch:
                    yield event

    async def run_all(
        self, requests: Sequence[AnyRequest], *, beat: float | None = None
    ) -> AsyncGenerator[list[tuple[int, EngineOutput]]]:
        """As ``run``, of several requests: lists of what has come, each event with the place of its request.

        All requests are admitted, or none. beat: after so many seconds there is a list at the latest, maybe empty.
        """
        self._check()
        caller = _Caller(self._loop, max(1, sum(_answers(one) for one in requests)) * self._room)
        self._waiting.add(caller)
        try:
            self._order(lambda: self._admit(caller, requests))
            if beat is not None:
                caller.beat(beat)
            while caller.places or not caller.admitted:
                batch = await self._next(caller)
                if batch or beat is not None:
                    yield batch
        finally:
            self._waiting.discard(caller)
            caller.close()
            for number in caller.places:
                if self._callers.pop(number, None) is caller:
                    self._order(partial(self._engine.abort, number))

    def abort(self, request_id: str) -> None:
        """End a request soon: its last events come, with finish_reason "abort". Nothing happens if it is over."""
        self._order(lambda: self._send(self._engine.abort(request_id)))

    def abort_all(self) -> None:
        """End all requests soon, as ``abort`` does; also those that the engine has not taken yet."""
        for caller in self._waiting:
            caller.unwanted = not caller.admitted
        for number in self._callers:
            self.abort(number)

    def _admit(self, caller: _Caller, requests: Sequence[AnyRequest]) -> None:
        """On the engine's thread, as all that is done with the engine."""
        numbers: list[str] = []
        try:
            for request in requests:
                numbers.append(self._engine.add(request))
        except Exception as error:  # noqa: BLE001  # the caller's, whatever it is
            self._abort(numbers)
            self._call(caller.refuse, error)
        else:
            self._call(self._admitted, caller, numbers)

    def _admitted(self, caller: _Caller, numbers: list[str]) -> None:
        if caller not in self._waiting:  # any more
            self._order(lambda: self._abort(numbers))
            return
        caller.admitted = True
        caller.places = {number: place for place, number in enumerate(numbers)}
        self._callers |= dict.fromkeys(numbers, caller)
        if caller.unwanted:
            for number in numbers:
                self.abort(number)
        if not numbers:
            caller.wake()

    def _abort(self, numbers: Iterable[str]) -> None:
        """Of nobody who would hear of it."""
        for number in numbers:
            self._engine.abort(number)

    async def _next(self, caller: _Caller) -> list[tuple[int, EngineOutput]]:
        if not caller.events:
            self._check(caller)
            await caller.something()
            if not caller.events:
                self._check(caller)
        batch, caller.events = caller.events, []
        for _, event in batch:
            if event.last:
                del caller.places[event.request_id]
        if caller.paused:
            self._pause(caller, paused=False)
        return batch

    def _pause(self, caller: _Caller, *, paused: bool) -> None:
        caller.paused = paused
        for number in caller.places:
            self._order(partial(self._engine.pause, number, paused=paused))

    def _deliver(self, events: Iterable[EngineOutput]) -> None:
        """On the loop: events to those who wait for them."""
        for event in events:
            caller = self._callers.get(event.request_id)
            if caller is None:  # it has left
                continue
            caller.events.append((caller.places[event.request_id], event))
            if event.last:
                del self._callers[event.request_id]
            if len(caller.events) >= caller.room and not caller.paused:
                self._pause(caller, paused=True)
            caller.wake()

    def _check(self, caller: _Caller | None = None) -> None:
        if caller is not None and caller.error is not None:
            raise caller.error
        if self._stopped is not None:
            raise EngineStoppedError(str(self._stopped)) from self._stopped.__cause__

    def _stop(self, cause: BaseException | None) -> None:
        """On the loop: nothing more will come."""
        if self._stopped is None:
            why = "it was closed" if cause is None else f"{type(cause).__name__}: {cause}"
            self._stopped = EngineStoppedError(f"the engine has stopped: {why}")
            self._stopped.__cause__ = cause
        for caller in self._waiting:
            caller.wake()  # it looks, and finds that the engine has stopped

    def _order(self, order: Callable[[], object]) -> None:
        self._orders.append(order)
        self._wake.set()

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        """Have something done on the loop, after what was asked for before."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def _send(self, events: list[EngineOutput]) -> None:
        if events:
            self._call(self._deliver, events)

    def _work(self) -> None:
        """The thread."""
        try:
            while not self._closing:
                self._wake.clear()
                while self._orders:
                    self._orders.popleft()()
                before = self._engine.num_steps
                events = self._engine.step()
                self._send(events)
                if not events and self._engine.num_steps == before:
                    self._wake.wait()
        except BaseException as error:  # noqa: BLE001  # nobody else would hear of it
            with suppress(RuntimeError):  # the loop is closed
                self._call(self._stop, error)


def _answers(asked: AnyRequest) -> int:
    request = asked.request if isinstance(asked, ValidatedRequest | ValidatedBeamRequest) else asked
    return request.params.n


class _Caller:
    """Who waits for the events of some requests. room: how many it may leave."""

    def __init__(self, loop: asyncio.AbstractEventLoop, room: int) -> None:
        self.room, self._loop = room, loop
        self.places: dict[str, int] = {}  #: by request, of those whose last event it has not taken
        self.events: list[tuple[int, EngineOutput]] = []
        self.admitted = self.paused = False
        self.unwanted = False  #: they are to be ended as soon as they are there
        self.error: Exception | None = None  #: of the engine, which refused its requests
        self._future: asyncio.Future[None] | None = None  # while it waits
        self._timer: asyncio.TimerHandle | None = None

    async def something(self) -> None:
        """Wait until there is something to look at."""
        self._future = self._loop.create_future()
        try:
            await self._future
        finally:
            self._future = None

    def wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def refuse(self, error: Exception) -> None:
        self.error = error
        self.wake()

    def beat(self, seconds: float) -> None:
        """Wake up every so often."""
        self._timer = self._loop.call_later(seconds, self.beat, seconds)
        self.wake()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
