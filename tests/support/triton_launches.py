"""Launches the Triton kernels as ``Sampler`` does, without a GPU: a launch only compiles.

So Triton derives types and constants (such as 1) from the real arguments. Each token is 0. Prints the number of
launches and the maximum shared memory of each kernel as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import random_histories as histories
import sampler_scenarios as scenarios
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nucleate.sampling.gpu import torch_device

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


def everything() -> None:
    """Scenarios with many kinds of rows: minutes of compilation."""
    scenarios.play("triton", 1, 12, size=1)
    scenarios.play("triton", 0, 12, size=77)
    histories.written("triton", 0, 6, 50)


if __name__ == "__main__":
    disable_gpu(int(sys.argv[1]))
    histories.written("triton", 2, 3, 1000, ring=1)
    scenarios.looped("triton", 1, 60, 1, 1, 2)
    if "everything" in sys.argv:
        everything()
    print(json.dumps(LAUNCHES))
