"""Weighted sums of vectors of 16 float32, written in LLVM IR: faster than the loops that Numba vectorises itself.

LLVM splits the vectors on processors with narrower ones.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nucleate.models.paged.kv_cache import VECTOR_SIZE

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FLOATS = ir.VectorType(_FLOAT, VECTOR_SIZE)
_UNDEFINED = ir.Constant(_FLOATS, ir.Undefined)
_ZERO = ir.Constant(_FLOATS, [0.0] * VECTOR_SIZE)


def _data(context: Any, b: Any, kind: Any, array: Any) -> Any:
    return context.make_array(kind)(context, b, array).data


def _load(b: Any, data: Any, index: Any) -> Any:
    vector = b.load(b.bitcast(b.gep(data, [index]), _FLOATS.as_pointer()))
    vector.align = 4
    return vector


def _store(b: Any, vector: Any, data: Any, index: Any) -> None:
    b.store(vector, b.bitcast(b.gep(data, [index]), _FLOATS.as_pointer())).align = 4


def _broadcast(b: Any, data: Any, index: Any) -> Any:
    one = b.insert_element(_UNDEFINED, b.load(b.gep(data, [index])), ir.Constant(_INT, 0))
    return b.shuffle_vector(one, _UNDEFINED, ir.Constant(ir.VectorType(_INT, VECTOR_SIZE), [0] * VECTOR_SIZE))


def _add(b: Any, total: Any, x: Any, y: Any) -> None:
    """total += x * y, as a fused multiply-add where the processor has one."""
    b.store(b.fadd(b.load(total), b.fmul(x, y, flags=("contract",)), flags=("contract",)), total)


@intrinsic  # type: ignore[untyped-decorator]
def weighted_sum(
    typing: Any, weights: Any, w: Any, count: Any, rows: Any, r: Any, step: Any, out: Any, o: Any, overwrite: Any
) -> Any:  # fmt: skip
    """out[o : o + 16] += the sum over i < count of weights[w + i] * rows[r + i * step :][:16].

    The arrays are contiguous and indexed as flat. overwrite: start from 0, not from the content of ``out``.
    """

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        kinds = signature.args
        weights, rows, out = (_data(context, b, kinds[i], given[i]) for i in (0, 3, 6))
        w, count, r, step, o, overwrite = (given[i] for i in (1, 2, 4, 5, 7, 8))
        totals = [cgutils.alloca_once(b, _FLOATS) for _ in range(4)]  # four independent sums hide the latency
        b.store(b.select(overwrite, _ZERO, _load(b, out, o)), totals[0])
        for total in totals[1:]:
            b.store(_ZERO, total)
        whole = b.and_(count, ir.Constant(count.type, -4))
        zero, one, four = (ir.Constant(count.type, i) for i in (0, 1, 4))
        with cgutils.for_range_slice(b, zero, whole, four, count.type) as (i, _):
            for j in range(4):
                at = b.add(i, ir.Constant(count.type, j))
                _add(b, totals[j], _broadcast(b, weights, b.add(w, at)), _load(b, rows, b.add(r, b.mul(at, step))))
        with cgutils.for_range_slice(b, whole, count, one, count.type) as (i, _):
            _add(b, totals[0], _broadcast(b, weights, b.add(w, i)), _load(b, rows, b.add(r, b.mul(i, step))))
        pairs = [b.fadd(b.load(totals[i]), b.load(totals[i + 1])) for i in (0, 2)]
        _store(b, b.fadd(*pairs), out, o)
        return context.get_dummy_value()

    arrays = weights, rows, out
    if not all(isinstance(kind, types.Array) and kind.dtype == types.float32 and kind.layout == "C" for kind in arrays):
        return None
    index = types.intp
    return types.void(weights, index, index, rows, index, index, out, index, types.boolean), make
