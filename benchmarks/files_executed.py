"""Counts the source files of nucleate that execute in ``LLM.generate``, in one engine step, and in an HTTP stream.

It counts functions that run after all modules have been imported and the call has been made once, on any thread.

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

import nucleate as nc
from nucleate.server.app import application
from nucleate.server.limits import ServerLimits
from nucleate.server.request_log import RequestLog
from nucleate.server.service import Service

ROOT = str(Path(nc.__file__).parent)
TARGETS = {"LLM.generate": 25, "one engine step": 16, "HTTP request to SSE": 35}
BODY = {"model": "nucleate-tiny", "prompt": "Once", "max_tokens": 4, "stream": True, "seed": 1}


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


def of_generate() -> set[str]:
    llm = nc.LLM()
    params = nc.SamplingParams(max_tokens=4, temperature=0.8, top_p=0.95, seed=1)
    llm.generate("Once", params)
    with executed() as files:
        llm.generate("Once", params)
    return files


def of_step() -> set[str]:
    """One decode step of one sequence."""
    engine = nc.LLM().new_engine()
    engine.add(nc.Request([5, 6, 7], nc.SamplingParams(max_tokens=100, temperature=0.8, top_p=0.95, seed=1)))
    for _ in range(3):
        engine.step()
    with executed() as files:
        engine.step()
    return files


SCOPE: dict[str, Any] = {
    "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
    "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")], "http_version": "1.1",
    "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "root_path": "", "state": {},
    "asgi": {"version": "3.0"},
}  # fmt: skip


async def _stream(app: Any) -> bytes:
    """The body of a streamed completion."""
    messages, sent = [{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}], []

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    await app(SCOPE, receive, send)
    return b"".join(sent)


def of_http() -> set[str]:
    """A streamed completion. The engine's thread starts within, so that its functions are counted."""
    llm = nc.LLM()

    async def run() -> set[str]:
        service = Service(llm, llm.new_engine(), BODY["model"], llm.default_params, ServerLimits())
        app, events = application(service, RequestLog(), hosts=()), asyncio.Queue[dict[str, Any]]()
        started, files = asyncio.Event(), set[str]()

        async def send(message: Any) -> None:
            started.set()

        with executed() as begun:
            lifespan = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}}, events.get, send))
            events.put_nowait({"type": "lifespan.startup"})
            await started.wait()
            if b"[DONE]" not in await _stream(app):
                raise RuntimeError("the stream is incomplete")
            begun.clear()
            await _stream(app)
            files = set(begun)
        events.put_nowait({"type": "lifespan.shutdown"})
        await lifespan
        return files

    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="also print the files")
    listed = parser.parse_args().list
    measures: dict[str, Callable[[], set[str]]] = dict(zip(TARGETS, (of_generate, of_step, of_http), strict=True))
    for name, measure in measures.items():
        files = measure()
        print(f"{name}: {len(files)} files (target {TARGETS[name]})")
        if listed:
            print("".join(f"  {file}\n" for file in sorted(files)), end="")


if __name__ == "__main__":
    main()
