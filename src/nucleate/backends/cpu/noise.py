"""The noise of ``core.noise`` for kernels, one number or eight at a time: the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from nucleate.backends.cpu.compile import inline, intrinsic, jit
from nucleate.core.noise import GROUP, TOKEN

LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LARGEST = 1.0 - 2.0**-53


@inline
def uniform(seed: Any, step: Any, stream: Any, index: Any) -> Any:
    """``core.noise.uniform`` of one index. seed, step: uint64."""
    c0, c1, c2, c3 = np.uint64(index), step & LOW, step >> HALF, np.uint64(stream)
    k0, k1 = seed & LOW, seed >> HALF
    for _ in range(10):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> HALF) ^ c1 ^ k0, p1 & LOW, (p0 >> HALF) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return min((float((c0 << HALF) | c1) + 0.5) * 2.0**-64, LARGEST)


@intrinsic
def eight(typing: Any, out: Any, place: Any, seed: Any, step: Any, stream: Any, first: Any) -> Any:
    """Write those of eight consecutive indices, from ``first`` on, to places of a float64 array."""

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        words, doubles = ir.VectorType(ir.IntType(64), 8), ir.VectorType(ir.DoubleType(), 8)

        def all_of(value: Any, kind: Any = words) -> Any:
            if not isinstance(value, ir.Value):
                return ir.Constant(kind, [value] * 8)
            one = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
            return b.shuffle_vector(
                one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8)
            )

        def low(value: Any) -> Any:
            return b.and_(value, all_of(int(LOW)))

        def high(value: Any) -> Any:
            return b.lshr(value, all_of(32))

        _, _, seed, step, stream, first = given
        c0, c1 = b.add(all_of(first), ir.Constant(words, list(range(8)))), low(all_of(step))
        c2, c3, k0, k1 = high(all_of(step)), all_of(stream), low(all_of(seed)), high(all_of(seed))
        for _ in range(10):
            p0, p1 = b.mul(low(c0), all_of(int(MULTIPLIERS[0]))), b.mul(low(c2), all_of(int(MULTIPLIERS[1])))
            c0, c1, c2, c3 = (
                *(b.xor(b.xor(high(p1), c1), k0), low(p1)),
                *(b.xor(b.xor(high(p0), c3), k1), low(p0)),
            )
            k0, k1 = low(b.add(k0, all_of(int(WEYL[0])))), low(b.add(k1, all_of(int(WEYL[1]))))
        u = b.uitofp(b.or_(b.shl(c0, all_of(32)), c1), doubles)
        u = b.fmul(b.fadd(u, all_of(0.5, doubles)), all_of(2.0**-64, doubles))
        u = b.select(b.fcmp_ordered("<", u, all_of(LARGEST, doubles)), u, all_of(LARGEST, doubles))
        data = context.make_array(signature.args[0])(context, b, given[0]).data
        b.store(u, b.bitcast(b.gep(data, [given[1]]), doubles.as_pointer())).align = 8
        return context.get_dummy_value()

    return types.void(out, types.intp, types.uint64, types.uint64, types.int64, types.int64), make


@jit
def uniforms(out: Any, count: Any, seed: Any, step: Any, stream: Any, first: Any) -> None:
    """``uniform`` of consecutive indices. Writes up to seven more."""
    for place in range(0, count, 8):
        eight(out, place, seed, step, stream, first + place)


__all__ = ["GROUP", "TOKEN", "uniform", "uniforms"]
