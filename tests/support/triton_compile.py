"""Compiles the Triton kernels without a GPU: a launch only compiles, with the types and constants of its arguments.

    python tests/support/triton_compile.py 80,90,100 fp32,bf16,fp16 [stats,finish,tally,collect,resume]

compiles every kernel with and without each optional part that it reads, and prints a JSON line with its resource use.
Put another version of Triton first on PYTHONPATH to compile with it.

    python tests/support/triton_compile.py launches 90 [everything]

launches the kernels as ``Sampler`` does, so that Triton derives types and constants (such as 1) from real arguments.
Each token is 0. Prints the number of launches and the maximum shared memory of each kernel as JSON.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nucleate.sampling.gpu import torch_device
from nucleate.sampling.gpu.torch_device import COLUMNS
from nucleate.sampling.gpu.triton import launch
from nucleate.sampling.gpu.triton.device_memory import RowState

LAUNCHES: dict[str, list[int]] = {}
"""The number of launches and the maximum shared memory of each kernel."""
MADE: dict[str, Any] = {}
"""The last compiled version of each kernel; only of those in ``WANTED``, if any."""
WANTED: set[str] = set()
RUN = JITFunction.run


def disable_gpu(capability: int) -> None:
    """Make launches only compile, for GPUs of this capability, and arrays start with zeros: no kernel writes to them.

    It may be called again with another capability.
    """
    # Triton keeps the compiled kernels of each device: a device per capability
    device = {"target": GPUTarget("cuda", capability, 32), "device": capability, "stream": 0}
    functions = {f"get_current_{name}": lambda *_, value=value: value for name, value in device.items()}
    driver.set_active(SimpleNamespace(**functions))
    torch_device.triton_interpreted, torch.empty = lambda: True, torch.zeros
    JITFunction.run = _compile_only


def _compile_only(kernel: Any, *args: Any, **kwargs: Any) -> None:
    name = kernel.fn.__name__
    if WANTED and name not in WANTED:
        return
    made = MADE[name] = RUN(kernel, *args, **{**kwargs, "warmup": True})
    entry = LAUNCHES.setdefault(name, [0, 0])
    entry[:] = entry[0] + 1, max(entry[1], made.metadata.shared)


def kernels_of(call: Callable[[], None], names: set[str]) -> dict[str, Any]:
    """The compiled kernels with these names that a call launches."""
    MADE.clear()
    WANTED.update(names)
    call()
    WANTED.clear()
    return {**MADE}


SIZE, RING = 128_256, 8192
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIONAL = {
    "stats": ("mask", "report"),
    "finish": ("mask", "report", "active"),
    "tally": ("mask",),
    "collect": ("mask",),
    "resume": ("mask", "report"),
}
"""The optional parts that each kernel reads: the bitmask, the logprob and rank of the token, and which rows advance."""


def compiled(
    capabilities: Sequence[int], types: Sequence[str] = (*TYPES,), kernels: Sequence[str] = (*OPTIONAL,)
) -> Iterator[dict[str, Any]]:
    """Registers, bytes of spills, instructions, shared memory and compile time of each kernel and combination of parts.

    A kernel that does not compile has "error" instead.
    """
    for capability, kind, kernel in itertools.product(capabilities, types, kernels):
        disable_gpu(capability)
        for flags in itertools.product((False, True), repeat=len(OPTIONAL[kernel])):
            parts = [part for part, there in zip(OPTIONAL[kernel], flags, strict=True) if there]
            if "active" in parts and kind != types[0]:  # it does not depend on the type
                continue
            found: dict[str, Any] = {"triton": triton.__version__, "kernel": kernel, "dtype": kind, "parts": parts}
            found["capability"] = capability
            started = time.perf_counter()
            try:
                made = kernels_of(lambda a=(kind, parts): sample(*a), {kernel})[kernel]
            except Exception as error:  # noqa: BLE001  # the compiler's errors have many types
                yield found | {"error": " ".join(str(error.__cause__ or error).split())[:300]}
                continue
            seconds = round(time.perf_counter() - started, 2)
            yield found | resources_of(made.asm["cubin"]) | {"shared": made.metadata.shared, "seconds": seconds}


def sample(kind: str, parts: Sequence[str]) -> None:
    """A call of one row."""
    work = launch.TritonWorkspace(1, SIZE, "cpu")
    lines_SC, ring_SL = torch.zeros(4, COLUMNS, dtype=torch.int64), torch.zeros(4, RING, dtype=torch.int64)
    active = torch.ones(1, dtype=torch.bool) if "active" in parts else None
    mask = torch.zeros(1, SIZE // 32, dtype=torch.int32) if "mask" in parts else None
    state = RowState(torch.zeros(1, dtype=torch.int64), lines_SC, ring_SL, RING, active)
    launch.sample(torch.zeros(1, SIZE, dtype=TYPES[kind]), state, work, mask, report="report" in parts)


def resources_of(cubin: bytes) -> dict[str, Any]:
    """The resource use of machine code, from the disassembler."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [tool, "--dump-resource-usage", "--dump-sass", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    [registers], [stack] = re.findall(r"REG:(\d+)", text), re.findall(r"STACK:(\d+)", text)
    instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", text, re.MULTILINE))
    return {"registers": int(registers), "spills": int(stack), "instructions": instructions}


def launches(capability: int, *, everything: bool) -> dict[str, list[int]]:
    """The launches of scenarios. everything: with many kinds of rows, which takes minutes of compilation."""
    import sampler_scenarios as scenarios

    disable_gpu(capability)
    scenarios.written("triton", 2, 3, 1000, ring=1)
    scenarios.looped("triton", 1, 60, 1, 1, 2)
    if everything:
        scenarios.play("triton", 1, 12, size=1)
        scenarios.play("triton", 0, 12, size=77)
        scenarios.written("triton", 0, 6, 50)
    return LAUNCHES


if __name__ == "__main__":
    if sys.argv[1] == "launches":
        print(json.dumps(launches(int(sys.argv[2]), everything="everything" in sys.argv)))
        sys.exit()
    capabilities, *choice = (argument.split(",") for argument in sys.argv[1:])
    for line in compiled([*map(int, capabilities)], *choice):
        print(json.dumps(line), flush=True)
