"""The server under load, beside the engine without a server: latencies, what HTTP costs per token, clients that leave.

The server, its clients and the engine are processes of their own; the server and the engine run the same requests in
turn, and must give the same tokens.

    python benchmarks/server.py [--json FILE] [--repeat 5] [--requests 192] [--seconds 60] [--quick]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import psutil
from load_client import workload
from sampler import machine

HERE = Path(__file__).parent
PACKAGES = ("nucleate", "starlette", "uvicorn", "httptools", "uvloop")
SIZE = 4000  # of the vocabulary, from which prompts are
AT_ONCE = 64
TARGET = 1.15
"""How many times as long as the engine alone the server may take for a token."""


class Worker:
    """A process that does jobs, each a line of JSON, one at a time."""

    def __init__(self, program: str) -> None:
        command = [sys.executable, str(HERE / program)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)  # noqa: S603  # ours

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.kill()

    def __call__(self, **job: Any) -> Any:
        assert self._process.stdin is not None  # noqa: S101
        assert self._process.stdout is not None  # noqa: S101
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process has ended: {self._process.wait()}")
        return json.loads(line)


class Server:
    """``nucleate serve``, with the embedded model and whatever flags are given."""

    host = "127.0.0.1"

    def __init__(self, flags: Sequence[str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-m", "nucleate", "serve", "--host", self.host, "--port", "0", *flags]
        self._process = psutil.Popen(command, stderr=self._log)

    def __enter__(self) -> Self:
        while not (found := re.search(rf"http://{re.escape(self.host)}:(\d+)", self._read())):
            if self._process.poll() is not None:
                raise RuntimeError(f"the server has ended:\n{self._read()}")
            time.sleep(0.05)
        self.port = int(found[1])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def _read(self) -> str:
        self._log.seek(0)
        return self._log.read()

    @property
    def cpu(self) -> float:
        """Seconds of all cores."""
        return sum(self._process.cpu_times()[:2])

    @property
    def memory(self) -> int:
        """Bytes."""
        return int(self._process.memory_info().rss)

    def metric(self, name: str) -> float:
        """A figure of /metrics."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return float(re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)[0])

    @property
    def answers(self) -> float:
        """At work or waiting."""
        return self.metric("nucleate_num_requests_running") + self.metric("nucleate_num_requests_waiting")


