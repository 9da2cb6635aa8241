"""Compiles the Triton kernels for GPUs that need not be there, and tells what they take. Prints JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nucleate.backends.cuda.special import launch
from nucleate.backends.cuda.special.finish import finish, resume
from nucleate.backends.cuda.special.select import collect, tally
from nucleate.backends.cuda.special.stats import stats

KERNELS = {
    "stats": (stats, launch.OPTIONS_OF_STATS),
    "finish": (finish, launch.OPTIONS_OF_FINISH),
    "resume": (resume, launch.OPTIONS_OF_FINISH),
    "tally": (tally, launch.OPTIONS_OF_SELECT),
    "collect": (collect, launch.OPTIONS_OF_SELECT),
}
TYPES = {
    **dict.fromkeys(("row_stride", "mask_stride", "words_stride", "entries_stride"), "i64"),
    **dict.fromkeys(("size", "tiles"), "i32"),
    **dict.fromkeys(("mask", "words", "groups", "some_ids", "states", "lasts", "ranks", "flags", "counts"), "*i32"),
    **dict.fromkeys(("numbers", "entries", "moments", "views", "logprobs"), "*fp64"),
    **dict.fromkeys(("seeds", "steps", "tokens", "amounts"), "*i64"),
    **dict.fromkeys(("tops", "masses", "raw_tops", "raw_masses", "some", "cuts"), "*fp32"),
}
WITHOUT = ("mask", "words", "entries", "raw_tops", "raw_masses", "logprobs", "ranks")


def compiled(name: str, kind: str, everything: bool, capability: int) -> dict[str, Any]:
    """Registers, bytes of stack (spills) and instructions of a kernel, as for rows of 128256 scores."""
    kernel, options = KERNELS[name]
    constants = {"stride": 1, "width": 512, "tile_groups": 1 if everything else 2}
    constants |= {} if everything else dict.fromkeys(WITHOUT)
    types = {"logits": f"*{kind}", **TYPES, **dict.fromkeys(constants, "constexpr")}
    signature = {argument: types[argument] for argument in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (argument, of) in enumerate(signature.items())
        if of[0] == "*" or argument == "size" or of == "i64"
    }
    constants = {argument: constants[argument] for argument in kernel.arg_names if argument in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return measured(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["cubin"])


def measured(cubin: bytes) -> dict[str, Any]:
    """What the disassembler says of machine code."""
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
    print(json.dumps([compiled(*asked) for asked in json.loads(sys.argv[1])]))
