"""The server under load, compared with the engine alone: latency, HTTP cost per token, client disconnects.

The server, its clients and the engine are separate processes. The server and the engine run the same requests in turn,
and must return the same tokens.

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
SIZE = 4000  # vocabulary size of random prompts
AT_ONCE = 64
TARGET = 1.15
"""Target: time per token of the server, as a multiple of the engine alone."""


class Worker:
    """A process that runs jobs, given as lines of JSON, one at a time."""

    def __init__(self, program: str) -> None:
        command = [sys.executable, str(HERE / program)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)  # noqa: S603

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
    """``nucleate serve`` with the embedded model and the given flags."""

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
        """CPU seconds."""
        return sum(self._process.cpu_times()[:2])

    @property
    def memory(self) -> int:
        """Bytes."""
        return int(self._process.memory_info().rss)

    def metric(self, name: str) -> float:
        """The value of a metric."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return float(re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)[0])

    @property
    def answers(self) -> float:
        """Running or queued requests."""
        return self.metric("nucleate_num_requests_running") + self.metric("nucleate_num_requests_waiting")


class Benchmark:
    """A server, the engine alone, and the client of the server."""

    def __init__(self, server: Server, engine: Worker, client: Worker) -> None:
        self._server, self._engine, self._client = server, engine, client

    def load(self, **job: Any) -> Any:
        """Send requests to the server. Returns the results with the server's CPU time."""
        before = self._server.cpu
        result = self._client(host=self._server.host, port=self._server.port, **job)
        return {**result, "cpu seconds": self._server.cpu - before}

    def keep_open(self, seconds: float) -> dict[str, Any]:
        """Keep a constant number of streams open: a new one replaces each that ends."""
        before = self._server.memory
        result = self.load(requests=workload(64 * int(seconds), SIZE, seed=1), at_once=AT_ONCE, seconds=seconds)
        result["tokens per second"] = result["tokens"] / result["seconds"]
        result["memory grown, MiB"] = (self._server.memory - before) / 2**20
        _show(f"{AT_ONCE} streams, {result['seconds']:.0f} s, {result['errors']} errors", result["tokens per second"])
        for name in ("first token", "between tokens"):
            cuts = ", ".join(f"{cut} {1e3 * value:.1f} ms" for cut, value in result[name].items())
            print(f"  {name:24}{cuts}")
        shares = [result[name] / result["seconds"] for name in ("cpu seconds", "client cpu seconds")]
        print(f"  cores in use            server {shares[0]:.2f}, clients {shares[1]:.2f}")
        return result

    def overhead(self, count: int, repeat: int) -> dict[str, Any]:
        """Run the same requests on the engine, as streams, and without streaming, in turn."""
        kinds = ("engine", "streams", "whole")
        found: dict[str, list[Any]] = {kind: [] for kind in kinds}
        for turn in range(repeat):
            requests = workload(count, SIZE, seed=100 + turn)  # new prompts: no prefix cache hits
            for index in range(3):
                kind = kinds[(turn + index) % 3]
                found[kind].append(self._once(kind, requests))
            ids = [runs[-1].pop("token ids") for runs in found.values()]
            if not ids[0] == ids[1] == ids[2]:
                raise RuntimeError("the tokens of the server and the engine differ")
        return self._compare(found)

    def _once(self, kind: str, requests: list[Any]) -> Any:
        if kind == "engine":
            result = self._engine(requests=requests, at_once=AT_ONCE, first=False)
        else:
            result = self.load(requests=requests, at_once=AT_ONCE, keep=True, stream=kind == "streams")
            if result["errors"]:
                raise RuntimeError(f"{result['errors']} errors, such as {result['first errors']}")
        tokens = sum(one.tokens for one in requests)
        return result | {"wall": result["seconds"] / tokens, "cpu": result["cpu seconds"] / tokens}

    def _compare(self, found: dict[str, list[Any]]) -> dict[str, Any]:
        """Medians of the ratios within each turn."""
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
        """Clients that disconnect at random times: how long their requests remain in the engine."""
        requests = [one._replace(tokens=700) for one in workload(clients, SIZE, seed=2)]
        result: dict[str, Any] = self._client(
            host=self._server.host, port=self._server.port, requests=requests, leave=seconds
        )
        start = time.perf_counter()
        while self._server.answers and time.perf_counter() - start < 30:
            time.sleep(0.005)
        result["seconds until none ran"] = time.perf_counter() - start
        result["answers left"] = self._server.answers
        print(f"{clients} clients disconnected, {result['of them in mid-stream']} of them during a stream")
        after = f"{result['seconds until none ran']:.3f} s after the last one"
        print(f"  unfinished requests     {result['answers left']:.0f}, {after}")
        return result

    def first_token(self, count: int) -> dict[str, Any]:
        """Time to first token of single requests, with and without a server."""
        requests = [one._replace(tokens=4) for one in workload(count, SIZE, seed=3)]
        own = self._engine(requests=requests, at_once=1, first=True)["first token"]
        result = self.load(requests=requests, at_once=1)["first token"]["p50"]
        print(f"time to first token, idle server   {1e3 * result:.2f} ms, without a server {1e3 * own:.2f} ms")
        return {"server": result, "LLM.stream": own}


def _show(name: str, speed: float, more: str = "") -> None:
    print(f"{name:40}{speed:8.0f} tokens/s   {more}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smoke test: about ten seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--repeat", type=int, default=5, help="turns of the engine and the server [default 5]")
    parser.add_argument("--requests", type=int, default=192, help="requests per turn [default 192]")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the streaming test [default 60]")
    parser.add_argument("flags", nargs="*", help="flags of nucleate serve, after --")
    options = parser.parse_args()
    if options.quick:
        options.repeat, options.requests, options.seconds = 1, 32, 1.0
    results: dict[str, Any] = {"machine": machine(), "versions": {name: version(name) for name in PACKAGES}}
    print(f"{results['machine']}; load {os.getloadavg()[0]:.1f}; {results['versions']}")
    with Worker("load_engine.py") as engine, Worker("load_client.py") as client, Server(options.flags) as server:
        benchmark = Benchmark(server, engine, client)
        results["first token"] = benchmark.first_token(10 if options.quick else 100)
        results["overhead"] = benchmark.overhead(options.requests, options.repeat)
        results["held"] = benchmark.keep_open(options.seconds)
        results["leaving"] = benchmark.leaving(*(50, 0.5) if options.quick else (200, 2.0))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
