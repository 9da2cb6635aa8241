"""Compiles the Triton kernels for GPUs that need not be there, and tells what they take. Prints JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton_launches as launched

from nucleate.sampling.backends.torch.slots import COLUMNS
from nucleate.sampling.backends.triton import launch
from nucleate.sampling.backends.triton.device_memory import RowState

SIZE, RING = 128_256, 8192
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compiled(asked: list[tuple[str, str, bool, int]]) -> list[dict[str, Any]]:
    """Registers, bytes of stack (spills) and instructions of each (kernel, type, with all there may be, capability)."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    launched.without_gpu(asked[0][3])
    for kind, everything in dict.fromkeys((kind, everything) for _, kind, everything, _ in asked):
        wanted = {name for name, *rest in asked if rest[:2] == [kind, everything]}
        for name, made in launched.kernels_of(lambda a=(kind, everything): sample(*a), wanted).items():
            found[name, kind, everything] = measured(made.asm["cubin"])
    return [found[name, kind, everything] for name, kind, everything, _ in asked]


def sample(kind: str, everything: bool) -> None:
    """A call of one row."""
    work = launch.TritonWorkspace(1, SIZE, "cpu")
    lines_SC, ring_SL = torch.zeros(4, COLUMNS, dtype=torch.int64), torch.zeros(4, RING, dtype=torch.int64)
    active = torch.ones(1, dtype=torch.bool) if everything else None
    mask = torch.zeros(1, SIZE // 32, dtype=torch.int32) if everything else None
    state = RowState(torch.zeros(1, dtype=torch.int64), lines_SC, ring_SL, RING, active)
    launch.sample(torch.zeros(1, SIZE, dtype=TYPES[kind]), state, work, mask, report=everything)


def measured(cubin: bytes) -> dict[str, Any]:
    """What the disassembler says of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage, code = (
            subprocess.run([tool, what, file.name], check=True, capture_output=True, text=True).stdout
            for what in ("--dump-resource-usage", "--dump-sass")
        )
    [registers], [stack] = re.findall(r"REG:(\d+)", usage), re.findall(r"STACK:(\d+)", usage)
    instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code, re.MULTILINE))
    return {"registers": int(registers), "stack": int(stack), "instructions": instructions}


if __name__ == "__main__":
    print(json.dumps(compiled(json.loads(sys.argv[1]))))
