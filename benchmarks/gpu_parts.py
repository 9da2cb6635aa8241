"""The parts of ``gpu_one_shot.py``: each is a process that prints a JSON line per result.

    python benchmarks/gpu_parts.py PART FILE [--rehearse]

FILE has the lines of this part so far: after a crash, cases that have started before are not tried again. No case
starts in the last tenth of NUCLEATE_SECONDS. A case that raises is a line; only an error that breaks the device for the
rest of the process ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_one_shot as one_shot

Line = dict[str, Any]
HERE = Path(__file__).parent
BEGIN, SECONDS = time.monotonic(), float(os.environ.get("NUCLEATE_SECONDS", "600"))
PACKAGES = [
    "torch",
    "triton",
    "numpy",
    "numba",
    "tokenizers",
    "transformers",
    "safetensors",
    "flashinfer-python",
    "vllm",
]
CASE_SHARE = 0.35
"""The share of a part's time after which a case counts as hung."""
AT_ONCE, FLUSHED = 20, 256 * 2**20
LONGEST = 20_000.0
"""Microseconds: a contender that is slower is not measured with more rows."""


class Part:
    """The lines of this process, and which cases it may start. rehearse: in the interpreter, at tiny sizes."""

    def __init__(self, path: Path, *, rehearse: bool) -> None:
        self.rehearse, self.device = rehearse, "cpu" if rehearse else "cuda"
        lines = one_shot.read(path)
        self.started = {line["start"] for line in lines if "start" in line}
        self._finished = {line["end"] for line in lines if "end" in line}
        self.left_out: list[str] = []
        for case in sorted(self.started - self._finished):
            if not any(line.get("case") == case and "failed" in line for line in lines):
                self.put({"failed": "the process ended in this case", "case": case})

    def put(self, line: Line) -> None:
        print(json.dumps(line), flush=True)

    def case(self, name: str, run: Callable[[], Any]) -> None:
        """Run a case: a function that returns a line, or lines."""
        if name in self.started:
            return
        if time.monotonic() - BEGIN > 0.9 * SECONDS:
            self.left_out.append(name)
            return
        self.put({"start": name})
        watch = threading.Timer(CASE_SHARE * SECONDS, self._hung, [name])
        watch.daemon = True
        watch.start()
        try:
            found = run()
            for line in [found] if isinstance(found, dict) else found or ():
                self.put(line)
        except Exception as error:  # noqa: BLE001  # whatever a kernel or a contender raises is a result
            why = f"{type(error).__name__}: {error}"
            self.put({"failed": "raised", "case": name, "detail": " ".join(why.split())[:400]})
            if broken(error):
                self.put({"end": name})
                sys.stderr.write(f"{why}\nthe device cannot be used in this process any more\n")
                os._exit(3)
        finally:
            watch.cancel()
        self.put({"end": name})

    def _hung(self, name: str) -> None:
        """End the process: a kernel that never ends cannot be stopped in another way."""
        self.put({"failed": "hung", "case": name, "detail": f"stopped after {CASE_SHARE * SECONDS:.0f} s"})
        os._exit(5)

    def finish(self) -> None:
        if self.left_out:
            self.put({"left_out": len(self.left_out), "why": "time limit", "cases": self.left_out[:20]})


