"""Compiles kernels of some structures for GPUs that need not be there, and tells what they take. Prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import compiled
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nucleate.backends.cuda.staged import fuse, launch, structure
from nucleate.stages import (
    AdaptiveP,
    Categorical,
    DynamicTemperature,
    Epsilon,
    Eta,
    Greedy,
    Gumbel,
    Logprobs,
    MinP,
    Mirostat,
    PLess,
    Temperature,
    TopA,
    TopH,
    TopK,
    TopNSigma,
    TopP,
    Typical,
    Xtc,
)

STRUCTURES: dict[str, tuple[Any, ...]] = {
    "floor": (Epsilon(0.1), Gumbel(1)),
    "several": (Epsilon(0.1), Eta(0.1), PLess(True), TopA(0.1), Gumbel(1)),
    "typical": (Typical(0.9), Gumbel(1)),
    "xtc": (Temperature(0.7), MinP(0.05), Xtc(0.5, 0.1), Gumbel(1)),
    "processed": (Temperature(0.7), TopK(40), TopP(0.9), Logprobs(1), Gumbel(1)),
    "categorical": (TopH(0.5), Categorical(1)),
    "states": (Mirostat(3.0), AdaptiveP(0.3), Greedy()),
    "llama.cpp": (
        *(TopNSigma(1.0), TopK(40), Typical(0.9), TopP(0.9), MinP(0.1), Xtc(0.5, 0.1), Temperature(0.7)),
        *(DynamicTemperature(0.5, 1.5), Mirostat(3.0), AdaptiveP(0.3), Gumbel(1)),
    ),
}
STRIDES = "row", "mask", "late", "words", "entries", "numbers", "spared", "saved", "marks"
TYPES = {
    **{f"{name}_stride": "i64" for name in STRIDES},
    **dict.fromkeys(("size", "stride", "spared_width", "width"), "i32"),
    **dict.fromkeys(("mask", "late", "words", "ids", "lefts"), "*i32"),
    **dict.fromkeys(
        ("entries", "numbers", "x", "base", "weights", "few_weights", "keys", "dense", "told", "saved", "marks"),
        "*fp64",
    ),
    **dict.fromkeys(("spared", "seeds", "steps", "tokens", "few"), "*i64"),
}
EDITS = "mask", "late", "words", "entries"


def measured(name: str, kind: str, everything: bool, capability: int) -> dict[str, Any]:
    """Registers, bytes of stack (spills) and instructions of a kernel; with edits and masks, or without."""
    staged = structure.staged_of(STRUCTURES[name])
    made = fuse.fused(staged.steps, staged.masked)
    there = {
        "base": made.based,
        **dict.fromkeys(("weights", "few", "few_weights"), made.weighs),
        "keys": made.own,
        "dense": made.dense,
        "told": made.taps,
    }
    there |= dict.fromkeys(("saved", "marks"), made.marks > 0) | dict.fromkeys(EDITS, everything)
    constants = {"stride": 1, "digest": made.digest, **{name: None for name, is_there in there.items() if not is_there}}
    names = made.kernel.arg_names
    types = {"logits": f"*{kind}", **TYPES, **dict.fromkeys(constants, "constexpr")}
    signature = {argument: types[argument] for argument in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (argument, of) in enumerate(signature.items())
        if of[0] == "*" or of == "i64" or argument in {"size", "width"}
    }
    constants = {argument: constants[argument] for argument in names if argument in constants}
    source = ASTSource(fn=made.kernel, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    return compiled.measured(triton.compile(source, target=target, options=launch.OPTIONS).asm["cubin"])


if __name__ == "__main__":
    print(json.dumps([measured(*asked) for asked in json.loads(sys.argv[1])]))
