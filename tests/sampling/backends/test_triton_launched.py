"""Every launch compiles with the types and constants that Triton derives from ``Sampler``'s arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the kernels are launched with torch's tensors")
pytest.importorskip("triton", reason="the kernels are Triton's: pip install triton (Linux only)")

KERNELS = {"stats", "finish", "tally", "collect", "resume", "uniforms"}
SHARED = 48 << 10
"""Bytes of shared memory that every GPU gives a program without an opt-in."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["90"],
        ["80", "everything"],
        ["90", "everything"],
        ["100", "everything"],
    ],
    ids=" ".join,
)
def test_every_launch_compiles(arguments: list[str]) -> None:
    script = str(Path(__file__).parents[2] / "support" / "triton_compile.py")
    command = [sys.executable, "-W", "ignore", script, "launches", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert ran.returncode == 0, ran.stderr[-3000:]
    result = json.loads(ran.stdout)
    assert set(result) >= KERNELS
    assert all(launches > 1 and shared <= SHARED for launches, shared in result.values()), result
