"""The scores of tokens of a row as kernels read them: what is odd stays odd, what the mask forbids is -inf."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from nucleate.backends.cuda.special.floats import INFINITY


class Source(NamedTuple):
    """Where rows come from: addresses and strides."""

    logits: Any  #: float32, float16 or bfloat16
    row_stride: Any
    stride: Any  #: of its tokens
    size: Any  #: V
    mask: Any  #: int32, lowest bit first; or None
    mask_stride: Any


@jit
def source_of(source, row):
    """The same with the addresses of a row."""
    mask = source.mask
    if mask is not None:
        mask += row * source.mask_stride
    logits = source.logits + row * source.row_stride
    return Source(logits, source.row_stride, source.stride, source.size, mask, source.mask_stride)


@jit
def raw(source, ids):
    """Logits as given, as float32; behind the row -inf."""
    at = ids.to(tl.int64) * source.stride
    return tl.load(source.logits + at, mask=ids < source.size, other=-INFINITY).to(tl.float32)


@jit
def ready(source, ids, x):
    """The scores of the pipeline from raw ones. One that is NaN or +inf is NaN or +inf, allowed or not."""
    if source.mask is not None:
        words = tl.load(source.mask + ids // 32, mask=ids < source.size, other=-1)
        x = tl.where((words >> (ids % 32)) & 1 == 0, x - INFINITY, x)
    return x


@jit
def scores(source, ids):
    return ready(source, ids, raw(source, ids))
