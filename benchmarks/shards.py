"""A step of a ShardedSampler next to all-gather and one Sampler per rank, over gloo on one machine.

Time per step, and bytes per row and step that a rank receives. In each step the three ways run one after the other, on
the same logits; the time of a step is that of the slowest rank. "one rank" gathers the rows to one rank, which samples
and sends the tokens. The tokens of all ways are compared.

    python benchmarks/shards.py --json benchmarks/results/shards.json

Loopback is as fast as memory. A slower link can be imitated in a network namespace of its own (as root, on Linux), with
a rate of as many times that of a rank's link as there are ranks, since all of them share it:

    unshare -n sh -c "ip link set lo up && tc qdisc add dev lo root tbf rate 2gbit burst 1mb latency 50ms &&
        python benchmarks/shards.py --ranks 2 --link '1 Gbit/s per rank' --append --json benchmarks/results/shards.json"
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nucleate as nc
from nucleate.cli.bench import CHAINS, history, logits
from nucleate.scale.shards import ShardedSampler
from nucleate.sharding.rank_exchange import all_gather

VOCAB = 128_256
HOT = (
    *("greedy", "T .8", "T .8, top_k 40, min_p .05, top_p .95", "T .7, top_p .9", "T .8, min_p .05"),
    *("repetition over 64, the same", "top_k 1000"),
)
WHOLE = ("typical .95, T .8",)
CASES = [
    *(("peaked", chain, ranks, rows) for ranks in (2, 4, 8) for rows in (1, 32) for chain in HOT),
    *(("peaked", chain, ranks, rows) for ranks in (2, 8) for rows in (1, 32) for chain in WHOLE),
    *(("flat", "T .7, top_p .9", ranks, 32) for ranks in (2, 8)),
]
WAYS = ("sharded", "all-gather", "one rank")
Way = Callable[[], Any]


def ways(x_BV: Any, first: int, end: int, chain: str, received: list[int]) -> dict[str, Way]:
    """The three ways of a step; each appends the bytes that this rank has received."""
    params, rows, rank, ranks = CHAINS[chain], len(x_BV), dist.get_rank(), dist.get_world_size()
    local_BN, before = torch.from_numpy(x_BV[:, first:end].copy()), history(params, VOCAB)
    sharded = ShardedSampler(VOCAB, backend="cpu")
    samplers = [nc.Sampler(VOCAB, "cpu") for _ in range(2)]
    for row in range(rows):
        for sampler in (sharded, *samplers):
            sampler.add(nc.SamplingParams(seed=row, **params), output_ids=before)
    parts = torch.empty(ranks * rows * (end - first))
    tokens = torch.empty(rows, dtype=torch.int64)

    def joined(parts: Any) -> Any:
        return parts.view(ranks, rows, -1).transpose(0, 1).reshape(rows, VOCAB)

    def by_shards() -> Any:
        before = sharded.stats.received_bytes
        result = sharded(local_BN, first).token_ids
        received.append(sharded.stats.received_bytes - before)
        return result

    def by_all_gather() -> Any:
        all_gather(parts, local_BN.flatten())
        return samplers[0](joined(parts)).token_ids

    def by_one_rank() -> Any:
        dist.gather(local_BN, [*parts.view(ranks, rows, -1)] if rank == 0 else None)
        if rank == 0:
            tokens[:] = samplers[1](joined(parts)).token_ids
        dist.broadcast(tokens, 0)
        return tokens

    return dict(zip(WAYS, (by_shards, by_all_gather, by_one_rank), strict=True))


def measure(kind: str, chain: str, rows: int, steps: int) -> dict[str, Any]:
    """One case on this rank."""
    rank, ranks, received = dist.get_rank(), dist.get_world_size(), list[int]()
    width = VOCAB // ranks
    x_BV = logits(kind, rows, VOCAB)
    calls = ways(x_BV, rank * width, (rank + 1) * width, chain, received)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(steps):
        sampled = []
        for way, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            sampled.append(call().tolist())
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[way].append(slowest.item())
        if sampled[1:] != sampled[:-1]:
            raise AssertionError(f"{chain}: the ways sample different tokens")
    times = {way: statistics.median(found[2:]) * 1e6 for way, found in seconds.items()}
    return {
        "logits": kind, "chain": chain, "ranks": ranks, "rows": rows, "microseconds": times,
        "bytes per row": statistics.mean(received) / rows, "bytes of a row": 4 * VOCAB,
    }  # fmt: skip


def worker(rank: int, ranks: int, folder: str, cases: Sequence[tuple[str, str, int, int]], steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks)
    nc.warm()
    found = []
    for kind, chain, count, rows in cases:
        if count == ranks:
            found.append(measure(kind, chain, rows, steps if rows > 1 else 3 * steps))
            if rank == 0:
                one = found[-1]
                times = "".join(f"{one['microseconds'][way]:12.0f}" for way in WAYS)
                print(f"{kind:8}{chain:40}{ranks:3}{rows:4}{times}{one['bytes per row']:10.0f}", flush=True)
    if rank == 0:
        Path(folder, f"found{ranks}.json").write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--link", default="loopback", help="a name of the link for the results")
    parser.add_argument("--append", action="store_true", help="keep the runs that the file has")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    print(
        f"{'logits':8}{'pipeline':40}{'ranks':>3}{'rows':>3}"
        + "".join(f"{way:>12}" for way in WAYS)
        + "  us; bytes/row"
    )
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in arguments.ranks:
            torch.multiprocessing.spawn(worker, (ranks, folder, CASES, arguments.steps), nprocs=ranks)
            found += json.loads(Path(folder, f"found{ranks}.json").read_text("utf-8"))
    if arguments.json:
        file = Path(arguments.json)
        runs = json.loads(file.read_text("utf-8"))["runs"] if arguments.append else []
        runs.append({"link": arguments.link, "load before": round(load, 1), "steps": found})
        result = {"cores": os.cpu_count(), "vocabulary": VOCAB, "runs": runs}
        file.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
