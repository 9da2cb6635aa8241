"""Stalls of a stream: the longest gap between two tokens, alone and while other requests run.

A server without compiled kernels, and one with them, each stream one seeded request again and again. Meanwhile another
process requests every stage, every pair of stages and every preset, then responses of many megabytes, and then 64
outputs of a long prompt whose stages keep the history. The text must not change, and no gap may be much longer than
those of the stream alone.

    python benchmarks/stalls.py [--json FILE] [--at-once 4] [--seconds 120] [--quick]
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

TARGET = 0.1
"""Target: additional seconds of the longest gap while other requests run."""
ALONE = 8.0
"""Seconds of measurement of the stream alone, with kernels."""
TOKENS = 400
SEEDED: Mapping[str, Any] = {
    "seed": 7, "temperature": 0.8, "top_p": 0.95, "max_tokens": TOKENS, "suppress_token_ids": [0, 1, 2, 3, 4],
}  # fmt: skip
"""The request of the stream. Special tokens have no text: they would not be seen, and count as a gap."""
LOADED = ("from the start", "kernels ready", "large responses", "n=64")
"""The phases with other requests."""

STAGES: Mapping[str, Mapping[str, Any]] = {
    "logit_bias": {"logit_bias": {"40": 2.0, "60": -3.0}},
    "encoder_repetition": {"encoder_repetition_penalty": 1.2},
    "repetition": {"repetition_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.5},
    "presence": {"presence_penalty": 0.5},
    "dry": {"dry_multiplier": 0.8},
    "no_repeat_ngram": {"no_repeat_ngram_size": 3},
    "min_tokens": {"min_tokens": 4},
    "bad_words": {"bad_words": ["the", " a cat"]},
    "suppress": {"suppress_token_ids": [5, 6, 7]},
    "allowed": {"allowed_token_ids": list(range(0, 4000, 3))},
    "temperature": {"temperature": 0.7},
    "dynamic_temperature": {"dynamic_temperature_low": 0.5, "dynamic_temperature_high": 1.5},
    "quadratic": {"smoothing_factor": 0.3},
    "top_n_sigma": {"top_n_sigma": 1.5},
    "top_k": {"top_k": 40},
    "typical": {"typical_p": 0.9},
    "min_p": {"min_p": 0.05},
    "top_a": {"top_a": 0.2},
    "epsilon": {"epsilon_cutoff": 0.001},
    "eta": {"eta_cutoff": 0.002},
    "p_less": {"p_less": True},
    "top_h": {"top_h": 0.5},
    "mirostat": {"mirostat_tau": 5.0},
    "mirostat_v1": {"mirostat_v1_tau": 5.0},
    "top_p": {"top_p": 0.9},
    "xtc": {"xtc_probability": 0.5},
    "adaptive_p": {"adaptive_p_target": 0.5},
}
"""Request fields that enable each stage; a test checks that none is missing."""
LONG_PROMPT = [5 + place % 37 for place in range(769)]
"""One token more than whole blocks of the KV cache: all outputs of a request begin in the same step."""
SIBLINGS: Mapping[str, Any] = {
    "prompt": LONG_PROMPT, "n": 64, "max_tokens": 100, "logit_bias": {str(token): 1.0 for token in range(5, 305)},
    "dry_multiplier": 0.8, "no_repeat_ngram_size": 3, "top_k": 40, "typical_p": 0.9,
}  # fmt: skip
"""A request whose outputs each keep much of the history."""
LARGE: tuple[Mapping[str, Any], ...] = (
    {"prompt": [[5] * 1001] * 32, "max_tokens": 1, "prompt_logprobs": 6, "stream": False},
    {"prompt": [[6] * 1001] * 32, "max_tokens": 1, "prompt_logprobs": 6},
    {"prompt": [[7] * 1001] * 64, "max_tokens": 1, "echo": True, "logprobs": 5, "stream": False},
    {"n": 64, "max_tokens": 400, "logprobs": 15, "stream": False},
    {"prompt": [[8] * 1001] * 256, "max_tokens": 1, "prompt_logprobs": 0, "stream": False},
)
"""Requests with large responses."""
PRESETS = ("canonical", "vllm", "hf", "llama.cpp", "akunu")
DRAWS = ("gumbel", "categorical", "greedy")


EXCLUSIVE = {"mirostat", "mirostat_v1"}
"""Stages that a request cannot have together."""


def bodies(*, quick: bool) -> list[dict[str, Any]]:
    """All stages, selections, pairs and presets with all of their fields. quick: only a few of the pairs."""
    alone = [dict(fields) for fields in STAGES.values()]
    draws = [{"draw": draw} for draw in DRAWS]
    combinations = itertools.combinations(STAGES.items(), 2)
    pairs = [{**one, **other} for (name, one), (also, other) in combinations if {name, also} != EXCLUSIVE]
    orders = [{"order": name, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "logprobs": 3} for name in PRESETS]
    orders += [{"order": "llama.cpp", "typical_p": 0.9, "xtc_probability": 0.3}, {"order": "hf", "eta_cutoff": 0.001}]
    return [*alone, *draws, *orders, *(pairs[::17] if quick else pairs)]


class StreamResult(NamedTuple):
    """One response to the seeded request."""

    text: str
    gaps: list[float]  #: seconds between the parts of the stream


class Phase(NamedTuple):
    """The results of a phase."""

    streams: int
    longest: float
    texts: int  #: how many different ones there were; one, if all is well

    @classmethod
    def of(cls, results: list[StreamResult]) -> Phase:
        return cls(len(results), max(max(one.gaps) for one in results), len({one.text for one in results}))


class Server:
    """``nucleate serve`` with a kernel cache in a folder."""

    def __init__(self, cache: Path) -> None:
        self.lines: list[str] = []
        self.url, self._up = "", threading.Event()
        command = [sys.executable, "-m", "nucleate", "serve", "--host", "127.0.0.1", "--port", "0"]
        self._process = subprocess.Popen(  # noqa: S603
            command, env={**os.environ, "NUCLEATE_CACHE": str(cache)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        if not self._up.wait(60) or not self.url:
            self._process.kill()
            raise RuntimeError("the server did not start:\n" + "".join(self.lines[-20:]))

    def _read(self) -> None:
        for line in self._process.stderr or ():
            self.lines.append(line)
            if not self.url and (found := re.search(r"127\.0\.0\.1:\d+", line)):
                self.url = found[0]
                self._up.set()
        self._up.set()

    @property
    def ready(self) -> bool:
        """Whether its kernels are loaded."""
        return any("kernels ready" in line for line in self.lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def ask(url: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a stream. Raises RuntimeError for an error response."""
    connection = http.client.HTTPConnection(url, timeout=120)
    request_body = json.dumps({"prompt": "Once upon a time", "stream": True, "ignore_eos": True, **body})
    try:
        connection.request("POST", "/v1/completions", request_body, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status} for {request_body}: {response.read()[:300]!r}")
        if not json.loads(request_body)["stream"]:
            yield json.loads(response.read())
            return
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
    finally:
        connection.close()


