"""The scores of tokens of a row as kernels read them: edited and masked; what is odd stays odd. Knows no cut.

``edits.Edits`` are looked up by their ``index.Index``: a bit per token says whether there is an entry, and how many
bits are before it where the entry is, so that most tokens cost a bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from nucleate.backends.cuda.special.compile import jit
from nucleate.backends.cuda.special.floats import INFINITY


class Source(NamedTuple):
    """Where a row comes from: addresses, of its beginning where it is its own."""

    logits: Any
    stride: Any  #: of its tokens
    size: Any
    mask: Any  #: int32, or None
    words: Any  #: int32, two per 32 tokens, see ``index.Index``; or None, as the next
    entries: Any  #: float64, three per entry


@jit
def source_of(
    row: tl.tensor, logits: tl.tensor, row_stride: tl.tensor, stride: tl.tensor, size: tl.tensor, mask: tl.tensor,
    mask_stride: tl.tensor, words: tl.tensor, words_stride: tl.tensor, entries: tl.tensor, entries_stride: tl.tensor,
) -> Any:  # fmt: skip
    """The source of a row, from the first arguments of every kernel that reads logits."""
    if mask is not None:
        mask += row * mask_stride
    if words is not None:
        words += row * words_stride
        entries += row * entries_stride
    return Source(logits + row * row_stride, stride, size, mask, words, entries)


@jit
def raw(source: tl.tensor, ids: tl.tensor) -> Any:
    """Logits as given, as float32; behind the row -inf."""
    at = ids.to(tl.int64) * source.stride
    return tl.load(source.logits + at, mask=ids < source.size, other=-INFINITY).to(tl.float32)


@jit
def ready(source: tl.tensor, ids: tl.tensor, x: tl.tensor) -> Any:
    """The scores of the pipeline from raw ones. One that is NaN or +inf, also in between, is NaN or +inf."""
    if source.words is not None:
        x = edited(source, ids, x)
    if source.mask is not None:
        words = tl.load(source.mask + ids // 32, mask=ids < source.size, other=-1)
        x = tl.where((words >> (ids % 32)) & 1 == 0, x - INFINITY, x)
    return x


@jit
def scores(source: tl.tensor, ids: tl.tensor) -> Any:
    return ready(source, ids, raw(source, ids))


@jit
def ones(words: tl.tensor) -> Any:
    """How many bits are set. words: uint32."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    words = words + (words >> 8)
    return ((words + (words >> 16)) & 0x3F).to(tl.int32)


@jit
def edited(source: tl.tensor, ids: tl.tensor, x: tl.tensor) -> Any:
    """Scores after the edits; -inf stays, and so does NaN."""
    at = source.words + ids // 32 * 2
    words = tl.load(at, mask=ids < source.size, other=0).to(tl.uint32, bitcast=True)
    place = (ids % 32).to(tl.uint32)
    has = ((words >> place) & 1) != 0
    if tl.max(has.to(tl.int32), axis=None) > 0:
        has = has & (x > -INFINITY)
        lower = words & ((place * 0 + 1 << place) - 1)
        entry = source.entries + 3 * (tl.load(at + 1, mask=has, other=0) + ones(lower))
        y = x.to(tl.float64) + tl.load(entry, mask=has, other=0.0)
        y = y.to(tl.float32).to(tl.float64)
        scale = tl.load(entry + 1, mask=has, other=1.0)
        y = tl.where(y > 0.0, y / scale, y * scale) - tl.load(entry + 2, mask=has, other=0.0)
        x = tl.where(has, y.to(tl.float32), x)
    return x
