"""Operations on rows and on blocks of 256 scores, the latter written as explicit LLVM vectors of 16 lanes.

``b`` is an LLVM IR builder. LLVM splits the vectors on machines with narrower ones. The functions that kernels call
take the address of float32 scores. Rows are read in place if they are float32; other types are converted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from nucleate.jit.compiler import inline, jit

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


WORD_BITS = 64
MIN_EXPONENT = -1010.0
"""Lower exponents of 2 are clamped to this."""

_F, _D, _I = types.float32, types.float64, types.int64


@vector_function(_F, _I)
def maximum(b: Any, address: Any) -> Any:
    """The maximum of 256 scores; NaN if one of them is NaN."""

    def larger(first: Any, second: Any) -> Any:
        return b.select(b.fcmp_ordered(">", first, second), first, second)

    scores = load(b, address)
    maxima = list(scores[:4])  # four independent chains
    for i, score in enumerate(scores[4:]):
        maxima[i % 4] = larger(score, maxima[i % 4])
    nan_masks = [b.fcmp_unordered("uno", *scores[i : i + 2]) for i in range(0, len(scores), 2)]
    any_nan = b.bitcast(functools.reduce(b.or_, nan_masks), LANE_MASK)
    has_nan = b.icmp_unsigned("!=", any_nan, ir.Constant(LANE_MASK, 0))
    return b.select(has_nan, ir.Constant(FLOAT, float("nan")), reduce(b, maxima, larger))


@vector_function(_F, _I, _F, _F, _F, _F, _F)
def mass_above(b: Any, address: Any, *arguments: Any) -> Any:
    """The sum of exp((x - max) / t) over those of 256 scores that are at or above a threshold.

    arguments: max_score, high, low, least, threshold; high + low = log2(e) / t, least = -126 / high.
    """
    max_score, high, low, least, threshold = (broadcast(b, argument) for argument in arguments)

    def step(sums: Any, scores: Any) -> Any:
        weights = [exp(b, b.fsub(score, max_score), high, low, least) for score in scores]
        at_least = [b.fcmp_ordered(">=", score, threshold) for score in scores]
        parts = (b.select(*both, constant(0.0)) for both in zip(at_least, weights, strict=True))
        return [b.fadd(*both) for both in zip(sums, parts, strict=True)]

    return reduce(b, accumulate(b, address, [constant(0.0)] * 4, step), b.fadd)


@vector_function(types.void, _I, _F, _F, _F, _F, _I, _I)
def masses_above(b: Any, address: Any, *arguments: Any) -> None:
    """``mass_above`` for eight thresholds; adds the results to eight float64 sums.

    arguments: as for ``mass_above``, with the addresses of thresholds and sums in place of one threshold.
    """
    max_score, high, low, least = (broadcast(b, argument) for argument in arguments[:4])
    first = b.inttoptr(arguments[4], FLOAT.as_pointer())
    thresholds = [broadcast(b, b.load(b.gep(first, [ir.Constant(INT, i)]))) for i in range(8)]

    def step(sums: Any, scores: Any) -> Any:
        totals = list(sums)
        for score in scores:
            weight = exp(b, b.fsub(score, max_score), high, low, least)
            for i, threshold in enumerate(thresholds):
                part = b.select(b.fcmp_ordered(">=", score, threshold), weight, constant(0.0))
                totals[i] = b.fadd(totals[i], part)
        return totals

    for i, vector in enumerate(accumulate(b, address, [constant(0.0)] * 8, step)):
        add_at(b, arguments[5], i, b.fpext(reduce(b, [vector], b.fadd), DOUBLE))


@vector_function(types.void, _I, _F, _I)
def moments(b: Any, address: Any, top: Any, sums: Any) -> None:
    """Add the number of finite scores of 256, the sum of x - top, and the sum of its square, to three float64."""
    one, zero = constant(1.0, DOUBLES), constant(0.0, DOUBLES)
    top = broadcast(b, b.fpext(top, DOUBLE))

    def step(parts: Any, scores: Any) -> Any:
        for score in scores:
            is_finite = b.fcmp_ordered(">", score, constant(float("-inf")))
            relative = b.select(is_finite, b.fsub(b.fpext(score, DOUBLES), top), zero)
            terms = b.select(is_finite, one, zero), relative, b.fmul(relative, relative)
            parts = [b.fadd(*both) for both in zip(parts, terms, strict=True)]
        return parts

    for i, part in enumerate(accumulate(b, address, [zero] * 3, step)):
        add_at(b, sums, i, reduce(b, [part], b.fadd))


@vector_function(_D, _I, _D, _D, _I)
def mass_sums(b: Any, address: Any, top: Any, slope: Any, sums: Any) -> Any:
    """The float64 sum of e = 2 ** d over 256 scores, d = (x - top) * slope; adds those of e * d, e * e to ``sums``."""
    slope = broadcast(b, slope)
    return _mass_sums(b, address, top, lambda z: b.fmul(z, slope), sums)


@vector_function(_D, _I, _D, _D, _D, _D, _I)
def curved_mass_sums(b: Any, address: Any, top: Any, *arguments: Any) -> Any:
    """The same with d = c1 * z + c2 * z**2 + c3 * z**3, z = x - top. arguments: c1, c2, c3, and the address."""
    c1, c2, c3 = (broadcast(b, factor) for factor in arguments[:3])

    def curve(z: Any) -> Any:
        return b.fmul(fma(b, fma(b, c3, z, c2), z, c1), z)

    return _mass_sums(b, address, top, curve, arguments[3])


def _mass_sums(b: Any, address: Any, top: Any, curve: Callable[[Any], Any], sums: Any) -> Any:
    """Emit ``mass_sums`` with d = curve(x - top); a NaN counts as the lowest score."""
    top = broadcast(b, top)
    zero, least = (constant(number, DOUBLES) for number in (0.0, MIN_EXPONENT))

    def step(totals: Any, scores: Any) -> Any:
        masses, weighted, squares = (list(totals[i : i + 2]) for i in (0, 2, 4))
        for i, score in enumerate(scores):
            d = curve(b.fsub(b.fpext(score, DOUBLES), top))
            d = b.select(b.fcmp_ordered(">", d, least), d, least)
            e = exp2(b, d)
            masses[i] = b.fadd(masses[i], e)
            weighted[i], squares[i] = fma(b, e, d, weighted[i]), fma(b, e, e, squares[i])
        return masses + weighted + squares

    totals = accumulate(b, address, [zero] * 6, step, vectors=2)
    for i in (1, 2):
        add_at(b, sums, i - 1, reduce(b, totals[2 * i : 2 * i + 2], b.fadd))
    return reduce(b, totals[:2], b.fadd)


@vector_function(_D, _I, *(_D,) * 4, *(_I,) * 4)
def binned_mass_sums(b: Any, address: Any, *arguments: Any) -> Any:
    """``mass_sums`` of 256 scores; also stores e and e * d as float64, and -d * scale as uint16.

    arguments: top, slope, scale, the last bin; and the addresses of the bins, of both weights, and of the two sums.
    """
    top, slope, scale, last = (broadcast(b, one) for one in arguments[:4])
    zero, least = (constant(number, DOUBLES) for number in (0.0, MIN_EXPONENT))
    words = ir.VectorType(ir.IntType(16), LANES)
    kinds = words, DOUBLES, DOUBLES
    bins, weights, weighted = (
        b.inttoptr(one, kind.as_pointer()) for one, kind in zip(arguments[4:7], kinds, strict=True)
    )
    totals = [cgutils.alloca_once_value(b, zero) for _ in range(3)]
    with cgutils.for_range(b, LONG(GROUP_SIZE // LANES)) as loop:
        [score] = load(b, b.add(address, b.mul(loop.index, LONG(4 * LANES))), LANES)
        d = b.fmul(b.fsub(b.fpext(score, DOUBLES), top), slope)
        d = b.select(b.fcmp_ordered(">", d, least), d, least)
        e = exp2(b, d)
        e_d = b.fmul(e, d)
        far = b.fmul(d, scale)
        far = b.select(b.fcmp_ordered("<", far, last), far, last)
        for total, part in zip(totals, (e, e_d, b.fmul(e, e)), strict=True):
            b.store(b.fadd(b.load(total), part), total)
        for value, place, align in (
            (b.trunc(b.fptosi(far, INTS), words), bins, 2),
            (e, weights, 8),
            (e_d, weighted, 8),
        ):
            b.store(value, b.gep(place, [loop.index])).align = align
    for i in (1, 2):
        add_at(b, arguments[7], i - 1, reduce(b, [b.load(totals[i])], b.fadd))
    return reduce(b, [b.load(totals[0])], b.fadd)


@vector_function(_I, _I, _F)
def bitmask_at_least(b: Any, address: Any, threshold: Any) -> Any:
    """A bitmask of which of 64 scores are at or above a threshold."""
    threshold, bits = broadcast(b, threshold), LONG(0)
    for i, scores in enumerate(load(b, address, WORD_BITS)):
        found = b.zext(b.bitcast(b.fcmp_ordered(">=", scores, threshold), LANE_MASK), LONG)
        bits = b.or_(bits, b.shl(found, LONG(i * LANES)))
    return bits


@vector_function(_I, _I, types.uint16, types.uint16)
def bitmask_in_bins(b: Any, address: Any, first: Any, count: Any) -> Any:
    """A bitmask of which of 64 uint16 are in first..first + count - 1."""
    words, bits = ir.VectorType(ir.IntType(16), LANES), LONG(0)
    first, count = broadcast(b, first), broadcast(b, count)
    start = b.inttoptr(address, words.as_pointer())
    for i in range(WORD_BITS // LANES):
        bins = b.load(b.gep(start, [INT(i)]))
        bins.align = 2
        found = b.bitcast(b.icmp_unsigned("<", b.sub(bins, first), count), LANE_MASK)
        bits = b.or_(bits, b.shl(b.zext(found, LONG), LONG(i * LANES)))
    return bits


@vector_function(_I, _I)
def popcount(b: Any, bits: Any) -> Any:
    """The number of bits set."""
    return b.ctpop(bits)


@vector_function(_I, _I)
def trailing_zeros(b: Any, bits: Any) -> Any:
    """The index of the lowest bit set; 64 if there is none."""
    return b.cttz(bits, ir.Constant(ir.IntType(1), 0))


@vector_function(_F, types.uint16)
def float16_to_float32(b: Any, bits: Any) -> Any:
    """Convert the bits of a float16."""
    return b.fpext(b.bitcast(bits, ir.HalfType()), FLOAT)


FLOAT32, FLOAT16, BFLOAT16, FLOAT64 = range(4)
"""The data types of logits, in the order of ``inputs.LOGITS_DTYPES``."""


def pointer(dtype: Any) -> Any:
    """A kernel function that turns an address into a pointer to numbers of a type."""

    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(typing: Any, address: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            return b.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(dtype)(types.int64), emit

    return pointer


floats_at, doubles_at, longs_at = pointer(types.float32), pointer(types.float64), pointer(types.int64)
words_at, halves_at = pointer(types.int32), pointer(types.uint16)


@vector_function(types.int64, types.int64)
def fetch_add_one(b: Any, address: Any) -> Any:
    """Atomically add 1 to the integer at an address. Returns the value before."""
    return b.atomic_rmw("add", b.inttoptr(address, LONG.as_pointer()), LONG(1), "monotonic")


@vector_function(types.void, types.int64, types.int64, types.int64)
def copy_floats(b: Any, source: Any, target: Any, count: Any) -> None:
    """Copy ``count`` float32 between addresses."""
    source, target = (b.inttoptr(address, FLOAT.as_pointer()) for address in (source, target))
    cgutils.raw_memcpy(b, target, source, count, 4)


@jit
def pad_tail(x: Any, tail: Any) -> Any:
    """Copy the scores after the last full group to ``tail``, padded with -inf. Returns its address."""
    whole = x.size - x.size % GROUP_SIZE
    for i in range(GROUP_SIZE):
        tail[i] = x[whole + i] if whole + i < x.size else np.float32(-np.inf)
    return np.int64(tail.ctypes.data)


@inline
def group_address(x: Any, tail: Any, group: Any) -> Any:
    """The address of a group's scores: in x, or in the tail."""
    in_row, in_tail = np.int64(x.ctypes.data) + 4 * GROUP_SIZE * group, np.int64(tail.ctypes.data)
    return in_row if (group + 1) * GROUP_SIZE <= x.size else in_tail


@jit
def convert_row(address: Any, dtype: Any, x: Any) -> None:
    """Read ``x.size`` scores at an address into x, as float32."""
    halves, doubles = carray(halves_at(address), x.size), carray(doubles_at(address), x.size)
    if dtype == FLOAT32:
        copy_floats(address, np.int64(x.ctypes.data), x.size)
    elif dtype == FLOAT16:
        for i in range(x.size):
            x[i] = float16_to_float32(halves[i])
    elif dtype == BFLOAT16:
        for i in range(x.size):
            x[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16)).view(np.float32)
    else:
        for i in range(x.size):
            x[i] = np.float32(doubles[i])