def stream(url: str) -> StreamResult:
    """The seeded request, once."""
    text, gaps, last = [], [], None
    for part in ask(url, SEEDED):
        now = time.perf_counter()
        if last is not None:
            gaps.append(now - last)
        last = now
        text.append("".join(choice["text"] for choice in part["choices"]))
    return StreamResult("".join(text), gaps)


class LoadProcess:
    """A process that sends all of ``bodies``, or of ``LARGE``, once; or ``SIBLINGS`` again and again."""

    def __init__(self, url: str, at_once: int, *, quick: bool, large: bool = False, siblings: bool = False) -> None:
        named = {"--quick": quick, "--large": large, "--siblings": siblings}
        flags = [flag for flag, given in named.items() if given]
        command = [sys.executable, __file__, "--ask", url, "--at-once", str(at_once), *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603

    @property
    def done(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> str:
        """Its summary: the number of completed requests, and the first failed one."""
        self._process.terminate() if not self.done else None
        return (self._process.communicate()[0] or "cut off").strip()


def ask_all(url: str, at_once: int, waiting: list[dict[str, Any]]) -> None:
    """Send all bodies with limited concurrency, and print how many were completed."""
    lock, failed, answered = threading.Lock(), list[str](), [0]

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                body = waiting.pop(0)
            try:
                for _ in ask(url, {"max_tokens": 12, "seed": 1, **body}):
                    pass
                answered[0] += 1
            except (OSError, RuntimeError) as error:
                failed.append(f"{body}: {error}")

    threads = [threading.Thread(target=work) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{answered[0]} completed, {len(failed)} failed {failed[:1] or ''}".strip())


def run(cache: Path, at_once: int, seconds: float, *, quick: bool) -> dict[str, Any]:
    """One server: the stream under load from the start; then, with kernels, alone and under load again."""
    with Server(cache) as server:
        others, beside, end = LoadProcess(server.url, at_once, quick=quick), [], time.perf_counter() + seconds
        while not others.done and time.perf_counter() < end:
            beside.append(stream(server.url))
        load_summary = others.end()
        while not server.ready and time.perf_counter() < end + 2 * seconds:
            beside.append(stream(server.url))
        if not server.ready:
            raise RuntimeError("the kernels were not ready in time:\n" + "".join(server.lines[-20:]))
        for _ in range(2):
            stream(server.url)
        alone, until = [], time.perf_counter() + (ALONE / 4 if quick else ALONE)
        while time.perf_counter() < until:
            alone.append(stream(server.url))
        others, ready, end = LoadProcess(server.url, at_once, quick=quick), [], time.perf_counter() + seconds
        while not others.done and time.perf_counter() < end:
            ready.append(stream(server.url))
        said_then = others.end()
        others, beside_large = LoadProcess(server.url, 1, quick=quick, large=True), []
        while not others.done:
            beside_large.append(stream(server.url))
        large_summary = others.end()
        beside_siblings, until = [], time.perf_counter() + (2.0 if quick else ALONE)
        others = LoadProcess(server.url, 1, quick=quick, siblings=True)
        while time.perf_counter() < until:
            beside_siblings.append(stream(server.url))
        siblings_summary = others.end()
    return {
        "from the start": {**Phase.of(beside)._asdict(), "others": load_summary},
        "alone": Phase.of(alone)._asdict(),
        "kernels ready": {**Phase.of(ready)._asdict(), "others": said_then},
        "large responses": {**Phase.of(beside_large)._asdict(), "others": large_summary},
        "n=64": {**Phase.of(beside_siblings)._asdict(), "others": siblings_summary},
        "unchanged": len({one.text for one in (*beside, *alone, *ready, *beside_large, *beside_siblings)}) == 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--at-once", type=int, default=4, help="concurrent other requests [default 4]")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit for all other requests [default 120]")
    parser.add_argument("--quick", action="store_true", help="only a few of the pairs")
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    parser.add_argument("--large", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--siblings", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        waiting = [dict(body) for body in LARGE] if options.large else bodies(quick=options.quick)
        waiting = [dict(SIBLINGS) for _ in range(100)] if options.siblings else waiting
        ask_all(options.ask, options.at_once, waiting)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {"cores": os.cpu_count(), "load before": round(os.getloadavg()[0], 1)}
        for name in ("cold", "warm"):
            found[name] = one = run(Path(folder), options.at_once, options.seconds, quick=options.quick)
            alone = one["alone"]["longest"]
            for phase in ("alone", *LOADED):
                result = one[phase]
                more = result["longest"] - alone
                verdict = "" if phase == "alone" else f", {1e3 * more:+.0f} ms; others: {result['others']}"
                print(f"{name}, {phase}: longest gap {1e3 * result['longest']:.0f} ms of {result['streams']}{verdict}")
            print(f"{name}: the text is {'unchanged' if one['unchanged'] else 'CHANGED'}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    good = all(
        one["unchanged"] and one[phase]["longest"] <= one["alone"]["longest"] + TARGET
        for one in (found["cold"], found["warm"])
        for phase in LOADED
    )
    print(f"target, at most {1e3 * TARGET:.0f} ms longer and the same text: {'reached' if good else 'MISSED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
