"""Kernels made of the rules of stages compile for GPUs of three generations, spill nothing, and keep to a budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the kernels are launched with torch's tensors")
pytest.importorskip("triton", reason="the kernels are Triton's: pip install triton (Linux only)")

# (structure, type of logits, with edits and masks): the most registers, the most instructions
BUDGET = {
    ("floor", "fp32", False): (128, 3700),
    ("several", "fp32", False): (128, 8000),
    ("typical", "bf16", True): (184, 6500),
    ("xtc", "fp32", True): (184, 6000),
    ("processed", "fp16", False): (184, 10200),
    ("categorical", "fp32", True): (184, 6400),
    ("states", "fp32", False): (184, 6800),
    ("llama.cpp", "bf16", True): (255, 25000),
}
SHORT = "floor", "fp32", False


def compiled(asked: list[tuple[str, str, bool, int]]) -> None:
    """In a process of its own, where nothing says that kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [sys.executable, "-W", "error", str(Path(__file__).with_name("staged_compiled.py")), json.dumps(asked)]
    done = subprocess.run(script, env=environment, check=True, capture_output=True, text=True)
    for kernel, found in zip(asked, json.loads(done.stdout), strict=True):
        registers, instructions = BUDGET[kernel[:3]]
        print(kernel, found)
        assert found["stack"] == 0, (kernel, found)
        assert 0 < found["registers"] <= registers, (kernel, found)
        assert 0 < found["instructions"] <= instructions, (kernel, found)


def test_a_kernel_made_of_rules_stays_within_the_budget() -> None:
    compiled([(*SHORT, 90)])


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("structure", BUDGET)
def test_all_of_some_structures_stay_within_the_budget(structure: tuple[str, str, bool], capability: int) -> None:
    compiled([(*structure, capability)])
