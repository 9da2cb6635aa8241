"""LLVM vectors of 16 lanes: load scores, exponentiate, reduce.

``b`` is an LLVM IR builder. LLVM splits the vectors on machines with narrower ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from nucleate.jit.compiler import intrinsic

GROUP_SIZE = 256
"""Scores per group, the unit in which kernels read a row."""
LANES = 16

FLOAT, DOUBLE, INT, LONG = ir.FloatType(), ir.DoubleType(), ir.IntType(32), ir.IntType(64)
FLOATS, DOUBLES, INTS = (ir.VectorType(kind, LANES) for kind in (FLOAT, DOUBLE, INT))
LANE_MASK = ir.IntType(LANES)

POLYNOMIAL = (
    *(1.0, 0.693147202855083, 0.2402264791362671, 0.055503324710991495, 0.00961843735779002),
    *(0.0013398874422620895, 0.00015353361899616592),
)
"""Minimax polynomial of 2 ** x on -0.5..0.5 with f(0) = 1: relative error 2e-9, in float32 8e-8."""

DOUBLE_POLYNOMIAL = (
    *(1.0, 0.6931471805599453, 0.2402265069581299, 0.055504108664760424, 0.009618129159402558),
    *(0.0013333558179043112, 0.00015403455852453838, 1.525268684626772e-05, 1.3255224878668817e-06),
    1.0203121063391729e-07,
)
"""The same with a relative error of 4e-14."""

EXP2_TABLES = {"float": (POLYNOMIAL, INT, 23), "double": (DOUBLE_POLYNOMIAL, LONG, 52)}
"""Per element type: the polynomial of 2 ** x, the integer type of its width, and the number of mantissa bits."""


def vector_function(result: Any, *argument_types: Any) -> Callable[[Callable[..., Any]], Any]:
    """Declare a kernel function whose body emits LLVM instructions."""

    def declare(emit: Callable[..., Any]) -> Any:
        def codegen(typing: Any, *types: Any) -> Any:
            def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
                value = emit(b, *arguments)
                return context.get_dummy_value() if value is None else value

            return result(*argument_types), generate

        names = "typing", *(f"given_{i}" for i in range(len(argument_types)))
        codegen.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_ONLY) for name in names])  # type: ignore[attr-defined]
        return intrinsic(codegen)

    return declare


def constant(value: float, kind: ir.VectorType = FLOATS) -> ir.Constant:
    """A vector with a compile-time constant in all lanes."""
    return ir.Constant(kind, [value] * LANES)


def broadcast(b: Any, value: Any) -> Any:
    """A vector with a value in all lanes."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    return b.shuffle_vector(b.insert_element(undefined, value, ir.Constant(INT, 0)), undefined, constant(0, INTS))


def load(b: Any, address: Any, count: int = GROUP_SIZE) -> list[Any]:
    """Load scores at an address, as vectors."""
    first = b.inttoptr(address, FLOATS.as_pointer())
    scores = [b.load(b.gep(first, [ir.Constant(INT, i)])) for i in range(count // LANES)]
    for vector in scores:
        vector.align = 4
    return scores


def accumulate(
    b: Any, address: Any, sums: Sequence[Any], step: Callable[..., Sequence[Any]], vectors: int = 4
) -> list[Any]:
    """Accumulate 256 scores, some vectors at a time. ``step`` returns the new sums from the sums and the vectors.

    Emits a loop: unrolled code takes 16 times as long to compile and runs no faster.
    """
    totals = [cgutils.alloca_once_value(b, total) for total in sums]
    with cgutils.for_range_slice(b, LONG(0), LONG(4 * GROUP_SIZE), LONG(4 * vectors * LANES)) as (offset, _):
        scores = load(b, b.add(address, offset), vectors * LANES)
        for slot, total in zip(totals, step([b.load(slot) for slot in totals], scores), strict=True):
            b.store(total, slot)
    return [b.load(slot) for slot in totals]


def reduce(b: Any, inputs: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """Reduce all lanes of some vectors to one number, in a fixed order."""
    vectors = list(inputs)
    while len(vectors) > 1:
        vectors = [combine(vectors[i], vectors[i + 1]) for i in range(0, len(vectors), 2)]
    [vector], width = vectors, LANES
    while width > 1:
        width //= 2
        rotation = ir.Constant(INTS, [(lane + width) % LANES for lane in range(LANES)])
        vector = combine(vector, b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), rotation))
    return b.extract_element(vector, ir.Constant(INT, 0))


def add_at(b: Any, address: Any, index: int, value: Any) -> None:
    """Add to element ``index`` of the float64 at an address."""
    slot = b.gep(b.inttoptr(address, DOUBLE.as_pointer()), [ir.Constant(INT, index)])
    b.store(b.fadd(b.load(slot), value), slot)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    name = f"llvm.fma.v{LANES}f{32 if x.type == FLOATS else 64}"
    return b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(x.type, [x.type] * 3), name), [x, y, z])


def exp(b: Any, x: Any, high: Any, low: Any, least: Any) -> Any:
    """2 ** (x * (high + low)) of float32, x clamped at ``least``; relative error below 2e-7."""
    x = b.select(b.fcmp_ordered(">", x, least), x, least)
    rounded = fma(b, x, high, rounding_shift(x.type))
    whole = b.fsub(rounded, rounding_shift(x.type))
    return _exp2(b, rounded, fma(b, x, low, fma(b, x, high, b.fneg(whole))))


def exp2(b: Any, x: Any) -> Any:
    """2 ** x; in float64 with a relative error below 5e-14. x: in the range of normal numbers."""
    rounded = b.fadd(x, rounding_shift(x.type))
    return _exp2(b, rounded, b.fsub(x, b.fsub(rounded, rounding_shift(x.type))))


def rounding_shift(kind: ir.VectorType) -> ir.Constant:
    """Adding it leaves the nearest integer in the low bits."""
    return constant(1.5 * 2.0 ** EXP2_TABLES[str(kind.element)][2], kind)


def _exp2(b: Any, rounded: Any, fraction: Any) -> Any:
    """2 ** (whole + fraction), the whole number in the low bits of ``rounded``."""
    kind = fraction.type
    polynomial, bits_type, mantissa = EXP2_TABLES[str(kind.element)]
    bits_vector = ir.VectorType(bits_type, LANES)
    result = constant(polynomial[-1], kind)
    for factor in polynomial[-2::-1]:
        result = fma(b, result, fraction, constant(factor, kind))
    exponent = b.shl(b.bitcast(rounded, bits_vector), constant(mantissa, bits_vector))
    return b.bitcast(b.add(b.bitcast(result, bits_vector), exponent), kind)