def broken(error: Exception) -> bool:
    """Whether an error of CUDA stays for all later calls of this process."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def follow_parent() -> None:
    """End with the parent: it holds the other end of standard input."""

    def wait() -> None:
        while os.read(0, 1):  # not sys.stdin: its lock would crash the end of this process
            pass
        os._exit(4)

    threading.Thread(target=wait, daemon=True).start()


def environment(part: Part) -> None:
    def put(name: str, value: object) -> None:
        part.put({"name": name, "value": value})

    put("date", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))
    put("python", platform.python_version())
    put("cpus", os.cpu_count())
    for package in PACKAGES:
        try:
            put(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            put(package, "not installed")
    for tool in ("ncu", "compute-sanitizer"):
        put(tool, find_tool(tool) or "not installed")
    if part.rehearse:
        put("device", "the CPU, in Triton's interpreter: the times mean nothing")
        return

    import torch  # not in a case: the first import on a machine may take long

    def gpu() -> Iterator[Line]:
        yield {"name": "cuda", "value": bool(torch.cuda.is_available())}
        if torch.cuda.is_available():
            found = torch.cuda.get_device_properties(0)
            yield {"name": "device", "value": found.name}
            yield {"name": "capability", "value": f"sm_{found.major}{found.minor}"}
            yield {"name": "memory", "value": f"{found.total_memory / 2**30:.0f} GiB"}
            yield {"name": "multiprocessors", "value": found.multi_processor_count}
            yield {"name": "L2 cache", "value": f"{found.L2_cache_size / 2**20:.0f} MiB"}
            yield {"name": "torch's CUDA", "value": torch.version.cuda}

    part.case("gpu", gpu)
    part.case("driver", lambda: {"name": "nvidia-smi", "value": query_driver()})


def query_driver() -> str:
    fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,mig.mode.current"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)  # noqa: S603
    return ran.stdout.strip()


def find_tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin:/opt/nvidia/nsight-compute")


def kernels(part: Part) -> None:
    """Compile every kernel, with and without each optional part, in one process per kernel and dtype.

    And the kernels of the CPU, which the engine is compared with.
    """
    script = HERE.parent / "tests" / "support" / "triton_compile.py"
    cases = [(name, kind) for name in ("resume", "finish", "stats", "collect", "tally") for kind in ("fp32", "bf16")]
    if part.rehearse:
        capability, cases = 90, [("stats", "fp32"), ("tally", "bf16")]
    else:
        import torch

        major, minor = torch.cuda.get_device_capability()
        capability = 10 * major + minor
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def compiled(name: str, command: Sequence[str]) -> list[Line]:
        left = max(1.0, SECONDS - (time.monotonic() - BEGIN))
        ran = subprocess.run(  # noqa: S603
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=left,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        lines = [json.loads(line) for line in ran.stdout.splitlines()]
        if ran.returncode:
            lines.append({"failed": "crash", "case": name, "detail": ran.stderr.strip()[-300:]})
        return lines

    python = [sys.executable, "-W", "ignore"]
    commands = {f"{name}, {kind}": [*python, str(script), str(capability), kind, name] for name, kind in cases}
    if find_spec("numba") is not None:
        commands["the CPU's kernels"] = [*python, "-c", "import nucleate; nucleate.warm()"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in as_completed([pool.submit(compiled, *each) for each in commands.items()]):
            try:
                for line in done.result():
                    part.put(line)
            except Exception as error:  # noqa: BLE001  # a time limit, or output that is no JSON
                part.put({"failed": "raised", "case": "compile", "detail": str(error)[:300]})


def checks(part: Part) -> None:
    """Small checks: every chain, near ties, frequencies, masks and reports."""
    import gpu_chains
    import gpu_check as check

    sizes, rows, types = ((600,), 2, ("float32",)) if part.rehearse else ((128_256, 32_000), 8, ("float32", "bfloat16"))
    near = range(12 if part.rehearse else 300)
    device = part.device
    part.case("near ties", lambda: check.near_tied(near, device))
    for kind in types:
        part.case(f"mask {kind}", lambda k=kind: check.mask_and_logprobs(sizes[0], rows, k, device))
    for kind in types:
        for size in sizes:
            for chain in gpu_chains.CHAINS:
                run = (chain, size, rows, kind, device)
                part.case(f"tokens {chain} {kind} {size}", lambda run=run: check.tokens(*run))
    if part.rehearse:
        part.case("tokens flat", lambda: check.tokens("flat, both", 4000, 1, "float32", device))
    else:
        part.case("graph", lambda: check.graphs(sizes[0], 16))
    for chain in ("temperature", "top_p .9"):
        run = (chain, sizes[-1], 60 if part.rehearse else 20_000, device)
        part.case(f"frequencies {chain}", lambda run=run: check.frequencies(*run))
    for chain in () if part.rehearse else ("all", "flat, both"):
        run = (chain, sizes[0], rows, "float32", device, "torch")
        part.case(f"torch {chain}", lambda run=run: check.tokens(*run))


def long_checks(part: Part) -> None:
    """Other vocabularies, the third dtype and many more near ties, until the time is over."""
    import gpu_chains
    import gpu_check as check

    rehearse, device = part.rehearse, part.device
    chains = ["all", "flat, both"] if rehearse else [*gpu_chains.CHAINS]
    for size in (257,) if rehearse else (151_936, 262_144, 50_257, 128_256):
        for chain in chains:
            run = (chain, size, 1 if rehearse else 8, "float16", device)
            part.case(f"tokens {chain} {size}", lambda run=run: check.tokens(*run))
        part.case(
            f"mask {size}", lambda size=size: check.mask_and_logprobs(size, 2 if rehearse else 32, "float16", device)
        )
        if not rehearse:
            part.case(f"frequencies {size}", lambda size=size: check.frequencies("all", size, 20_000, device))
    for begin in range(300, 312 if rehearse else 30_300, 6 if rehearse else 300):
        numbers = range(begin, begin + (6 if rehearse else 300))
        part.case(f"near ties {begin}", lambda numbers=numbers: check.near_tied(numbers, device))


def timings(part: Part) -> None:
    """Each contender in each case: cold (256 MiB are written before each call) and warm (20 calls in a row).

    Calls are captured as CUDA graphs where possible, so that only GPU work is timed. For nucleate, a call is a whole
    sampling step, with the state updates. The floor is the time to read the logits once at the speed of a copy.
    """
    import gpu_chains
    import torch

    rehearse, device = part.rehearse, part.device
    elapsed = elapsed_on_cpu if rehearse else elapsed_on_gpu
    flush = torch.empty(2**20 if rehearse else FLUSHED, dtype=torch.uint8, device=device)
    speed: list[float] = []

    part.started.discard("copy")  # in each process
    part.case("copy", lambda: copied(speed, elapsed, 2**20 if rehearse else 2**31, device))
    size, slow = 600 if rehearse else 128_256, set()

    def measure(name: str, case: Any, keys: Line) -> Line | None:
        call = None if gpu_chains.is_missing(name) else gpu_chains.CONTENDERS[name](case)
        if call is None:
            return None
        cold, warm, how = timed(call, flush, elapsed, 2 if rehearse else 15, capture=not rehearse)
        if cold > LONGEST:
            slow.add((keys["chain"], name))
        floor = case.logits_RV.numel() * case.logits_RV.element_size() / speed[0]
        times = {"cold": round(cold, 2), "warm": round(warm, 2), "floor": round(floor, 4)}
        return {**keys, "contender": name, **times, "how": how}

    for rows in (1, 2) if rehearse else (32, 128, 1, 8, 512):
        for chain in ("temperature", "all") if rehearse else ("temperature", "all", "greedy", "flat, top_p .9"):
            case = gpu_chains.make_case(rows, size, chain, torch.float32, device)
            keys = {"rows": rows, "vocabulary": size, "chain": chain, "dtype": "float32"}
            for name in gpu_chains.CONTENDERS:
                if (speed and (chain, name) not in slow) or rehearse:
                    part.case(f"{rows} {chain} {name}", partial(measure, name, case, keys))
    for name in filter(gpu_chains.is_missing, gpu_chains.PACKAGES):
        part.put({"missing": name})


def copied(speed: list[float], elapsed: Any, size: int, device: str) -> Line:
    """Append the bytes per microsecond, read and written, of a copy."""
    import torch

    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    taken = [elapsed(lambda: target.copy_(source)) for _ in range(10)]
    speed.append(2 * source.numel() / statistics.median(taken[2:]))
    return {"tb_per_s": round(speed[0] / 1e6, 4)}


def elapsed_on_gpu(run: Callable[[], object], times: int = 1) -> float:
    """Microseconds per call on the GPU, for ``times`` calls in a row."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000 / times