class Benchmark:
    """A server, the engine alone, and the client of the server."""

    def __init__(self, server: Server, engine: Worker, client: Worker) -> None:
        self._server, self._engine, self._client = server, engine, client

    def load(self, **job: Any) -> Any:
        """Requests to the server, with what they cost it."""
        before = self._server.cpu
        told = self._client(host=self._server.host, port=self._server.port, **job)
        return {**told, "cpu seconds": self._server.cpu - before}

    def held(self, seconds: float) -> dict[str, Any]:
        """So many streams all the time: each that ends is replaced by another."""
        before = self._server.memory
        told = self.load(asked=workload(64 * int(seconds), SIZE, seed=1), at_once=AT_ONCE, seconds=seconds)
        told["tokens per second"] = told["tokens"] / told["seconds"]
        told["memory grown, MiB"] = (self._server.memory - before) / 2**20
        _show(f"{AT_ONCE} streams, {told['seconds']:.0f} s, {told['errors']} errors", told["tokens per second"])
        for name in ("first token", "between tokens"):
            cuts = ", ".join(f"{cut} {1e3 * value:.1f} ms" for cut, value in told[name].items())
            print(f"  {name:24}{cuts}")
        shares = [told[name] / told["seconds"] for name in ("cpu seconds", "client cpu seconds")]
        print(f"  cores in use            server {shares[0]:.2f}, clients {shares[1]:.2f}")
        return told

    def overhead(self, requests: int, repeat: int) -> dict[str, Any]:
        """The same requests through the engine, as streams, and as whole answers, in turn."""
        kinds = ("engine", "streams", "whole")
        found: dict[str, list[Any]] = {kind: [] for kind in kinds}
        for turn in range(repeat):
            asked = workload(requests, SIZE, seed=100 + turn)  # of their own: what is kept of prompts helps nobody
            for place in range(3):
                kind = kinds[(turn + place) % 3]
                found[kind].append(self._once(kind, asked))
            ids = [runs[-1].pop("token ids") for runs in found.values()]
            if not ids[0] == ids[1] == ids[2]:
                raise RuntimeError("the server's tokens are not the engine's")
        return self._compare(found)

    def _once(self, kind: str, asked: list[Any]) -> Any:
        if kind == "engine":
            told = self._engine(asked=asked, at_once=AT_ONCE, first=False)
        else:
            told = self.load(asked=asked, at_once=AT_ONCE, keep=True, stream=kind == "streams")
            if told["errors"]:
                raise RuntimeError(f"{told['errors']} errors, such as {told['first errors']}")
        tokens = sum(one.tokens for one in asked)
        return told | {"wall": told["seconds"] / tokens, "cpu": told["cpu seconds"] / tokens}

    def _compare(self, found: dict[str, list[Any]]) -> dict[str, Any]:
        """Ratios are those of one turn, medians of all turns."""
        results: dict[str, Any] = {}
        for kind, runs in found.items():
            own = {
                f"{what}, us per token": 1e6 * statistics.median(run[what] for run in runs) for what in ("wall", "cpu")
            }
            for what in ("wall", "cpu"):
                pairs = zip(runs, found["engine"], strict=True)
                own[f"{what}, times the engine's"] = statistics.median(run[what] / base[what] for run, base in pairs)
            if kind != "engine":
                own["client cpu, us per token"] = 1e6 * statistics.median(
                    run["client cpu seconds"] / run["tokens"] for run in runs
                )
            results[kind] = own
            ratio = own["wall, times the engine's"]
            judged = "" if kind == "engine" else f"   {'within' if ratio <= TARGET else 'NOT within'} {TARGET}"
            _show(f"{kind}, {AT_ONCE} at a time", 1e6 / own["wall, us per token"], f"{ratio:.2f} x the time{judged}")
            print("".join(f"\n  {name:32}{value:8.2f}" for name, value in own.items())[1:])
        return results

    def leaving(self, clients: int, seconds: float) -> dict[str, Any]:
        """Clients that go at random moments: what is left of their requests, and for how long."""
        asked = [one._replace(tokens=700) for one in workload(clients, SIZE, seed=2)]
        told: dict[str, Any] = self._client(host=self._server.host, port=self._server.port, asked=asked, leave=seconds)
        start = time.perf_counter()
        while self._server.answers and time.perf_counter() - start < 30:
            time.sleep(0.005)
        told["seconds until none ran"] = time.perf_counter() - start
        told["answers left"] = self._server.answers
        print(f"{clients} clients left, {told['of them in mid-stream']} of them in mid-stream")
        after = f"{told['seconds until none ran']:.3f} s after the last one"
        print(f"  answers that were left  {told['answers left']:.0f}, {after}")
        return told

    def first_token(self, requests: int) -> dict[str, Any]:
        """Of one request at a time, on a server that has nothing else to do, and without a server."""
        asked = [one._replace(tokens=4) for one in workload(requests, SIZE, seed=3)]
        own = self._engine(asked=asked, at_once=1, first=True)["first token"]
        told = self.load(asked=asked, at_once=1)["first token"]["p50"]
        print(f"first token of a single request   {1e3 * told:.2f} ms, without a server {1e3 * own:.2f} ms")
        return {"server": told, "LLM.stream": own}


def _show(name: str, speed: float, more: str = "") -> None:
    print(f"{name:40}{speed:8.0f} tokens/s   {more}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only see that all of it works, in some ten seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results there")
    parser.add_argument("--repeat", type=int, default=5, help="turns of the engine and the server [default 5]")
    parser.add_argument("--requests", type=int, default=192, help="of each turn [default 192]")
    parser.add_argument("--seconds", type=float, default=60.0, help="that the streams are held for [default 60]")
    parser.add_argument("flags", nargs="*", help="flags for nucleate serve, after --")
    asked = parser.parse_args()
    if asked.quick:
        asked.repeat, asked.requests, asked.seconds = 1, 32, 1.0
    results: dict[str, Any] = {"machine": machine(), "versions": {name: version(name) for name in PACKAGES}}
    print(f"{results['machine']}; load {os.getloadavg()[0]:.1f}; {results['versions']}")
    with Worker("load_engine.py") as engine, Worker("load_client.py") as client, Server(asked.flags) as server:
        benchmark = Benchmark(server, engine, client)
        results["first token"] = benchmark.first_token(10 if asked.quick else 100)
        results["overhead"] = benchmark.overhead(asked.requests, asked.repeat)
        results["held"] = benchmark.held(asked.seconds)
        results["leaving"] = benchmark.leaving(*(50, 0.5) if asked.quick else (200, 2.0))
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
