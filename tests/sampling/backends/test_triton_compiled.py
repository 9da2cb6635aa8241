"""The Triton kernels compile with the oldest and the newest supported Triton, for GPUs of three generations.

Each with and without every optional part, without spills, and with the registers in the table of docs/cuda.md. The
slow tier compiles what the backend launches, see ``test_triton_launched``.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiers

pytest.importorskip("torch", reason="the kernels are launched with torch's tensors")
pytest.importorskip("triton", reason="the kernels are Triton's: pip install triton (Linux only)")

ROOT = Path(__file__).parents[3]
VERSIONS = ("3.6.0", "3.9.0")
"""Each is installed in a folder of its own by ``make setup-triton``."""
CAPABILITIES = (80, 90, 100)
KERNELS = {"stats": 4, "finish": 8, "tally": 2, "collect": 2, "resume": 4}
"""The number of compilations of each kernel for one type: with and without each optional part."""
INSTRUCTIONS = {"stats": 1200, "finish": 11_500, "tally": 2200, "collect": 2600, "resume": 11_800}
SHARED = 48 << 10
"""Bytes of shared memory that every GPU gives a program without an opt-in."""


def documented() -> dict[tuple[str, str, int], tuple[int, int]]:
    """(kernel, Triton, capability): the fewest and the most registers in docs/cuda.md."""
    lines = (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8").splitlines()
    columns = [(version, capability) for version in VERSIONS for capability in CAPABILITIES]
    table = {}
    for line in lines:
        name, *cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        if name in KERNELS and len(cells) == len(columns) and re.fullmatch(r"\d+ to \d+", cells[0]):
            for column, cell in zip(columns, cells, strict=True):
                low, high = cell.split(" to ")
                table[name, *column] = int(low), int(high)
    return table


@pytest.mark.exhaustive
@pytest.mark.parametrize(("version", "capability"), [*itertools.product(VERSIONS, CAPABILITIES)])
def test_every_kernel_compiles_with_and_without_every_part(version: str, capability: int, tmp_path: Path) -> None:
    folder = ROOT / ".venv" / "triton" / version
    if not (folder / "triton").exists() and os.environ.get("NUCLEATE_TEST_TRITON") != "required":
        pytest.skip(f"Triton {version} is not installed: make setup-triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(tmp_path)}
    compiler = str(ROOT / "tests" / "support" / "triton_compile.py")
    types = ("fp32", "bf16", "fp16")[: 3 if tiers.count(1, 3) == 3 else 1]
    command = [sys.executable, "-W", "error", compiler, str(capability), ",".join(types)]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line in lines if "error" in line] == []
    assert {line["triton"] for line in lines} == {version}
    for name, count in KERNELS.items():
        found = [line for line in lines if line["kernel"] == name]
        assert sum(line["dtype"] == "fp32" for line in found) == count
        assert {line["dtype"] for line in found} == {*types}
        assert max(line["spills"] for line in found) == 0, found
        assert max(line["instructions"] for line in found) <= INSTRUCTIONS[name], found
        assert max(line["shared"] for line in found) <= SHARED, found
        registers = [line["registers"] for line in found]
        low, high = documented()[name, version, capability]
        assert low <= min(registers) <= max(registers) <= high, name
        if len(types) == 3:
            assert (min(registers), max(registers)) == (low, high), name
