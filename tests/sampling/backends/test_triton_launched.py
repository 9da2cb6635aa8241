"""Launches compile as they are: with the types and constants that Triton makes of what ``Sampler`` gives a kernel."""

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
"""Bytes of shared memory that every GPU gives a program without being asked."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        ["90"],
        ["80", "everything"],
        ["90", "everything"],
        ["100", "everything"],
    ],
    ids=" ".join,
)
def test_every_launch_compiles(asked: list[str]) -> None:
    script = str(Path(__file__).parents[2] / "support" / "triton_launches.py")
    command = [sys.executable, "-W", "ignore", script, *asked]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout)
    assert set(told) >= KERNELS
    assert all(launches > 1 and shared <= SHARED for launches, shared in told.values()), told
