"""The numbers of a stage for kernels, as its rules know them: a template per number of them, see ``fuse``."""

from __future__ import annotations

from typing import Any

import triton.language as tl

Mine: Any = None


def none(at: tl.tensor) -> Any:
    return Mine(0.0)


def one(at: tl.tensor) -> Any:
    return Mine(tl.load(at))


def two(at: tl.tensor) -> Any:
    return Mine(tl.load(at), tl.load(at + 1))


def three(at: tl.tensor) -> Any:
    return Mine(tl.load(at), tl.load(at + 1), tl.load(at + 2))


def four(at: tl.tensor) -> Any:
    return Mine(tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))


def five(at: tl.tensor) -> Any:
    return Mine(tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4))


def six(at: tl.tensor) -> Any:
    return Mine(tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5))


BY_COUNT = none, one, two, three, four, five, six
