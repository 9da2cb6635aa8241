"""Compiles the Triton kernels without a GPU and prints their resource use as JSON."""

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


def compiled(requested: list[tuple[str, str, bool, int]]) -> list[dict[str, Any]]:
    """Registers, stack bytes (spills) and instructions of each (kernel, dtype, all features, capability)."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    launched.disable_gpu(requested[0][3])
    for kind, all_features in dict.fromkeys((kind, all_features) for _, kind, all_features, _ in requested):
        names = {name for name, *rest in requested if rest[:2] == [kind, all_features]}
        for name, made in launched.kernels_of(lambda a=(kind, all_features): sample(*a), names).items():
            found[name, kind, all_features] = resources_of(made.asm["cubin"])
    return [found[name, kind, all_features] for name, kind, all_features, _ in requested]


def sample(kind: str, all_features: bool) -> None:
    """A call of one row."""
    work = launch.TritonWorkspace(1, SIZE, "cpu")
    lines_SC, ring_SL = torch.zeros(4, COLUMNS, dtype=torch.int64), torch.zeros(4, RING, dtype=torch.int64)
    active = torch.ones(1, dtype=torch.bool) if all_features else None
    mask = torch.zeros(1, SIZE // 32, dtype=torch.int32) if all_features else None
    state = RowState(torch.zeros(1, dtype=torch.int64), lines_SC, ring_SL, RING, active)
    launch.sample(torch.zeros(1, SIZE, dtype=TYPES[kind]), state, work, mask, report=all_features)


def resources_of(cubin: bytes) -> dict[str, Any]:
    """The resource use of machine code, from the disassembler."""
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
