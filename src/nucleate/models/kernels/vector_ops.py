"""Sixteen float32 at a time, in explicit vectors of LLVM: sums that Numba's own loops do not reach. Knows no attention.

LLVM splits the vectors on machines that have narrower ones.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nucleate.models.paged.kv_pool import LANES

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FLOATS = ir.VectorType(_FLOAT, LANES)
_NONE = ir.Constant(_FLOATS, ir.Undefined)
_ZERO = ir.Constant(_FLOATS, [0.0] * LANES)


def _start(context: Any, b: Any, kind: Any, array: Any) -> Any:
    return context.make_array(kind)(context, b, array).data


def _load(b: Any, start: Any, place: Any) -> Any:
    vector = b.load(b.bitcast(b.gep(start, [place]), _FLOATS.as_pointer()))
    vector.align = 4
    return vector


def _store(b: Any, vector: Any, start: Any, place: Any) -> None:
    b.store(vector, b.bitcast(b.gep(start, [place]), _FLOATS.as_pointer())).align = 4


def _spread(b: Any, start: Any, place: Any) -> Any:
    one = b.insert_element(_NONE, b.load(b.gep(start, [place])), ir.Constant(_INT, 0))
    return b.shuffle_vector(one, _NONE, ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES))


def _add(b: Any, total: Any, x: Any, y: Any) -> None:
    """total += x * y, in one instruction where the machine has one."""
    b.store(b.fadd(b.load(total), b.fmul(x, y, flags=("contract",)), flags=("contract",)), total)


@intrinsic  # type: ignore[untyped-decorator]
def weighted(
    typing: Any, weights: Any, w: Any, count: Any, rows: Any, r: Any, step: Any, out: Any, o: Any, fresh: Any
) -> Any:  # fmt: skip
    """Sixteen sums: out[o:][:16] += the sum over i < count of weights[w + i] * rows[r + i * step:][:16].

    The arrays lie together in memory, and are taken as one long row. fresh: begin with 0, not with what is there.
    """

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        kinds = signature.args
        weights, rows, out = (_start(context, b, kinds[i], given[i]) for i in (0, 3, 6))
        w, count, r, step, o, fresh = (given[i] for i in (1, 2, 4, 5, 7, 8))
        totals = [cgutils.alloca_once(b, _FLOATS) for _ in range(4)]  # four, so that none waits for another
        b.store(b.select(fresh, _ZERO, _load(b, out, o)), totals[0])
        for total in totals[1:]:
            b.store(_ZERO, total)
        whole = b.and_(count, ir.Constant(count.type, -4))
        zero, one, four = (ir.Constant(count.type, i) for i in (0, 1, 4))
        with cgutils.for_range_slice(b, zero, whole, four, count.type) as (i, _):
            for j in range(4):
                at = b.add(i, ir.Constant(count.type, j))
                _add(b, totals[j], _spread(b, weights, b.add(w, at)), _load(b, rows, b.add(r, b.mul(at, step))))
        with cgutils.for_range_slice(b, whole, count, one, count.type) as (i, _):
            _add(b, totals[0], _spread(b, weights, b.add(w, i)), _load(b, rows, b.add(r, b.mul(i, step))))
        pairs = [b.fadd(b.load(totals[i]), b.load(totals[i + 1])) for i in (0, 2)]
        _store(b, b.fadd(*pairs), out, o)
        return context.get_dummy_value()

    arrays = weights, rows, out
    if not all(isinstance(kind, types.Array) and kind.dtype == types.float32 and kind.layout == "C" for kind in arrays):
        return None
    places = types.intp
    return types.void(weights, places, places, rows, places, places, out, places, types.boolean), make
