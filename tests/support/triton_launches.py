"""Launches the Triton kernels as ``Sampler`` does, for a GPU that is not there: a launch ends when it is compiled.

So types, and which numbers become constants (1 does), are what Triton makes of the arguments themselves. Nothing is
computed: each token is 0. Prints, as JSON, the launches of each kernel and the most shared memory that it takes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import random_histories as pasts
import sampler_scenarios as played
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nucleate.sampling.backends.torch import torch_device

LAUNCHES: dict[str, list[int]] = {}
"""How often each kernel was launched, and the most shared memory that it takes."""
MADE: dict[str, Any] = {}
"""What was compiled last of each kernel; of these only, if there are any:"""
WANTED: set[str] = set()


def without_gpu(capability: int) -> None:
    """Have launches compile only, and arrays begin with zeros, as no kernel writes to them."""
    asked = {"target": GPUTarget("cuda", capability, 32), "device": 0, "stream": 0}
    answers = {f"get_current_{name}": lambda *_, answer=answer: answer for name, answer in asked.items()}
    driver.set_active(SimpleNamespace(**answers))
    torch_device.triton_interpreted, torch.empty = lambda: True, torch.zeros
    run = JITFunction.run

    def compiled(self: Any, *given: Any, **named: Any) -> None:
        if WANTED and self.fn.__name__ not in WANTED:
            return
        made = MADE[self.fn.__name__] = run(self, *given, **{**named, "warmup": True})
        told = LAUNCHES.setdefault(self.fn.__name__, [0, 0])
        told[:] = told[0] + 1, max(told[1], made.metadata.shared)

    JITFunction.run = compiled


def kernels_of(call: Callable[[], None], wanted: set[str]) -> dict[str, Any]:
    """Some of the kernels that a call launches, compiled."""
    MADE.clear()
    WANTED.update(wanted)
    call()
    WANTED.clear()
    return {**MADE}


def everything() -> None:
    """Stories with rows of many kinds: minutes of compiling."""
    played.play("triton", 1, 12, size=1)
    played.play("triton", 0, 12, size=77)
    pasts.written("triton", 0, 6, 50)


if __name__ == "__main__":
    without_gpu(int(sys.argv[1]))
    pasts.written("triton", 2, 3, 1000, ring=1)
    played.looped("triton", 1, 60, 1, 1, 2)
    if "everything" in sys.argv:
        everything()
    print(json.dumps(LAUNCHES))
