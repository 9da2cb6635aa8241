"""Compiles the kernels of edits for GPUs that need not be there, and tells what they take. Prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from compiled import measured
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nucleate.backends.cuda.special import edits, edits_launch, look, push

KERNELS = {each.fn.__name__: each for each in (edits.fill, look.look, push.go_on, push.match)}
TYPES = {
    **dict.fromkeys(("slots", "tokens", "lines", "state"), "*i64"),
    **dict.fromkeys(("ring", "lengths", "lists", "found", "words"), "*i32"),
    **dict.fromkeys(("ring_size", "room", "size", "list_size", "length"), "i32"),
    "words_row": "i64",
    "entries": "*fp64",
    "block": "constexpr",
}
WITHOUT = ("found", "lists", "lengths")
"""What is not there where no row looks back."""


def compiled(name: str, everything: bool, capability: int) -> dict[str, Any]:
    """Registers, bytes of stack (spills) and instructions of a kernel."""
    kernel = KERNELS[name]
    block = edits_launch.FAR if name in ("look", "match") else edits_launch.BLOCK
    constants = {"block": block} | ({} if everything else dict.fromkeys(WITHOUT))
    constants = {argument: constants[argument] for argument in kernel.arg_names if argument in constants}
    types = TYPES | dict.fromkeys(constants, "constexpr")
    signature = {argument: types[argument] for argument in kernel.arg_names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, of in enumerate(signature.values()) if of[0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    return measured(triton.compile(source, target=target, options=edits_launch.OPTIONS).asm["cubin"])


if __name__ == "__main__":
    print(json.dumps([compiled(*asked) for asked in json.loads(sys.argv[1])]))
