"""The engine without a server, with the same requests as the client (``load_client.py``), stepped in a loop.

Runs as a separate process and reads jobs as JSON lines from stdin, so that it can alternate with a server.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
from time import perf_counter
from typing import Any

from load_client import SAMPLED, LoadRequest

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request


def run(engine: Engine, requests: list[LoadRequest], at_once: int) -> dict[str, Any]:
    """Run all requests, with limited concurrency."""
    waiting = iter(enumerate(requests))
    indices: dict[str, int] = {}
    token_ids: list[list[int]] = [[] for _ in requests]
    start, cpu = perf_counter(), _cpu()
    while True:
        while len(indices) < at_once and (after := next(waiting, None)) is not None:
            index, one = after
            indices[engine.add(Request(one.prompt_ids, _params(one)))] = index
        if not indices:
            break
        for event in engine.step():
            token_ids[indices[event.request_id]] += event.chunk.token_ids
            if event.finished:
                del indices[event.request_id]
    return {"seconds": perf_counter() - start, "cpu seconds": _cpu() - cpu, "token ids": token_ids}


def first(llm: nc.LLM, requests: list[LoadRequest]) -> dict[str, Any]:
    """Run requests one after the other. Returns the median time to first token."""
    seconds = []
    for one in requests:
        start = perf_counter()
        for chunk in llm.stream(one.prompt_ids, _params(one)):
            if chunk.text:
                seconds.append(perf_counter() - start)
                break
    return {"first token": statistics.median(seconds)}


def _params(one: LoadRequest) -> nc.SamplingParams:
    return nc.SamplingParams(max_tokens=one.tokens, seed=one.seed, **SAMPLED)  # type: ignore[arg-type]


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    llm = nc.LLM()
    engine = llm.new_engine()
    for line in sys.stdin:
        job = json.loads(line)
        requests = [LoadRequest(*one) for one in job["requests"]]
        result = first(llm, requests) if job["first"] else run(engine, requests, job["at_once"])
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
