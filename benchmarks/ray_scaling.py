"""Ray beside one process, on one machine: offline throughput, cost of a streamed event, online throughput, memory.

Each pair is measured in turn, in several rounds, because other programs of the machine change its speed: compare the
medians of one run.

    python benchmarks/ray_scaling.py [--json FILE] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from load_client import LoadRequest, workload
from sampler import machine
from server import SIZE, Server, Worker

from nucleate.batch.batch_records import JsonLine, read_line
from nucleate.scale.data import BatchActors, LineEngine

LINES, WARM = 512, 128
AT_ONCE, REQUESTS = 32, 96
PORT = 8199


def offline(actors: int) -> float:
    """Tokens per second of a batch, without the time to start. actors: 0 for one engine in this process."""
    texts = [json.dumps({"prompt": f"Story {n}", "max_tokens": 64, "ignore_eos": True}).encode() for n in range(LINES)]
    lines = [JsonLine(number, 1, text) for number, text in enumerate(texts, 1)]
    if not actors:
        engine = LineEngine({}, {}, {}, "tiny")
        engine.run([read_line(line) for line in lines[:WARM]])
        start = time.perf_counter()
        return sum(one.tokens for one in engine.run([read_line(line) for line in lines])) / (
            time.perf_counter() - start
        )
    results = BatchActors({}, {}, {}, "tiny", count=actors).process((line, read_line(line)) for line in lines)
    times = [(time.perf_counter(), result.tokens) for result in results]
    counted = times[WARM - 1 :]  # the time from the last of the first blocks
    return sum(tokens for _, tokens in counted[1:]) / (counted[-1][0] - counted[0][0])


def load(client: Worker, port: int, requests: list[LoadRequest], at_once: int) -> dict[str, Any]:
    """Send requests, all streamed."""
    found: dict[str, Any] = client(host="127.0.0.1", port=port, requests=requests, at_once=at_once)
    if found["errors"]:
        raise RuntimeError(str(found["first errors"]))
    return found


def seconds_per_event(client: Worker, port: int) -> float:
    """Of one stream alone."""
    stream = [LoadRequest(list(range(8, 24)), 512, 1)]
    return float(load(client, port, stream, 1)["seconds"]) / 512


def throughput(clients: list[Worker], ports: list[int], seed: int) -> float:
    """Tokens per second of many streams over one or two servers."""
    requests = workload(REQUESTS, SIZE, seed)
    shares = [requests[number :: len(ports)] for number in range(len(ports))]
    start = time.perf_counter()
    with ThreadPoolExecutor() as threads:
        jobs = [
            threads.submit(load, client, port, share, AT_ONCE // len(ports))
            for client, port, share in zip(clients, ports, shares, strict=False)
        ]
        tokens = sum(job.result()["tokens"] for job in jobs)
    return float(tokens) / (time.perf_counter() - start)


def memory() -> float:
    """GiB of the processes below this one whose memory is Ray's, without what they share."""
    found = 0
    for process in psutil.Process().children(recursive=True):
        if "ray" in " ".join(process.cmdline()):
            found += process.memory_full_info().pss
    return found / 2**30


KINDS = {
    "proxy": "ray::ProxyActor",
    "gateway": "ray::ServeReplica:bench:Ingress",
    "replica": "ray::ServeReplica:bench:Rep",
}


def cpu_seconds() -> dict[str, float]:
    """CPU seconds so far of the kinds of Serve's processes."""
    found = dict.fromkeys(KINDS, 0.0)
    for process in psutil.Process().children(recursive=True):
        title = " ".join(process.cmdline())
        for kind, start in KINDS.items():
            if title.startswith(start):
                found[kind] += sum(process.cpu_times()[:2])
    return found


def online(rounds: int) -> dict[str, Any]:
    """The server, two servers, and Serve with one and two replicas."""
    from ray import serve

    from nucleate.scale.serve import app

    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    events: dict[str, list[float]] = {"server": [], "serve, 1 replica": []}
    cpu: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {"server": [], "2 servers": [], "serve, 1 replica": [], "serve, 2 replicas": []}
    with Worker("load_client.py") as one, Worker("load_client.py") as two, Server([]) as first, Server([]) as second:
        clients, alone, both = [one, two], [first.port], [first.port, second.port]
        for replicas in (1, 2):
            serve.run(app(min_replicas=replicas, threads=os.cpu_count()), name="bench")
            for ports in (both, [PORT]):
                throughput(clients, ports, 0)  # warm up
            for number in range(rounds):
                if replicas == 1:
                    events["server"].append(seconds_per_event(one, first.port))
                    events["serve, 1 replica"].append(seconds_per_event(one, PORT))
                before_server = first.cpu
                rates["server"].append(throughput(clients, alone, number))
                tokens = sum(one.tokens for one in workload(REQUESTS, SIZE, number))
                cpu.setdefault("server", []).append((first.cpu - before_server) / tokens)
                rates["2 servers"].append(throughput(clients, both, number))
                before = cpu_seconds()
                rates[f"serve, {replicas} replica{'s' * (replicas > 1)}"].append(throughput(clients, [PORT], number))
                for kind, seconds in cpu_seconds().items():
                    cpu.setdefault(kind, []).append((seconds - before[kind]) / tokens)
            used = memory()
    serve.shutdown()
    found = {"seconds per event": events, "tokens per second": rates, "CPU seconds per token": cpu}
    return {**found, "GiB of Ray with 2 replicas": used}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    rates: dict[str, list[float]] = {"1 process": [], "1 actor": [], "2 actors": []}
    for _ in range(arguments.rounds):
        for actors, name in enumerate(rates):
            rates[name].append(offline(actors))
    results = {"machine": machine(), "versions": {name: version(name) for name in ("nucleate", "ray")}}
    results |= {"offline, tokens per second": rates, **online(arguments.rounds)}
    for name, values in {**rates, **results["tokens per second"]}.items():
        print(f"{name:20} {statistics.median(values):8.0f} tokens/s")
    for name, values in results["seconds per event"].items():
        print(f"{name:20} {statistics.median(values) * 1e3:8.3f} ms per event")
    for name, values in results["CPU seconds per token"].items():
        print(f"{name:20} {statistics.median(values) * 1e3:8.3f} CPU ms per token")
    print(f"Ray with 2 replicas: {results['GiB of Ray with 2 replicas']:.2f} GiB")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
