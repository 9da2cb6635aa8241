"""The Triton kernels compile for GPUs of three generations, without register spills and within a budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the kernels are launched with torch's tensors")
pytest.importorskip("triton", reason="the kernels are Triton's: pip install triton (Linux only)")

CAPABILITIES = (80, 90, 100)
TOKENS = 16
"""Tokens per thread of the first kernel."""

# (kernel, type of logits, with all optional inputs): the most registers, the most instructions
BUDGET = {  # for Triton 3.6 and 3.9
    ("stats", "fp32", False): (80, 45 * TOKENS),
    ("stats", "bf16", False): (80, 45 * TOKENS),
    ("stats", "bf16", True): (144, 80 * TOKENS),
    ("finish", "fp32", False): (184, 9500),
    ("finish", "bf16", True): (248, 11500),
    ("tally", "bf16", True): (160, 2200),
    ("collect", "bf16", True): (160, 2600),
    ("resume", "fp32", False): (248, 9800),
    ("resume", "bf16", True): (255, 11800),
}
QUICK = [kernel for kernel in BUDGET if kernel[0] != "resume" and kernel != ("finish", "bf16", True)]


def compiled(capability: int, kernels: list[tuple[str, str, bool]]) -> None:
    """Compile in a separate process without Triton's interpreter mode."""
    request = json.dumps([(*kernel, capability) for kernel in kernels])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [sys.executable, "-W", "error", str(Path(__file__).parents[2] / "support" / "triton_compile.py"), request]
    done = subprocess.run(script, env=environment, check=True, capture_output=True, text=True)
    for kernel, found in zip(kernels, json.loads(done.stdout), strict=True):
        registers, instructions = BUDGET[kernel]
        print(capability, kernel, found)
        assert found["stack"] == 0, (capability, kernel, found)
        assert 0 < found["registers"] <= registers, (capability, kernel, found)
        assert 0 < found["instructions"] <= instructions, (capability, kernel, found)


@pytest.mark.slow
def test_the_kernels_of_every_step_stay_within_the_budget() -> None:
    compiled(90, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_kernels_stay_within_the_budget(capability: int) -> None:
    compiled(capability, list(BUDGET))
