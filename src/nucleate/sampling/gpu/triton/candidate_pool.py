"""A pool of at most 2048 candidate tokens per row, and exact prefix selection in it.

The amount of a token is an integer: 1 for top-k, its fixed-point weight for top-p. So sums do not depend on the order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from nucleate.sampling.gpu.triton.device_memory import GROUP_SIZE, load_scores
from nucleate.sampling.gpu.triton.triton_numbers import INFINITY, from_ordered, to_ordered

TILE = tl.constexpr(2048)
"""The maximum number of tokens in a pool, and the number of tokens that a program reads at a time."""
TILE_GROUPS = tl.constexpr(8)
"""The number of groups in a tile."""
MAX_ID = tl.constexpr(0x7FFFFFFF)
"""Larger than every token id."""


class PoolScratch(NamedTuple):
    """Addresses of the scratch memory of rows."""

    groups: Any  #: int32 [width]: a list of groups, or a count per group
    x: Any  #: float32 [TILE]: the scores of the pool
    ids: Any  #: int32 [TILE]: its token ids


@jit
def row_scratch(scratch, row, width: tl.constexpr):
    """The addresses of one row."""
    return PoolScratch(scratch.groups + row * width, scratch.x + row * TILE, scratch.ids + row * TILE)


class KeptRange(NamedTuple):
    """The kept tokens: those above the threshold, and those equal to it with an id up to ``last_id``."""

    threshold: Any  #: float32
    last_id: Any  #: int32


class CandidatePool(NamedTuple):
    """Candidate tokens in registers, in any order, padded with scores of -inf."""

    x: Any
    ids: Any


class PrefixSelection(NamedTuple):
    """The shortest prefix in rank order whose amounts reach a target."""

    kept: Any
    before: Any  #: int64: the sum of amounts without the last token
    total: Any  #: int64: the sum of amounts


@jit
def is_kept(x, ids, kept):
    return (x > kept.threshold) | ((x == kept.threshold) & (ids <= kept.last_id))


@jit
def list_groups(selected_G, scratch, width: tl.constexpr):
    """List the selected groups in ascending order. Returns their number."""
    index_G = tl.cumsum(selected_G.to(tl.int32), 0) - 1
    tl.debug_barrier()  # other threads may still read the previous list
    tl.store(scratch.groups + index_G, tl.arange(0, width), mask=selected_G)
    tl.debug_barrier()
    return tl.sum(selected_G.to(tl.int32), 0)


@jit
def tile_ids(scratch, groups, i):
    """The token ids of tile i of the listed groups, padded with MAX_ID."""
    index = i * TILE + tl.arange(0, TILE)
    slot = index // GROUP_SIZE
    group = tl.load(scratch.groups + slot, mask=slot < groups, other=0)
    return tl.where(slot < groups, group * GROUP_SIZE + index % GROUP_SIZE, MAX_ID)


@jit
def append_to_pool(scratch, base, x, ids, selected):
    """Store the selected tokens of a tile in the pool, from index ``base`` on. Returns their number."""
    index = base + tl.cumsum(selected.to(tl.int32), 0) - 1
    fits = selected & (index < TILE)
    tl.store(scratch.x + index, x, mask=fits)
    tl.store(scratch.ids + index, ids, mask=fits)
    return tl.sum(selected.to(tl.int32), 0)


@jit
def fill_pool(source, scratch, groups, threshold):
    """Pool the tokens of the listed groups at or above a score. Returns their number; more than TILE: not all fit."""
    n, i = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while (i * TILE_GROUPS < groups) & (n <= TILE):
        ids = tile_ids(scratch, groups, i)
        x = load_scores(source, ids)
        n += append_to_pool(scratch, n, x, ids, x >= threshold)
        i += 1
    tl.debug_barrier()
    return n


@jit
def load_pool(scratch, n):
    index = tl.arange(0, TILE)
    x = tl.load(scratch.x + index, mask=index < n, other=-INFINITY)
    return CandidatePool(x, tl.load(scratch.ids + index, mask=index < n, other=MAX_ID))


@jit
def select_prefix(pool, amounts, target, top):
    """The shortest prefix whose amounts reach a positive target: bisects the scores, then the ids of equal scores.

    amounts: int64, 0 for tokens to ignore; their sum reaches the target. top: at least every score.
    """
    above = tl.full((), 0, tl.int64)
    low, high = to_ordered(tl.min(tl.where(amounts > 0, pool.x, top), 0)), to_ordered(top) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        amount = tl.sum(tl.where(pool.x >= from_ordered(middle), amounts, 0), 0)
        enough = amount >= target
        above = tl.where(enough, above, amount)
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    threshold = from_ordered(low)
    equal = (pool.x == threshold) & (amounts > 0)
    ties = tl.where(equal, amounts, 0)
    low_id = tl.min(tl.where(equal, pool.ids, MAX_ID), 0)
    last_id = tl.max(tl.where(equal, pool.ids, 0), 0)
    while low_id < last_id:
        middle_id = (low_id + last_id) >> 1
        enough = above + tl.sum(tl.where(pool.ids <= middle_id, ties, 0), 0) >= target
        low_id, last_id = tl.where(enough, low_id, middle_id + 1), tl.where(enough, middle_id, last_id)
    total = above + tl.sum(tl.where(pool.ids <= last_id, ties, 0), 0)
    return PrefixSelection(KeptRange(threshold, last_id), total - tl.max(ties, 0), total)
