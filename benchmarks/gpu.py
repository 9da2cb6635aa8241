"""GPU kernels: checked against float64, then timed next to torch, FlashInfer, vLLM and one read of the logits.

Run: make bench-gpu, or python benchmarks/gpu.py --csv benchmarks/results/gpu.csv --plot benchmarks/results/gpu.svg

Without a GPU, only the checks run, in Triton's interpreter and at small sizes: python benchmarks/gpu.py --check-only (a
minute). For nucleate, a call is a whole sampling step, with penalties and state updates. Other libraries are measured
if they can be imported. Calls are captured as CUDA graphs where possible, so that only GPU work is timed. Cold: single
calls; before each, 256 MiB are written, more than any L2 cache holds. Warm: 20 calls in a row. Results are medians in
microseconds. The floor is the time to read the logits once at the bandwidth of a copy, measured in the same run. Cases
that exceed the time limit are skipped and counted.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns about operations that are silent on a GPU

import gpu_chains  # noqa: E402
import gpu_check  # noqa: E402

ROWS = 128, 8, 1024, 1, 32, 512, 256
SIZES = 128_256, 32_000, 256_000, 151_936
"""The most important cases come first, because of the time limit."""
AT_ONCE, FLUSHED = 20, 256 * 2**20
LONGEST = 20_000.0
"""Microseconds: a contender that is slower is not measured with more rows."""
COLUMNS = "device", "torch", "triton", "dtype", "vocabulary", "rows", "chain", "contender", "cold", "warm", "floor"


def cases() -> Iterator[tuple[int, int, str]]:
    """(vocabulary, rows, chain)."""
    for size in SIZES:
        for rows in ROWS:
            for chain in gpu_chains.CHAINS:
                yield size, rows, chain


def elapsed(run: Callable[[], object], times: int = 1) -> float:
    """Microseconds per call on the GPU, for ``times`` calls in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000 / times


def bandwidth() -> float:
    """Bytes per microsecond, read and written, of a copy of 2 GiB."""
    source = torch.empty(2**31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    taken = [elapsed(lambda: target.copy_(source)) for _ in range(10)]
    return 2 * source.numel() / statistics.median(taken[2:])


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph if it can be captured, else unchanged."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except Exception:  # noqa: BLE001  # the type depends on the contender
        torch.cuda.synchronize()
        return run
    return graph.replay


def timed(call: gpu_chains.Call, flush: torch.Tensor) -> tuple[float, float]:
    """Median microseconds, cold and warm."""
    before = call.before or (lambda: None)
    before()
    run = captured(call.run)
    cold, warm = [], []
    for _ in range(15):
        before()
        flush.zero_()
        cold.append(elapsed(run))
    for _ in range(5):
        before()
        warm.append(elapsed(run, 1 if call.before else AT_ONCE))
    return statistics.median(cold), statistics.median(warm)


def compete(dtype: torch.dtype, until: float) -> Iterator[dict[str, Any]]:
    """Measure each contender in each case until the time limit. Yields a CSV row for each."""
    bytes_per_us, flush = bandwidth(), torch.empty(FLUSHED, dtype=torch.uint8, device=DEVICE)
    print(f"a copy moves {bytes_per_us / 1e6:.2f} TB/s")
    known = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": metadata.version("triton")}
    slow: dict[tuple[int, str, str], float] = {}
    left_out = 0
    for size, rows, chain in cases():
        if time.perf_counter() > until:
            left_out += 1
            continue
        case = gpu_chains.make_case(rows, size, chain, dtype, DEVICE)
        floor = case.logits_RV.numel() * case.logits_RV.element_size() / bytes_per_us
        for name in present():
            if slow.get((size, chain, name), 0.0) * rows > LONGEST:
                continue
            call = gpu_chains.CONTENDERS[name](case)
            if call is None:
                continue
            cold, warm = timed(call, flush)
            slow[size, chain, name] = max(slow.get((size, chain, name), 0.0), cold / rows if rows > 1 else 0.0)
            print(f"{size:7}{rows:5} {chain:16}{name:16}{cold:9.1f}{warm:9.1f}{cold / floor:8.1f}x floor", flush=True)
            keys = dict(dtype=str(dtype)[6:], vocabulary=size, rows=rows, chain=chain, contender=name)
            yield known | keys | dict(cold=round(cold, 2), warm=round(warm, 2), floor=round(floor, 3))
        del case
    if left_out:
        print(f"skipped {left_out} cases because of the time limit")


def present() -> list[str]:
    """The contenders that can be imported."""
    names = []
    for name in gpu_chains.CONTENDERS:
        try:
            import_module(gpu_chains.PACKAGES.get(name, "torch"))
        except ImportError:
            continue
        names.append(name)
    return names


def write(lines: list[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check-only", action="store_true", help="run the checks, do not measure")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit: no case starts later [default 8]")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write an SVG plot; needs matplotlib")
    options = parser.parse_args()
    until = time.perf_counter() + 60 * options.minutes
    if not options.check_only and DEVICE == "cpu":
        print(
            "no GPU found, so nothing can be measured; --check-only checks the kernels in the interpreter", flush=True
        )
        return 2
    print(f"on {torch.cuda.get_device_name() if DEVICE == 'cuda' else 'the CPU, in the interpreter'}")
    if not gpu_check.run(DEVICE):
        return 1
    if not options.check_only:
        dtype = getattr(torch, options.dtype)
        lines = [*compete(dtype, until)]
        if options.csv:
            write(lines, options.csv)
        if options.plot:
            import gpu_plot

            gpu_plot.draw(lines, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
