"""The weights of 256 scores at a time, in explicit vectors of float64."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from nucleate.backends.cpu.compile import intrinsic
from nucleate.backends.cpu.doubles import LN_2, LN_2_REST, LOG2_E, ROUND
from nucleate.backends.cpu.simd import GROUP

LANES = 16
_INT, _DOUBLE = ir.IntType(32), ir.DoubleType()
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_DOUBLES, _LONGS = ir.VectorType(_DOUBLE, LANES), ir.VectorType(ir.IntType(64), LANES)

POLYNOMIAL = (
    *(1.0, 1.0000000000000069, 0.5000000000000006, 0.16666666666553953, 0.04166666666657277, 0.008333333385825085),
    *(0.0013888888932619635, 0.00019841170070971308, 2.4801504180837137e-05, 2.7640263790318923e-06),
    2.7626426376580335e-07,
)
"""exp on -log(2)/2..log(2)/2, interpolated where it errs least: 3e-16."""

LEAST = -700.0
"""What is further below the top weighs as much as this: nothing, beside the top."""


def _all(value: float, kind: ir.VectorType = _DOUBLES) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def _spread(b: Any, value: Any) -> Any:
    none = ir.Constant(_DOUBLES, ir.Undefined)
    one = b.insert_element(none, value, ir.Constant(_INT, 0))
    return b.shuffle_vector(one, none, ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES))


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    kind = ir.FunctionType(_DOUBLES, [_DOUBLES] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f64"), [x, y, z])


def _exp(b: Any, x: Any) -> Any:
    """Of numbers from LEAST to 0."""
    rounded = _fma(b, x, _all(LOG2_E), _all(ROUND))
    whole = b.fsub(rounded, _all(ROUND))
    part = _fma(b, whole, _all(-LN_2_REST), _fma(b, whole, _all(-LN_2), x))
    power = _all(POLYNOMIAL[-1])
    for factor in POLYNOMIAL[-2::-1]:
        power = _fma(b, power, part, _all(factor))
    return b.bitcast(b.add(b.bitcast(power, _LONGS), b.shl(b.bitcast(rounded, _LONGS), _all(52, _LONGS))), _DOUBLES)


def _sum(b: Any, vectors: list[Any]) -> Any:
    while len(vectors) > 1:
        vectors = [b.fadd(vectors[i], vectors[i + 1]) for i in range(0, len(vectors), 2)]
    [vector], width = vectors, LANES
    while width > 1:
        width //= 2
        turned = ir.Constant(ir.VectorType(_INT, LANES), [(lane + width) % LANES for lane in range(LANES)])
        vector = b.fadd(vector, b.shuffle_vector(vector, ir.Constant(_DOUBLES, ir.Undefined), turned))
    return b.extract_element(vector, ir.Constant(_INT, 0))


@intrinsic
def weigh(typing: Any, x: Any, start: Any, top: Any, slope: Any, row: Any) -> Any:
    """The sum of e = exp(d) over 256 scores, d = (x - top) * slope; adds that of e * d to the second number of a row.

    x: float32. row: float64.
    """

    def make(context: Any, b: Any, signature: Any, given: Any) -> Any:
        top, slope = (_spread(b, value) for value in given[2:4])
        masses, shares = [_all(0.0)] * 4, [_all(0.0)] * 4  # four at a time, so that none waits for another
        source = context.make_array(signature.args[0])(context, b, given[0]).data
        source = b.bitcast(b.gep(source, [given[1]]), _FLOATS.as_pointer())
        for i in range(GROUP // LANES):
            score = b.load(b.gep(source, [ir.Constant(_INT, i)]))
            score.align = 4
            below = b.fmul(b.fsub(b.fpext(score, _DOUBLES), top), slope)
            below = b.select(b.fcmp_ordered(">", below, _all(LEAST)), below, _all(LEAST))
            e = _exp(b, below)
            masses[i % 4], shares[i % 4] = b.fadd(masses[i % 4], e), _fma(b, e, below, shares[i % 4])
        share = b.gep(context.make_array(signature.args[4])(context, b, given[4]).data, [ir.Constant(_INT, 1)])
        b.store(b.fadd(b.load(share), _sum(b, shares)), share)
        return _sum(b, masses)

    return types.float64(x, types.intp, types.float64, types.float64, row), make
