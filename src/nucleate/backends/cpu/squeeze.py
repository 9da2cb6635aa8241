"""Moving those of some numbers whose bits are set to the front, without a branch."""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils

from nucleate.backends.cpu.compile import intrinsic

EIGHT = 8
_BITS = ir.VectorType(ir.IntType(1), EIGHT)
_NAMES = {"float": "f32", "double": "f64", "i64": "i64"}

IN_REGISTERS = llvmlite.binding.llvm_version_info >= (19,)
"""Before, LLVM only knows how to do it on the way to memory, which some machines are slow at."""


def _write(context: Any, b: Any, kind: Any, target: Any, at: Any, numbers: Any, bits: Any) -> None:
    """Write those of eight numbers whose bits are set to a place in an array, and maybe anything behind them."""
    chosen, wide = b.bitcast(b.trunc(bits, ir.IntType(EIGHT)), _BITS), numbers.type
    name, place = f"v{EIGHT}{_NAMES[str(wide.element)]}", b.gep(context.make_array(kind)(context, b, target).data, [at])
    if IN_REGISTERS:
        function = ir.FunctionType(wide, [wide, _BITS, wide])
        compress = cgutils.get_or_insert_function(b.module, function, f"llvm.experimental.vector.compress.{name}")
        moved = b.call(compress, [numbers, chosen, ir.Constant(wide, ir.Undefined)])
        b.store(moved, b.bitcast(place, wide.as_pointer())).align = 4
    else:
        function = ir.FunctionType(ir.VoidType(), [wide, place.type, _BITS])
        compress = cgutils.get_or_insert_function(b.module, function, f"llvm.masked.compressstore.{name}")
        b.call(compress, [numbers, place, chosen])


@intrinsic
def squeeze(typing: Any, bits: Any, source: Any, start: Any, target: Any, at: Any) -> Any:
    """Write those of eight numbers from a place on whose bits are set to another place, and maybe anything behind them.

    All are read before one is written. Floats become as wide as the target's.
    """

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        origin = context.make_array(signature.args[1])(context, b, given[1]).data
        narrow = ir.VectorType(origin.type.pointee, EIGHT)
        numbers = b.load(b.bitcast(b.gep(origin, [given[2]]), narrow.as_pointer()))
        numbers.align = 4
        if isinstance(narrow.element, ir.FloatType):
            numbers = b.fpext(numbers, ir.VectorType(ir.DoubleType(), EIGHT))
        _write(context, b, signature.args[3], given[3], given[4], numbers, given[0])
        return context.get_dummy_value()

    return types.void(types.int32, source, types.intp, target, types.intp), make


@intrinsic
def how_many(typing: Any, bits: Any) -> Any:
    """How many bits are set."""
    return types.int32(types.int32), lambda _, b, __, given: b.ctpop(given[0])
