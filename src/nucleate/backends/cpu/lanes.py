"""Vectors of 16 lanes in LLVM's words: scores are loaded into them, raised to a power, and folded. Knows no kernel.

``b`` builds instructions, one after the other. LLVM splits vectors on machines that have narrower ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

GROUP = 256
"""Scores that a kernel takes at a time."""
LANES = 16

FLOAT, INT = ir.FloatType(), ir.IntType(32)
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
DOUBLES = ir.VectorType(ir.DoubleType(), LANES)
BITS = ir.IntType(LANES)
ROUND = 1.5 * 2**23
"""Added to a number below 2**22, it leaves the nearest integer in the low bits of the float."""

POLYNOMIAL = (
    *(1.0, 0.693147202855083, 0.2402264791362671, 0.055503324710991495, 0.00961843735779002),
    *(0.0013398874422620895, 0.00015353361899616592),
)
"""2 ** x on -0.5..0.5: least largest relative error, 2e-9, with f(0) = 1; 8e-8 in float32."""


def every(value: float, kind: ir.VectorType = FLOATS) -> ir.Constant:
    """A vector of one number that is known now."""
    return ir.Constant(kind, [value] * LANES)


def spread(b: Any, value: Any) -> Any:
    """A vector of one float32."""
    one = b.insert_element(ir.Constant(FLOATS, ir.Undefined), value, ir.Constant(INT, 0))
    return b.shuffle_vector(one, ir.Constant(FLOATS, ir.Undefined), every(0, INTS))


def place(context: Any, b: Any, kind: Any, scores: Any, start: Any) -> Any:
    """Where the scores from a place on are: in an array, behind an address, or in a ``simd.Scores``."""
    if isinstance(kind, types.Integer):
        return b.gep(b.inttoptr(scores, FLOAT.as_pointer()), [start])
    if isinstance(kind, types.Array):
        return b.gep(context.make_array(kind)(context, b, scores).data, [start])
    x, tail = (context.make_array(one)(context, b, b.extract_value(scores, i)) for i, one in enumerate(kind.types))
    whole = b.and_(cgutils.unpack_tuple(b, x.shape)[0], ir.Constant(start.type, -GROUP))
    within = b.icmp_signed("<", start, whole)
    return b.select(within, b.gep(x.data, [start]), b.gep(tail.data, [b.sub(start, whole)]))


def loaded(context: Any, b: Any, kind: Any, scores: Any, start: Any, count: int = GROUP) -> list[Any]:
    """The scores from a place on, as vectors."""
    first = b.bitcast(place(context, b, kind, scores, start), FLOATS.as_pointer())
    vectors = [b.load(b.gep(first, [ir.Constant(INT, i)])) for i in range(count // LANES)]
    for vector in vectors:
        vector.align = 4
    return vectors


def each(
    context: Any, b: Any, kind: Any, given: Sequence[Any], sums: Sequence[Any], step: Callable[..., Sequence[Any]]
) -> list[Any]:
    """Take 256 scores into some sums, four vectors at a time: ``step`` says how, from the sums and the vectors.

    A loop, because what is written out 16 times takes the compiler 16 times as long and runs no faster.
    """
    held = [cgutils.alloca_once_value(b, one) for one in sums]
    scores, start = given
    with cgutils.for_range_slice(b, start.type(0), start.type(GROUP), start.type(4 * LANES)) as (place_in, _):
        vectors = loaded(context, b, kind, scores, b.add(start, place_in), 4 * LANES)
        for at, one in zip(held, step([b.load(at) for at in held], vectors), strict=True):
            b.store(one, at)
    return [b.load(at) for at in held]


def fold(b: Any, vectors: Sequence[Any], join: Callable[[Any, Any], Any], kind: ir.VectorType = FLOATS) -> Any:
    """All lanes of some vectors joined into one number, in a fixed order."""
    left = list(vectors)
    while len(left) > 1:
        left = [join(left[i], left[i + 1]) for i in range(0, len(left), 2)]
    [vector], width = left, LANES
    while width > 1:
        width //= 2
        turned = ir.Constant(INTS, [(lane + width) % LANES for lane in range(LANES)])
        vector = join(vector, b.shuffle_vector(vector, ir.Constant(kind, ir.Undefined), turned))
    return b.extract_element(vector, ir.Constant(INT, 0))


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32"), [x, y, z])


def exp(b: Any, below: Any, high: Any, low: Any, least: Any) -> Any:
    """2 ** (below * (high + low)), with a relative error below 2e-7; ``below`` is taken as at least ``least``."""
    below = b.select(b.fcmp_ordered(">", below, least), below, least)
    rounded = fma(b, below, high, every(ROUND))
    whole = b.fsub(rounded, every(ROUND))
    part = fma(b, below, low, fma(b, below, high, b.fneg(whole)))
    power = every(POLYNOMIAL[-1])
    for factor in POLYNOMIAL[-2::-1]:
        power = fma(b, power, part, every(factor))
    exponent = b.shl(b.bitcast(rounded, INTS), every(23, INTS))
    return b.bitcast(b.add(b.bitcast(power, INTS), exponent), FLOATS)