def elapsed_on_cpu(run: Callable[[], object], times: int = 1) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - begin) * 1e6 / times


def timed(call: Any, flush: Any, elapsed: Any, repeat: int, *, capture: bool) -> tuple[float, float, str]:
    """Median microseconds, cold and warm, and how it was called."""
    before = call.before or (lambda: None)
    before()
    run, how = captured(call.run) if capture else (call.run, "plain")
    cold, warm = [], []
    for _ in range(repeat):
        before()
        flush.zero_()
        cold.append(elapsed(run))
    for _ in range(max(1, repeat // 3)):
        before()
        warm.append(elapsed(run, 1 if call.before or not capture else AT_ONCE))
    return statistics.median(cold), statistics.median(warm), how


def captured(run: Callable[[], object]) -> tuple[Callable[[], object], str]:
    """The call as a CUDA graph if it can be captured, else unchanged."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()  # an error of the call itself is raised here
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except Exception as error:  # noqa: BLE001  # the type depends on the contender
        torch.cuda.synchronize()
        return run, f"no graph: {type(error).__name__}"
    return graph.replay, "graph"


def tools(part: Part) -> None:
    """Bytes that the kernels read, from ncu; memory errors and races, from compute-sanitizer. On one small call."""
    small = [sys.executable, str(HERE / "gpu_parts.py"), "one_call", "-"]
    if part.rehearse:
        part.case("one call", lambda: [run_tool("one call", [*small, "--rehearse"])])
        small.append("--rehearse")
    ncu, sanitizer = find_tool("ncu"), find_tool("compute-sanitizer")
    metrics = "dram__bytes_read.sum,gpu__time_duration.sum,launch__registers_per_thread"
    counted = ["--metrics", metrics, "--csv", "--kernel-name", "regex:stats|finish|tally|collect|resume"]
    for name, command in (
        ("ncu", [ncu, *counted, *small]),
        ("memcheck", [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", *small]),
        ("racecheck", [sanitizer, "--tool", "racecheck", "--error-exitcode", "9", *small]),
    ):
        if command[0] is None:
            part.put({"missing": f"{name}: not installed"})
        else:
            part.case(name, lambda name=name, command=command: [run_tool(name, [str(word) for word in command])])


def run_tool(name: str, command: Sequence[str]) -> Line:
    """Run a tool for a third of the time at most; the end of what it prints."""
    ran = subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, check=False, timeout=max(5.0, SECONDS / 3), stdin=subprocess.DEVNULL
    )
    text = (ran.stdout + ran.stderr).strip()
    result = "right" if ran.returncode == 0 else f"exit code {ran.returncode}"
    return {"tool": name, "result": result, "output": text[-6000:]}


def one_call(part: Part) -> None:
    """A call of all five kernels, for the tools: 8 rows of 128,256, half of them flat. Prints the bytes of logits."""
    import gpu_chains
    import gpu_check
    import torch

    rows, size = (2, 600) if part.rehearse else (8, 128_256)

    case = gpu_check.mixed(gpu_chains.make_case(rows, size, "flat, both", torch.float32, part.device))
    sampled = gpu_chains.ours(case).run().tolist()
    print(sampled, case.logits_RV.numel() * case.logits_RV.element_size(), "bytes of logits")


def engine(part: Part) -> None:
    import gpu_engine

    gpu_engine.run(part)


PARTS = {name: globals()[name] for name in (*one_shot.LIMITS, "one_call")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    if options.part != "one_call":
        follow_parent()
    if options.rehearse:
        import warnings

        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns about operations that are silent on a GPU
    part = Part(options.file, rehearse=options.rehearse)
    PARTS[options.part](part)
    part.finish()


if __name__ == "__main__":
    main()
