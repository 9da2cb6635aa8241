"""Sampling time per token with the public ``Sampler``, compared with NumPy's max over the rows and other samplers.

Run: python benchmarks/sampler.py --quick, or, to update the committed results:
python benchmarks/sampler.py --json benchmarks/results/sampler.json; benchmarks/page.py makes the docs page of them.

All results are medians of one run on one thread. The contenders alternate, a few calls each, so that a slow moment of
the machine affects all alike. torch, Transformers and llama.cpp (contenders.py) are included if their packages
are installed. A contender is skipped where a call would take longer than ``LONGEST``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import contenders
import page
import threads

import nucleate as nc
from nucleate.cli.bench import CHAINS, KINDS, Call, history, logits, medians, sampler_call

SIZES = (32_000, 128_256, 151_936, 256_000)
MORE_ROWS = (8, 32, 256)
LONGEST = 0.3e6
"""Microseconds: contenders with slower calls are skipped."""
PACKAGES = ("numpy", "numba", "torch", "transformers", "llama-cpp-python")

Case = dict[str, Any]


def cases(quick: bool) -> Iterator[tuple[str, int, int]]:
    """The cases (kind of logits, vocabulary size, rows), fewer rows first."""
    for size in (128_256,) if quick else SIZES:
        for kind in ("peaked", "flat") if quick else KINDS:
            yield kind, size, 1
        for rows in () if quick else MORE_ROWS:
            yield "peaked", size, rows


def compete(makers: dict[str, contenders.Maker], quick: bool, seconds: float) -> list[Case]:
    """Measure every pipeline in every case, and print a line for each."""
    found: list[Case] = []
    names = ["numpy max", "nucleate", *makers]
    print(f"{'microseconds per call (multiple of nucleate)':62}" + "".join(f"{name:>19}" for name in names))
    for kind, size, rows in cases(quick):
        x_BV = logits(kind, rows, size)
        for chain, params in CHAINS.items():
            stages, before = nc.SamplingParams(seed=0, **params).build_pipeline(), history(params, size)
            entered: dict[str, Call] = {
                "numpy max": lambda x=x_BV: x.max(axis=1),
                "nucleate": sampler_call(x_BV, params),
            }  # type: ignore[misc]
            for name, make in makers.items():
                if expected(found, kind, size, rows, chain, name) < LONGEST and (call := make(x_BV, stages, before)):
                    entered[name] = call
            times = medians(entered, seconds)
            found.append(dict(logits=kind, vocabulary=size, rows=rows, chain=chain, microseconds=times))
            shown = [f"{times[n]:11.1f}{times[n] / times['nucleate']:7.1f}x" if n in times else " " * 19 for n in names]
            print(f"{kind:8}{size:>7}{rows:>4} {chain:42}{''.join(shown)}", flush=True)
    return found


def expected(found: list[Case], kind: str, size: int, rows: int, chain: str, name: str) -> float:
    """The expected microseconds of a call, from those of fewer rows; infinite if that was skipped."""
    for case in reversed(found):
        if (case["logits"], case["vocabulary"], case["chain"]) == (kind, size, chain):
            return float(case["microseconds"].get(name, LONGEST)) * rows / case["rows"]
    return 0.0


def versions() -> dict[str, str]:
    """The versions of all contenders."""
    known = {"nucleate": nc.__version__, "Python": platform.python_version()}
    for package in PACKAGES:
        try:
            known[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return known


def machine() -> str:
    """The name of the processor, if the system provides it."""
    cpuinfo = Path("/proc/cpuinfo").read_text("utf-8") if Path("/proc/cpuinfo").exists() else ""
    facts = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    lines = {name.strip(): value.strip() for name, value in facts.items()}
    name = lines.get("model name") or platform.processor() or platform.machine()
    vectors = ", AVX-512" if "avx512f" in lines.get("flags", "") else ""
    return f"{name}{vectors}, {os.cpu_count()} cores, {platform.system()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one vocabulary, one row, peaked and flat")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--seconds", type=float, default=0.5, help="time per pipeline and case [default 0.5]")
    options = parser.parse_args()
    start, os.environ["NUCLEATE_THREADS"] = time.perf_counter(), "1"
    makers, missing = contenders.present()
    for package in missing:
        print(f"without {package}, which is not installed: pip install -c constraints.txt -e '.[torch,bench]'")
    contenders.check(makers)
    results: dict[str, Any] = dict(machine=machine(), versions=versions(), longest=LONGEST / 1e6)
    results["fill"] = contenders.fills([128_256] if options.quick else SIZES) if "llama.cpp" in makers else {}
    results["cases"] = compete(makers, options.quick, options.seconds)
    results["two threads"] = {} if options.quick else threads.compare(SIZES)
    print("", page.summary(results), "", *page.misses(results), sep="\n")
    results["seconds"] = round(time.perf_counter() - start)
    print(f"{results['seconds']} s")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
