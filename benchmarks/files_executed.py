"""Counts the source files of nucleate that execute in ``LLM.generate``, an engine step, an HTTP stream and top_p.

It counts files with a function that runs, on any thread, after all modules have been imported and the call has been
made once: in a first call with new values of the sampling parameters, and in a second one with the same values.

    python benchmarks/files_executed.py [--list]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import nucleate as nc
from nucleate.server.app import application
from nucleate.server.limits import ServerLimits
from nucleate.server.request_log import RequestLog
from nucleate.server.service import Service

ROOT = str(Path(nc.__file__).parent)
TARGETS = {
    "LLM.generate": (34, 20),
    "a request up to its first token, then one engine step": (None, 16),
    "HTTP request to SSE": (40, 35),
    "top_p on the CPU": (12, None),
    "top_p on torch tensors": (16, None),
}
"""How many files are wanted, in the first and in the second call."""
BODY: dict[str, Any] = {"model": "nucleate-tiny", "prompt": "Once", "max_tokens": 4, "stream": True, "seed": 1}

Files = tuple[set[str], set[str]]
"""The files that execute in a first call with new parameters, and in a second one with the same."""


@contextmanager
def executed() -> Iterator[set[str]]:
    """The files in which a function runs in this context."""
    found: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT) and frame.f_code.co_name != "<module>":
            found.add(frame.f_code.co_filename.removeprefix(f"{ROOT}/"))

    profile_all(note)
    try:
        yield found
    finally:
        profile_all(None)


def profile_all(function: Any) -> None:
    """Set the profile function of this thread and of new threads; from Python 3.12 on, of all threads."""
    sys.setprofile(function)
    getattr(threading, "setprofile_all_threads", threading.setprofile)(function)


def both_calls(call: Callable[[nc.SamplingParams], object], **values: Any) -> Files:
    call(nc.SamplingParams(top_p=0.9, seed=1, **values))
    with executed() as first:
        params = nc.SamplingParams(top_p=0.95, seed=1, **values)
        call(params)
    with executed() as second:
        call(params)
    return first, second


def of_generate() -> Files:
    llm = nc.LLM()
    return both_calls(lambda params: llm.generate("Once", params), max_tokens=4, temperature=0.8)


def of_step() -> Files:
    engine = nc.LLM().new_engine()

    def add(top_p: float) -> None:
        params = nc.SamplingParams(max_tokens=100, temperature=0.8, top_p=top_p, seed=1)
        engine.add(nc.Request([5, 6, 7], params))
        engine.step()

    add(0.9)
    engine.abort("request-0")
    with executed() as first:
        add(0.95)
    engine.step()
    with executed() as second:
        engine.step()
    return first, second


def of_top_p(of: Callable[[Any], Any] = np.asarray, backend: str = "auto") -> Files:
    """One row, sampled by a new ``Sampler``. of: makes the logits."""
    logits_BV = of(np.random.default_rng(0).normal(size=(1, 1000)).astype(np.float32))

    def call(params: nc.SamplingParams) -> None:
        sampler = nc.Sampler(1000, backend)
        sampler(logits_BV, [sampler.add(params)])

    return both_calls(call)


def of_top_p_torch() -> Files:
    import torch

    return of_top_p(torch.from_numpy, "torch")


SCOPE: dict[str, Any] = {
    "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
    "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")], "http_version": "1.1",
    "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "root_path": "", "state": {},
    "asgi": {"version": "3.0"},
}  # fmt: skip


async def _stream(app: Any, top_p: float) -> None:
    """Stream a completion."""
    body = json.dumps(BODY | {"top_p": top_p}).encode()
    messages, sent = [{"type": "http.request", "body": body, "more_body": False}], []

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    await app(SCOPE, receive, send)
    if b"[DONE]" not in b"".join(sent):
        raise RuntimeError("the stream is incomplete")


def of_http() -> Files:
    """A streamed completion. The engine's thread starts within, so that its functions are counted."""
    llm = nc.LLM()

    async def run() -> Files:
        service = Service(llm, llm.new_engine(), BODY["model"], llm.default_params, ServerLimits())
        app, events = application(service, RequestLog(), hosts=()), asyncio.Queue[dict[str, Any]]()
        started, found = asyncio.Event(), []

        async def send(message: Any) -> None:
            started.set()

        with executed() as begun:
            lifespan = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}}, events.get, send))
            events.put_nowait({"type": "lifespan.startup"})
            await started.wait()
            await _stream(app, 0.9)
            for _ in range(2):
                begun.clear()
                await _stream(app, 0.95)
                found.append({*begun})
        events.put_nowait({"type": "lifespan.shutdown"})
        await lifespan
        return found[0], found[1]

    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="also print the files")
    listed = parser.parse_args().list
    measures = (of_generate, of_step, of_http, of_top_p, of_top_p_torch)
    for (name, targets), measure in zip(TARGETS.items(), measures, strict=True):
        for which, files, target in zip(("first", "second"), measure(), targets, strict=True):
            print(f"{name}, {which} call: {len(files)} files (target {target or 'none'})")
            if listed:
                print("".join(f"  {file}\n" for file in sorted(files)), end="")


if __name__ == "__main__":
    main()
