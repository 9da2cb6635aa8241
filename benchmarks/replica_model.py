"""The discrete-event model of ``scale_simulation.py``: replicas with continuous batching and a prefix cache."""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import NamedTuple


class Costs(NamedTuple):
    """Seconds of a step: ``base + row * decoding sequences + token * prompt tokens``."""

    base: float
    row: float
    token: float


class Request(NamedTuple):
    """A request. prefix: tokens shared by all requests with this key; own: further prompt tokens."""

    arrival: float
    key: int
    prefix: int
    own: int
    output: int


@dataclass(eq=False)
class Served:
    """A request and when it was served. lost: its replica died during the stream; hit: its prefix was cached."""

    request: Request
    unread: int = 0  #: prompt tokens
    left: int = 0  #: output tokens
    first: float = math.nan
    end: float = math.nan
    lost: bool = False
    hit: bool = False


@dataclass(eq=False)
class Replica:
    """One engine. In each step all its sequences decode, and prompts fill the rest of the token budget."""

    costs: Costs
    max_seqs: int
    budget: int
    cache_tokens: int
    running: list[Served] = field(default_factory=list)
    waiting: deque[Served] = field(default_factory=deque)
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)  #: tokens by key, the oldest first
    cached: int = 0
    start: float = 0.0  #: of the current steps
    steps: int = 0  #: equal steps in progress; 0: idle
    seconds: float = 0.0  #: of each
    plan: list[tuple[Served, int]] = field(default_factory=list)  #: prompt tokens of the step
    version: int = 0  #: of the event at its end

    @property
    def ongoing(self) -> int:
        return len(self.running) + len(self.waiting)

    def begin(self, now: float) -> float | None:
        """Begin steps at a time. Returns their end; None if there is nothing to do."""
        while self.waiting and len(self.running) < self.max_seqs:
            self.running.append(self._admit(self.waiting.popleft()))
        if not self.running:
            self.steps = 0
            return None
        decoding = [one for one in self.running if not one.unread]
        room, self.plan = self.budget - len(decoding), []
        for one in self.running:
            if one.unread and room > 0:
                self.plan.append((one, min(one.unread, room)))
                room -= self.plan[-1][1]
        tokens = sum(count for _, count in self.plan)
        self.seconds = self.costs.base + self.costs.row * len(decoding) + self.costs.token * tokens
        self.steps = 1 if self.plan else min(one.left for one in decoding)
        self.start = now
        return now + self.steps * self.seconds

    def interrupt(self, now: float) -> float | None:
        """End equal steps early, so that a new request starts with the next one. Returns the new end, if it changes."""
        done = max(1, math.ceil((now - self.start) / self.seconds)) if self.steps > 1 else self.steps
        if done >= self.steps or len(self.running) >= self.max_seqs:
            return None
        self.steps = done
        return self.start + done * self.seconds

    def finish(self, now: float) -> None:
        """The results of the steps that end now."""
        planned = dict(self.plan)
        for one in self.running:
            if not one.unread:
                one.left -= self.steps
                one.first = self.start + self.seconds if math.isnan(one.first) else one.first
        for one, count in planned.items():
            one.unread -= count
            if not one.unread:
                one.first, one.left = now, one.left - 1
                self._remember(one.request)
        for one in self.running:
            if not one.unread and one.left <= 0:
                one.end = now
        self.running = [one for one in self.running if math.isnan(one.end)]

    def _admit(self, one: Served) -> Served:
        request = one.request
        one.hit = request.key in self.cache
        if one.hit:
            self.cache.move_to_end(request.key)
        one.unread, one.left = request.own + request.prefix * (not one.hit), request.output
        return one

    def _remember(self, request: Request) -> None:
        self.cached += request.prefix * (request.key not in self.cache)
        self.cache[request.key] = request.prefix
        self.cache.move_to_end(request.key)
        while self.cached > self.cache_tokens:
            self.cached -= self.cache.popitem(last=False)[1]


