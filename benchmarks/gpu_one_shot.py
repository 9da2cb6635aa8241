"""The first ten minutes on a GPU: what is there, what compiles, what is right, how fast it is, and the engine.

    PYTHONPATH=src python3 benchmarks/gpu_one_shot.py --out DIR [--seconds 560]

It needs the standard library, torch, triton and NumPy; the engine also needs numba, tokenizers, transformers and
safetensors. Nothing is installed. Each part is a process with a time limit (``gpu_parts.py``) that writes a JSON line
for each result to DIR/PART.jsonl, so that everything learnt so far is in the folder, even if the run is cut. A part
that crashes goes on with its next case in a new process. DIR/summary.md is written again after each part.

    --rehearse    without a GPU: in Triton's interpreter, on CPU tensors, at tiny sizes; the times mean nothing
    --plot        no run: write DIR/summary.md and DIR/gpu.svg from the lines in DIR; needs matplotlib
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
LIMITS = {"environment": 60, "kernels": 45, "checks": 90, "timings": 180, "engine": 100, "tools": 70, "long_checks": 15}
"""Seconds of each part in a run of 560 seconds. The last part gets all that is left."""
TOTAL = sum(LIMITS.values())
Line = dict[str, Any]


class Part(NamedTuple):
    """A process that writes JSON lines to standard output. After a crash it is started again, and reads its lines."""

    name: str
    command: Sequence[str]
    seconds: float


def parts_of(names: Sequence[str], out: Path, seconds: float, *, rehearse: bool) -> list[Part]:
    """The parts with these names, with time limits that add up to at most ``seconds``."""
    script = str(HERE / "gpu_parts.py")
    mode = ["--rehearse"] if rehearse else []
    return [
        Part(name, [sys.executable, script, name, str(out / f"{name}.jsonl"), *mode], LIMITS[name] * seconds / TOTAL)
        for name in names
    ]


def run(parts: Sequence[Part], out: Path, seconds: float) -> None:
    """Run the parts one after the other; all lines and the summary are in ``out`` at any time."""
    out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + seconds
    for index, part in enumerate(parts):
        left = until - time.monotonic()
        limit = left if index == len(parts) - 1 else min(part.seconds, left)
        begin = time.monotonic()
        run_part(part, out, limit)
        print(f"{part.name}: {time.monotonic() - begin:.0f} s", flush=True)
        write_summary(out)


def run_part(part: Part, out: Path, limit: float) -> None:
    """Run a part; after a crash again, if it has started more cases than the time before."""
    path, until, cases = out / f"{part.name}.jsonl", time.monotonic() + limit, -1
    path.write_text("")
    while (started := len({line["start"] for line in read(path) if "start" in line})) > cases:
        cases, left = started, until - time.monotonic()
        if left <= 0.5:
            return append(path, {"failed": "time limit", "detail": f"it had no time left of {limit:.0f} s"})
        with path.open("a") as lines, (out / f"{part.name}.log").open("a") as log:
            process = subprocess.Popen(  # noqa: S603  # programs of this repository
                part.command,
                stdin=subprocess.PIPE,  # its end tells the part that this process is gone
                stdout=lines,
                stderr=log,
                env={**os.environ, "NUCLEATE_SECONDS": f"{left:.1f}"},
                start_new_session=True,
            )
            code = wait(process, left)
        if code == 0:
            return None
        if code is None:
            return append(path, {"failed": "time limit", "detail": f"stopped after {limit:.0f} s"})
        last = (out / f"{part.name}.log").read_text(errors="replace").strip().splitlines()[-1:]
        append(path, {"failed": "crash", "code": code, "detail": "".join(last)[:300]})
    return None


def wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code of a part; None if it was stopped, with all its children, at the time limit."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None or process.returncode != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin:
            process.stdin.close()


def append(path: Path, line: Line) -> None:
    """Add a line after whatever the part wrote last, which may be half a line."""
    text = path.read_text(errors="replace")
    with path.open("a") as file:
        file.write(("" if not text or text.endswith("\n") else "\n") + json.dumps(line) + "\n")


def read(path: Path) -> list[Line]:
    """The complete lines of a part so far."""
    found = []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found


def write_summary(out: Path) -> None:
    """``summary.md``, from the lines in the folder. It replaces the old one at once."""
    lines = {name: read(out / f"{name}.jsonl") for name in LIMITS}
    text = "\n".join(summary(lines))
    (out / "summary.md.new").write_text(text, encoding="utf-8")
    (out / "summary.md.new").replace(out / "summary.md")


def summary(lines: Mapping[str, Sequence[Line]]) -> Iterator[str]:
    """Environment, right or wrong per kernel, multiples of one read of the logits, tokens/s of the engine, failures."""
    yield "# nucleate on a GPU\n"
    yield from (f"- {line['name']}: {line['value']}" for line in lines["environment"] if "name" in line)
    yield "\n## Kernels\n"
    yield from table(("kernel", "dtype", "parts", "sm", *RESOURCES), map(compiled, having("kernel", lines["kernels"])))
    yield "\n## Checks\n"
    yield from table(("kernels", "check", "wrong", "of", "first"), checked([*lines["checks"], *lines["long_checks"]]))
    yield "\n## Times\n"
    yield "Microseconds of a step, one call at a time; x: multiples of one read of the logits at the speed of a copy.\n"
    yield from (f"A copy moves {line['tb_per_s']} TB/s.\n" for line in having("tb_per_s", lines["timings"]))
    times = ({**line, "x": round(line["cold"] / line["floor"], 2)} for line in having("cold", lines["timings"]))
    yield from table(TIMES, ([line[key] for key in TIMES] for line in times))
    yield "\n## Engine\n"
    rates = having("tokens_per_s", lines["engine"])
    yield from table(RATES, ([line.get(key, "") for key in RATES] for line in rates))
    yield ""
    for line in having("equal", lines["engine"]):
        yield f"- {line['what']}: {line['backend']}: {'equal tokens' if line['equal'] else json.dumps(line)}"
    yield "\n## Tools\n"
    yield from (f"- {line['tool']}: {line['result']}" for line in having("tool", lines["tools"]))
    yield "\n## Failed, missing or left out\n"
    for name, found in lines.items():
        bad = (line for line in found if line.keys() & {"failed", "missing", "left_out"})
        yield from (f"- {name}: {json.dumps(line)}" for line in bad)
    yield ""


RESOURCES = "registers", "spills", "shared", "seconds"
TIMES = "rows", "chain", "contender", "cold", "x", "warm"
RATES = "what", "backend", "sequences", "tokens_per_s", "outside"


def having(key: str, lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if key in line]


def compiled(line: Line) -> list[object]:
    """The row of a kernel: its resources, or why it does not compile."""
    cells = [line["kernel"], line["dtype"], ", ".join(line["parts"]) or "none", line["capability"]]
    return [*cells, *([line["error"]] if "error" in line else [line[key] for key in RESOURCES])]


def checked(lines: Sequence[Line]) -> Iterator[Sequence[object]]:
    """A row per group of kernels, and one for each check that found wrong rows."""
    by_kernels: dict[str, list[Line]] = {}
    for line in having("check", lines):
        by_kernels.setdefault(line["path"], []).append(line)
    for path, checks in by_kernels.items():
        bad = [one for one in checks if one["wrong"] > one.get("allowed", 0)]
        yield f"**{path}**", f"{len(checks)} checks", len(bad), len(checks), "**wrong**" if bad else "right"
        for one in checks:
            if one["wrong"]:
                yield path, one["check"], one["wrong"], one["of"], json.dumps(one.get("first", ""))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield row(columns)
    yield row(["---"] * len(columns))
    yield from map(row, rows)


def row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


STYLES: Mapping[str, tuple[str, str]] = {
    "nucleate": ("#d55e00", "o"),
    "nucleate, torch": ("#e69f00", "v"),
    "one read (amax)": ("#6e7781", "x"),
    "torch": ("#009e73", "D"),
    "FlashInfer": ("#0072b2", "s"),
    "vLLM Triton": ("#aa4499", "^"),
}
"""Colours that are distinguishable with colour blindness, and marker shapes."""


def plot(out: Path) -> None:
    """``gpu.svg``: time as a multiple of one read of the logits by number of rows, a panel per chain. Deterministic."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    shown = [line for line in read(out / "timings.jsonl") if line.get("floor")]
    if not shown:
        return print("no times in this folder: nothing to plot")
    device = next((one["value"] for one in read(out / "environment.jsonl") if one.get("name") == "device"), "")
    chains = list(dict.fromkeys(line["chain"] for line in shown))
    with mpl.rc_context({"svg.hashsalt": "nucleate", "font.family": "DejaVu Sans", "font.size": 9}):
        across = min(4, len(chains))
        down = -(-len(chains) // across)
        size = 3.1 * across, 2.6 * down + 0.8
        figure, grid = plt.subplots(down, across, figsize=size, squeeze=False, sharex=True, sharey=True)
        figure.set_layout_engine("constrained")
        handles: dict[str, Any] = {}
        for axes, chain in zip(grid.flat, chains, strict=False):
            axes.set_title(chain, size=9)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.axhline(1.0, color="#24292f", lw=0.8, ls=(0, (4, 3)))
            axes.grid(color="#e4e7eb", lw=0.6)
            for name, (colour, marker) in STYLES.items():
                own = [one for one in shown if (one["contender"], one["chain"]) == (name, chain)]
                points = sorted((one["rows"], one["cold"] / one["floor"]) for one in own)
                if points:
                    style = {"marker": marker, "color": colour, "ms": 5, "lw": 1.2}
                    [handles[name]] = axes.plot(*zip(*points, strict=True), **style)
        for axes in grid.flat[len(chains) :]:
            axes.set_visible(False)
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=6, frameon=False)
        sizes = ", ".join(sorted({str(one["vocabulary"]) for one in shown}))
        figure.suptitle(f"{device}, {sizes} logits a row: time / one read of the logits, by rows")
        figure.savefig(out / "gpu.svg", format="svg", metadata={"Date": None, "Title": "Time / one read, by rows"})
        plt.close(figure)
    return None


def stop(*_: object) -> None:
    raise SystemExit("stopped: what was learnt is in the folder")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=float(TOTAL), help=f"time limit of the run [default {TOTAL}]")
    parser.add_argument(
        "--parts", nargs="+", choices=[*LIMITS], default=[*LIMITS], metavar="PART", help=", ".join(LIMITS)
    )
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, in the interpreter")
    parser.add_argument("--plot", action="store_true", help="only write the summary and the plot of a folder")
    options = parser.parse_args()
    if options.plot:
        write_summary(options.out)
        plot(options.out)
        return 0
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    signal.signal(signal.SIGTERM, stop)
    begin = time.monotonic()
    parts = parts_of(options.parts, options.out, options.seconds, rehearse=options.rehearse)
    if options.parts[0] == "environment":
        run(parts[:1], options.out, parts[0].seconds)
        found = {line["name"]: line["value"] for line in read(options.out / "environment.jsonl") if "name" in line}
        if not options.rehearse and (found.get("cuda") is False or found.get("torch") == "not installed"):
            print("no GPU that torch can use: --rehearse runs all parts in Triton's interpreter")
            return 2
        parts = parts[1:]
    run(parts, options.out, options.seconds - (time.monotonic() - begin))
    print((options.out / "summary.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
