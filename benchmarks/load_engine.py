"""The engine without a server: the same requests as the client sends (``load_client.py``), stepped in a loop.

A process of its own, told what to do by JSON lines on stdin, so that it runs in turn with a server. Knows no HTTP.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
from time import perf_counter
from typing import Any

from load_client import SAMPLED, Asked

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request


def run(engine: Engine, asked: list[Asked], at_once: int) -> dict[str, Any]:
    """All requests, at most so many at a time."""
    waiting = iter(enumerate(asked))
    places: dict[str, int] = {}
    token_ids: list[list[int]] = [[] for _ in asked]
    start, cpu = perf_counter(), _cpu()
    while True:
        while len(places) < at_once and (after := next(waiting, None)) is not None:
            place, one = after
            places[engine.add(Request(one.prompt_ids, _params(one)))] = place
        if not places:
            break
        for event in engine.step():
            token_ids[places[event.request_id]] += event.chunk.token_ids
            if event.finished:
                del places[event.request_id]
    return {"seconds": perf_counter() - start, "cpu seconds": _cpu() - cpu, "token ids": token_ids}


def first(llm: nc.LLM, asked: list[Asked]) -> dict[str, Any]:
    """Requests one after the other: the median time until there is text."""
    seconds = []
    for one in asked:
        start = perf_counter()
        for piece in llm.stream(one.prompt_ids, _params(one)):
            if piece.text:
                seconds.append(perf_counter() - start)
                break
    return {"first token": statistics.median(seconds)}


def _params(one: Asked) -> nc.SamplingParams:
    return nc.SamplingParams(max_tokens=one.tokens, seed=one.seed, **SAMPLED)  # type: ignore[arg-type]


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    llm = nc.LLM()
    engine = llm.new_engine()
    for line in sys.stdin:
        job = json.loads(line)
        asked = [Asked(*one) for one in job["asked"]]
        told = first(llm, asked) if job["first"] else run(engine, asked, job["at_once"])
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