class Fleet:
    """Replicas and the events of their future. policy: see ``simulate``."""

    def __init__(
        self, costs: Costs, replicas: int, policy: str, *, seed: int, tried: int, room: int, **sizes: int
    ) -> None:
        self._new = lambda **state: Replica(costs, **sizes, **state)
        self.replicas = [self._new() for _ in range(replicas)]
        self._policy, self._rng, self._turn = policy, random.Random(seed), 0
        self._tried, self._room = tried, room
        self._up = list(range(replicas))
        self._live = set(self._up)
        self._orders: dict[int, list[int]] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0

    def at(self, time: float, event: Callable[[float], None]) -> None:
        """Call a function with the time, at that time."""
        self._count += 1
        heapq.heappush(self._events, (time, self._count, event))

    def run(self) -> None:
        """Run until nothing is left to do."""
        while self._events:
            time, _, event = heapq.heappop(self._events)
            event(time)

    def submit(self, one: Served, now: float) -> None:
        """Send a request to a replica."""
        number = self._choose(one.request)
        replica = self.replicas[number]
        replica.waiting.append(one)
        self._continue(number, replica.interrupt(now) if replica.steps else replica.begin(now))

    def kill(self, number: int, now: float) -> None:
        """A replica dies. Requests without a token start again elsewhere."""
        dead = self.replicas[number]
        self.replicas[number] = self._new(version=dead.version + 1)
        self._up.remove(number)
        self._live.remove(number)
        for one in [*dead.running, *dead.waiting]:
            one.lost = one.first <= now or (not one.unread and dead.start + dead.seconds <= now)
            if not one.lost:
                one.first = math.nan
                self.submit(one, now)

    def restart(self, number: int) -> None:
        """A dead replica is back, with an empty cache."""
        self._up = sorted([*self._up, number])
        self._live.add(number)

    def _continue(self, number: int, end: float | None) -> None:
        if end is not None:
            version = self.replicas[number].version = self.replicas[number].version + 1
            self.at(end, lambda now: self._step(number, version, now))

    def _step(self, number: int, version: int, now: float) -> None:
        replica = self.replicas[number]
        if replica.version == version:  # otherwise the event was replaced by an earlier one
            replica.finish(now)
            self._continue(number, replica.begin(now))

    def _choose(self, request: Request) -> int:
        up = self._up
        if self._policy == "random":
            return self._rng.choice(up)
        if self._policy == "round robin":
            self._turn += 1
            return up[self._turn % len(up)]
        if self._policy == "prefix":
            up = self._order(request.key)
            if (free := next((each for each in up if self.replicas[each].ongoing < self._room), None)) is not None:
                return free
        least = min(self.replicas[each].ongoing for each in up)
        return self._rng.choice([each for each in up if self.replicas[each].ongoing == least])

    def _order(self, key: int) -> list[int]:
        """The replicas of a key that live, in their order."""
        if key not in self._orders:
            ranked = sorted(range(len(self.replicas)), key=lambda each: _hash(key, each))
            self._orders[key] = ranked[: self._tried + 1]
        return [each for each in self._orders[key] if each in self._live][: self._tried]


def simulate(
    costs: Costs,
    requests: Sequence[Request],
    replicas: int,
    policy: str,
    *,
    max_seqs: int = 64,
    budget: int = 2048,
    cache_tokens: int = 200_000,
    tried: int | None = None,
    room: int | None = None,
    dies: tuple[float, float] | None = None,
    seed: int = 0,
) -> list[Served]:
    """Return when each request is served.

    policy: "random", "round robin", "shortest" (fewest requests) or "prefix": the first of the ``tried`` replicas of
    a prefix (default: all) with fewer than ``room`` requests (default: max_seqs), or else the one with the fewest.
    cache_tokens: of a replica's prefix cache. dies: when replica 0 dies, and seconds until it is back. A stream in
    progress is lost; a request without a token starts again elsewhere.
    """
    sizes = {"max_seqs": max_seqs, "budget": budget, "cache_tokens": cache_tokens}
    fleet = Fleet(costs, replicas, policy, seed=seed, tried=tried or replicas, room=room or max_seqs, **sizes)
    served = [Served(request) for request in requests]
    for one in served:
        fleet.at(one.request.arrival, partial(fleet.submit, one))
    if dies is not None:
        fleet.at(dies[0], partial(fleet.kill, 0))
        fleet.at(sum(dies), lambda _: fleet.restart(0))
    fleet.run()
    return served


def _hash(key: int, number: int) -> bytes:
    return blake2b(f"{key} {number}".encode(), digest_size=8).digest()
