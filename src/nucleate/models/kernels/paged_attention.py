"""Attention of few new tokens over keys and values in blocks, in float32 on CPU, compiled by Numba. Knows no model."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import MODELS
from nucleate.jit.thread_pool import cores
from nucleate.jit.thread_pool import pool as workers
from nucleate.models.paged.batch_layout import BatchLayout
from nucleate.models.paged.kv_pool import AttentionRule
from nucleate.models.paged.tree_mask import MOST

Floats = NDArray[np.float32]
LARGE = 2 << 20
"""Bytes of keys and values from which a second thread is worth its start, 50 microseconds."""


def decode(
    queries_THD: Floats, keys_TKD: Floats, values_TKE: Floats, pool: tuple[Floats, Floats], packing: BatchLayout,
    rule: AttentionRule, out_THE: Floats, threads: int | None = None,
) -> None:  # fmt: skip
    """Store the keys and values of the short parts of a packing, and attend from their tokens.

    Arrays hold all T tokens of the packing, in any strides; the rows of other parts of ``out_THE`` are left alone.
    threads: at most so many, if there is enough to do; None for as many as ``cores`` says.
    """
    kv_heads, size = pool[0].shape[1], pool[0].shape[2] + pool[1].shape[3]
    count = min(cores(), threads or cores()) if packing.reach * kv_heads * size * 4 >= LARGE else 1
    cuts = packing.cuts(kv_heads, rule.window, 2 * count if count > 1 else 1)
    where = packing.short, packing.blocks, packing.followed_T2
    rest: tuple[Any, ...] = (queries_THD, keys_TKD, values_TKE, *pool, *where, *rule, out_THE)
    run, room = MODELS.attend, partial(_room, queries_THD.shape[1] // kv_heads, pool, packing.longest)
    given = [(workers().submit(run, begin, end, *room(), *rest), begin, end) for begin, end in pairwise(cuts[1:])]
    try:
        run(0, cuts[1], *room(), *rest)
        for job, begin, end in reversed(given):
            if job.cancel():  # nobody has begun with it: the other threads may have been given no time
                run(begin, end, *room(), *rest)
    finally:
        for job, _, _ in given:
            if not job.cancel():
                job.result()


def _room(group: int, pool: tuple[Floats, Floats], longest: int) -> tuple[Any, ...]:
    """What one thread works in: the tokens of a tree, and queries, scores and sums of heads that share keys."""
    _, _, size_d, size = pool[0].shape
    wide = (size_d, (longest // size + 1) * size, pool[1].shape[3])
    query_GD, scores_GL, mixed_GE = (np.empty((group, count), np.float32) for count in wide)
    return np.empty(MOST, np.int64), query_GD, scores_GL, mixed_GE
