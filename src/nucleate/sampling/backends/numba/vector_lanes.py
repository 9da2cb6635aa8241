"""LLVM vectors of 16 lanes: load scores, exponentiate, reduce.

``b`` builds instructions, one after the other. LLVM splits vectors on machines that have narrower ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from nucleate.jit.compiler import intrinsic
from nucleate.sampling.backends.numba.float64 import POLYNOMIAL as DOUBLE_POLYNOMIAL

GROUP = 256
"""Scores that a kernel takes at a time."""
LANES = 16

FLOAT, DOUBLE, INT, LONG = ir.FloatType(), ir.DoubleType(), ir.IntType(32), ir.IntType(64)
FLOATS, DOUBLES, INTS = (ir.VectorType(kind, LANES) for kind in (FLOAT, DOUBLE, INT))
BITS = ir.IntType(LANES)

POLYNOMIAL = (
    *(1.0, 0.693147202855083, 0.2402264791362671, 0.055503324710991495, 0.00961843735779002),
    *(0.0013398874422620895, 0.00015353361899616592),
)
"""2 ** x on -0.5..0.5: least largest relative error, 2e-9, with f(0) = 1; 8e-8 in float32."""

POWERS = {
    "float": (POLYNOMIAL, INT, 23),
    "double": (tuple(factor * math.log(2.0) ** n for n, factor in enumerate(DOUBLE_POLYNOMIAL)), LONG, 52),
}
"""Of each kind of number: 2 ** x as a polynomial, its bits as an integer, and where in these the exponent begins."""


def vectors(result: Any, *takes: Any) -> Callable[[Callable[..., Any]], Any]:
    """Declare a function of numbers of these types that says its own instructions."""

    def declare(make: Callable[..., Any]) -> Any:
        def typed(typing: Any, *given: Any) -> Any:
            def made(context: Any, b: Any, signature: Any, numbers: Any) -> Any:
                said = make(b, *numbers)
                return context.get_dummy_value() if said is None else said

            return result(*takes), made

        names = "typing", *(f"given_{i}" for i in range(len(takes)))
        typed.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_ONLY) for name in names])  # type: ignore[attr-defined]
        return intrinsic(typed)

    return declare


def every(value: float, kind: ir.VectorType = FLOATS) -> ir.Constant:
    """A vector of one number that is known now."""
    return ir.Constant(kind, [value] * LANES)


def spread(b: Any, value: Any) -> Any:
    """A vector of one number."""
    none = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    return b.shuffle_vector(b.insert_element(none, value, ir.Constant(INT, 0)), none, every(0, INTS))


def loaded(b: Any, address: Any, count: int = GROUP) -> list[Any]:
    """The scores at an address, as vectors."""
    first = b.inttoptr(address, FLOATS.as_pointer())
    scores = [b.load(b.gep(first, [ir.Constant(INT, i)])) for i in range(count // LANES)]
    for vector in scores:
        vector.align = 4
    return scores


def each(b: Any, address: Any, sums: Sequence[Any], step: Callable[..., Sequence[Any]]) -> list[Any]:
    """Take 256 scores into some sums, four vectors at a time: ``step`` says how, from the sums and the vectors.

    A loop, because what is written out 16 times takes the compiler 16 times as long and runs no faster.
    """
    held = [cgutils.alloca_once_value(b, one) for one in sums]
    with cgutils.for_range_slice(b, LONG(0), LONG(4 * GROUP), LONG(16 * LANES)) as (place, _):
        scores = loaded(b, b.add(address, place), 4 * LANES)
        for at, one in zip(held, step([b.load(at) for at in held], scores), strict=True):
            b.store(one, at)
    return [b.load(at) for at in held]


def fold(b: Any, parts: Sequence[Any], join: Callable[[Any, Any], Any]) -> Any:
    """All lanes of some vectors joined into one number, in a fixed order."""
    left = list(parts)
    while len(left) > 1:
        left = [join(left[i], left[i + 1]) for i in range(0, len(left), 2)]
    [vector], width = left, LANES
    while width > 1:
        width //= 2
        turned = ir.Constant(INTS, [(lane + width) % LANES for lane in range(LANES)])
        vector = join(vector, b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), turned))
    return b.extract_element(vector, ir.Constant(INT, 0))


def add_to(b: Any, address: Any, place: int, number: Any) -> None:
    """Add to one of some float64 at an address."""
    at = b.gep(b.inttoptr(address, DOUBLE.as_pointer()), [ir.Constant(INT, place)])
    b.store(b.fadd(b.load(at), number), at)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    name = f"llvm.fma.v{LANES}f{32 if x.type == FLOATS else 64}"
    return b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(x.type, [x.type] * 3), name), [x, y, z])


def exp(b: Any, below: Any, high: Any, low: Any, least: Any) -> Any:
    """2 ** (below * (high + low)), with a relative error below 2e-7, of float64 5e-16, and as much as rounding
    ``below`` makes; it is taken as at least ``least``."""
    kind = below.type
    polynomial, image, mantissa = POWERS[str(kind.element)]
    images, magic = ir.VectorType(image, LANES), every(1.5 * 2.0**mantissa, kind)  # leaves an integer in low bits
    below = b.select(b.fcmp_ordered(">", below, least), below, least)
    rounded = fma(b, below, high, magic)
    whole = b.fsub(rounded, magic)
    part = fma(b, below, low, fma(b, below, high, b.fneg(whole)))
    power = every(polynomial[-1], kind)
    for factor in polynomial[-2::-1]:
        power = fma(b, power, part, every(factor, kind))
    exponent = b.shl(b.bitcast(rounded, images), every(mantissa, images))
    return b.bitcast(b.add(b.bitcast(power, images), exponent), kind)
