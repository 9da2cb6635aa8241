"""One engine shared by the callers of a process, each of whom takes the events of its own requests. Has no thread.

Whoever waits for an event makes the engine's next step, for all. A caller that leaves takes its requests along.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from nucleate.engine.beam.params import BeamRequest
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.outputs import EngineOutput


class SharedEngine:
    """Every caller may be a thread of its own. make: gives an engine, when one is needed first.

    An interrupt may come in the middle of a step: then the engine is given up, and the next caller gets a new one.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make
        self._engine: Engine | None = None
        self._lock = threading.Lock()
        self._boxes: dict[str, deque[EngineOutput]] = {}  # of each request, the box of its caller

    def check(self, request: Request | BeamRequest) -> None:
        """Raise ParameterError if ``run`` would."""
        with self._lock:
            self._running().prepare(request)

    def run(self, requests: Iterable[Request | BeamRequest]) -> Iterator[tuple[int, EngineOutput]]:
        """The events of some requests as they come, each with the place of its request among these.

        All are admitted before the first one runs; raises ParameterError. The requests have no ids of their own.
        """
        box: deque[EngineOutput] = deque()
        places: dict[str, int] = {}
        with self._lock:
            engine = self._running()
        try:
            for place, request in enumerate(requests):
                with self._lock:
                    self._go_on(engine)
                    number = engine.add(request)
                    places[number], self._boxes[number] = place, box
            while places:
                if not box:
                    self._wait(engine, box)
                while box:
                    event = box.popleft()
                    place = places.pop(event.request_id) if event.last else places[event.request_id]
                    yield place, event
        finally:
            with self._lock:
                for number in places if engine is self._engine else ():
                    engine.abort(number)
                    self._boxes.pop(number, None)

    def _running(self) -> Engine:
        if self._engine is None:
            self._engine, self._boxes = self._make(), {}
        return self._engine

    def _go_on(self, engine: Engine) -> None:
        """Raise RuntimeError if an engine was given up: its requests have the numbers of those of the next one."""
        if engine is not self._engine:
            raise RuntimeError("the engine has stopped, as another caller's step was interrupted")

    def _wait(self, engine: Engine, box: deque[EngineOutput]) -> None:
        """Make a step, unless another caller has just made one that brought something."""
        with self._lock:
            if box:
                return
            self._go_on(engine)
            try:
                events = engine.step()
            except BaseException:
                self._engine = None
                raise
            for event in events:
                own = self._boxes.pop(event.request_id) if event.last else self._boxes[event.request_id]
                own.append(event)
