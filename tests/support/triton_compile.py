"""Compiles the Triton kernels without a GPU and prints their resource use, a JSON line for each.

Run: python tests/support/triton_compile.py 80,90,100 fp32,bf16,fp16 [stats,finish,tally,collect,resume]

Every kernel is compiled with and without each optional part that it reads. Put another version of Triton first on
PYTHONPATH to compile with it.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton_launches as launched

from nucleate.sampling.gpu.torch_device import COLUMNS
from nucleate.sampling.gpu.triton import launch
from nucleate.sampling.gpu.triton.device_memory import RowState

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
        launched.disable_gpu(capability)
        for flags in itertools.product((False, True), repeat=len(OPTIONAL[kernel])):
            parts = [part for part, there in zip(OPTIONAL[kernel], flags, strict=True) if there]
            if "active" in parts and kind != types[0]:  # it does not depend on the type
                continue
            found: dict[str, Any] = {"triton": triton.__version__, "kernel": kernel, "dtype": kind, "parts": parts}
            found["capability"] = capability
            started = time.perf_counter()
            try:
                made = launched.kernels_of(lambda a=(kind, parts): sample(*a), {kernel})[kernel]
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


if __name__ == "__main__":
    capabilities, *choice = (argument.split(",") for argument in sys.argv[1:])
    for line in compiled([*map(int, capabilities)], *choice):
        print(json.dumps(line), flush=True)
