"""AsyncEngine: an engine on a thread of its own, for programs that serve many callers from one event loop.

Knows threads and ``asyncio``; knows no network. The event loop never waits for a forward, and the engine never waits
for a caller: a request whose events are not taken is paused, and its blocks of keys and values go to others in need.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Self

from nucleate.core.event import Event
from nucleate.engine.engine import Engine, Stats
from nucleate.engine.request import Request


class EngineStoppedError(RuntimeError):
    """The engine runs no longer: it was closed, or it failed in a way that is no request's own (see ``__cause__``)."""


class AsyncEngine:
    """Runs an ``Engine``, in one event loop: ``async with AsyncEngine(engine) as running: ...``.

    The engine must not be used by anybody else. room: events that a caller may leave before its request is paused.
    """

    def __init__(self, engine: Engine, *, room: int = 64) -> None:
        self._engine, self._room = engine, room
        self._orders: deque[Callable[[], object]] = deque()  # what the thread does before its next step
        self._wake = threading.Event()
        self._waiting: set[_Caller] = set()  # all of them; of the loop, the thread knows ids only
        self._callers: dict[str, _Caller] = {}  # those whose request has not ended
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
    def stats(self) -> Stats:
        """The engine in figures."""
        return self._engine.stats

    async def run(self, request: Request) -> AsyncIterator[Event]:
        """The events of a request as they come, in an asynchronous generator.

        Raises ParameterError if the engine refuses the request, EngineStoppedError. Whoever leaves before the last
        event, by cancellation, an error, or ``aclose`` of the generator, ends the request.
        """
        self._check()
        caller = _Caller(self._loop.create_future())
        self._waiting.add(caller)
        try:
            self._order(lambda: self._admit(caller, request))
            await caller.future
            while not caller.over:
                yield await self._next(caller)
        finally:
            self._waiting.discard(caller)
            if self._callers.pop(caller.id, None) is caller:
                self._order(lambda: self._engine.abort(caller.id))

    def abort(self, request_id: str) -> None:
        """End a request soon: its last events come, with finish_reason "abort". Nothing happens if it is over."""
        self._order(lambda: self._send(self._engine.abort(request_id)))

    def _admit(self, caller: _Caller, request: Request) -> None:
        """On the engine's thread, as all that is done with the engine."""
        try:
            number = self._engine.add(request)
        except Exception as error:  # noqa: BLE001  # the caller's, whatever it is
            self._call(caller.refused, error)
        else:
            self._call(self._admitted, caller, number)

    def _admitted(self, caller: _Caller, number: str) -> None:
        if caller not in self._waiting:  # any more
            self._order(lambda: self._engine.abort(number))
            return
        caller.id = number
        self._callers[number] = caller
        caller.wake()

    async def _next(self, caller: _Caller) -> Event:
        while not caller.events:
            self._check()
            caller.future = self._loop.create_future()
            await caller.future
        event = caller.events.popleft()
        caller.over = event.last
        if caller.paused and len(caller.events) <= self._room // 2:
            self._pause(caller, paused=False)
        return event

    def _pause(self, caller: _Caller, *, paused: bool) -> None:
        caller.paused = paused
        self._order(lambda: self._engine.pause(caller.id, paused=paused))

    def _deliver(self, events: Iterable[Event]) -> None:
        """On the loop: events to those who wait for them."""
        for event in events:
            caller = self._callers.get(event.request_id)
            if caller is None:  # it has left
                continue
            caller.events.append(event)
            if event.last:
                del self._callers[event.request_id]
            elif len(caller.events) >= self._room and not caller.paused:
                self._pause(caller, paused=True)
            caller.wake()

    def _check(self) -> None:
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

    def _send(self, events: list[Event]) -> None:
        if events:
            self._call(self._deliver, events)

    def _work(self) -> None:
        """The thread."""
        try:
            while not self._closing:
                self._wake.clear()
                while self._orders:
                    self._orders.popleft()()
                before = self._engine.steps
                events = self._engine.step()
                self._send(events)
                if not events and self._engine.steps == before:
                    self._wake.wait()
        except BaseException as error:  # noqa: BLE001  # nobody else would hear of it
            with suppress(RuntimeError):  # the loop is closed
                self._call(self._stop, error)


class _Caller:
    """Who waits for the events of a request. Its future is what it waits for now."""

    def __init__(self, future: asyncio.Future[None]) -> None:
        self.id = ""
        self.events: deque[Event] = deque()
        self.future = future
        self.paused = self.over = False

    def wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def refused(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
