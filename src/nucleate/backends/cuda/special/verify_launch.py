"""Rows with drafts through the kernels of verification: room to work in, one call per step. Knows no kernel's inside.

A call asks for no memory and waits for nothing, and steps move on on the device by as many tokens as are said, so that
it can be part of a CUDA graph that is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from nucleate.backends.cuda.special.launch import FLOATS
from nucleate.backends.cuda.special.verify import PART, accept, locate, residual, weigh
from nucleate.backends.cuda.special.verify_coupled import follow
from nucleate.backends.cuda.verify import Verified, check

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""With products fused into sums, something would be left of p over a q that is equal to it."""
OPTIONS_OF_FOLLOW = {"num_warps": 1, "enable_fp_fusion": False}


@dataclass
class Workspace:
    """Room for up to ``rows`` rows of ``size`` chances and drafts of up to ``count`` tokens, and what calls leave."""

    rows: int
    count: int
    size: int
    device: Any = "cuda"
    found: Verified = field(init=False)

    def __post_init__(self) -> None:
        self.parts = -(-self.size // PART.value)
        self.sums = self._new(torch.float64, 2 * self.count + 1, self.parts)
        self.totals, self.scales = self._new(torch.float64, 2, self.parts), self._new(torch.float64, 2)
        self.todo_R = self._new(torch.int32)
        kept_R, last_R = self._new(torch.int64), self._new(torch.int64)
        tokens_RN = self._new(torch.int64, self.count + 1)
        self.found = Verified(kept_R, tokens_RN, last_R, self._new(torch.bool), self._new(torch.bool))

    def _new(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros((self.rows, *shape), dtype=dtype, device=self.device)


def coupled(
    drafted_RK: torch.Tensor,
    drawn_RN: torch.Tensor,
    steps_R: torch.Tensor,
    work: Workspace,
    stops_RS: torch.Tensor | None = None,
    place_steps_RN: torch.Tensor | None = None,
) -> Verified:
    """``backends.cuda.verify.coupled`` in one launch; what it gives is part of ``work``.

    All are int64. steps_R: of the first places; they move on by as many tokens as are said. place_steps_RN: the steps
    of all places of the next round, which are written here for the draws of that round. Raises ValueError for shapes
    or types that are others.
    """
    rows, count = drafted_RK.shape
    _room(work, rows, count)
    _check("drafted tokens", drafted_RK, torch.int64, rows, count)
    _check("drawn tokens", drawn_RN, torch.int64, rows, count + 1)
    _check("steps", steps_R, torch.int64, rows)
    if place_steps_RN is not None:
        _check("steps of places", place_steps_RN, torch.int64, rows, count + 1)
    kept, tokens, last, ended, failed = work.found
    stops, stop_count = _stops(stops_RS, rows)
    follow[(rows,)](
        drafted_RK, drawn_RN, count, stops, stop_count, steps_R, place_steps_RN, kept, tokens, tokens.stride(0), last,
        ended, failed, width=_width(count + 1), stops_width=_width(stop_count), **OPTIONS_OF_FOLLOW,
    )  # fmt: skip
    return _found(work, rows, count)


def rejection(
    p_RNV: torch.Tensor,
    drafted_RK: torch.Tensor,
    q_RKV: torch.Tensor | None,
    seeds_R: torch.Tensor,
    steps_R: torch.Tensor,
    work: Workspace,
    stops_RS: torch.Tensor | None = None,
    sums_RM: torch.Tensor | None = None,
) -> Verified:
    """``backends.cuda.verify.rejection`` with the coins of the round of ``steps_R``; what it gives is part of ``work``.

    p_RNV, q_RKV: float32, float16 or bfloat16, with any strides. drafted_RK, seeds_R, steps_R, stops_RS: int64; the
    steps move on by as many tokens as are said. sums_RM: float64 [R, N + K], or [R, N] without q: what the laws of p
    and then of q weigh, NaN where they are none, if that is known; then only the place at which a draft ends is read.
    Raises ValueError for shapes or types that are others.
    """
    check(p_RNV, drafted_RK, q_RKV)
    (rows, count), size = drafted_RK.shape, p_RNV.shape[2]
    _room(work, rows, count)
    if size != work.size:
        raise ValueError(f"there are {size} chances in a law, but room for {work.size}")
    for name, laws in (("target's", p_RNV), ("drafted", q_RKV)):
        if laws is not None and laws.dtype not in FLOATS:
            raise ValueError(f"the {name} laws must be float32, float16 or bfloat16, got {laws.dtype}")
    places = count + 1 + (0 if q_RKV is None else count)
    _check("drafted tokens", drafted_RK, torch.int64, rows, count)
    _check("seeds", seeds_R, torch.int64, rows)
    _check("steps", steps_R, torch.int64, rows)
    ending = _stops(stops_RS, rows)
    source = *_source(p_RNV), *_source(q_RKV), size, count
    if sums_RM is None:
        sums, parts = work.sums, work.parts
        weigh[(parts, places, rows)](*source, sums, parts, **OPTIONS)
    else:
        _check("sums", sums_RM, torch.float64, rows, places)
        sums, parts = sums_RM, 1
    kept, tokens, last, ended, failed = work.found
    widths = {"parts_width": _width(parts), "stops_width": _width(ending[1])}
    accept[(rows,)](
        *source, sums, parts, drafted_RK, *ending, seeds_R, steps_R, work.todo_R, work.scales, kept, tokens,
        tokens.stride(0), last, ended, failed, width=_width(count + 1), **widths, **OPTIONS,
    )  # fmt: skip
    place = *source, drafted_RK, work.todo_R, work.scales, kept, work.totals, work.parts
    residual[(work.parts, rows)](*place, **OPTIONS)
    widths["parts_width"] = _width(work.parts)
    locate[(rows,)](
        *place, *ending, seeds_R, steps_R, tokens, tokens.stride(0), last, ended, failed, **widths, **OPTIONS
    )
    return _found(work, rows, count)


def _found(work: Workspace, rows: int, count: int) -> Verified:
    kept, tokens, last, ended, failed = work.found
    return Verified(kept[:rows], tokens[:rows, : count + 1], last[:rows], ended[:rows], failed[:rows])


def _stops(stops_RS: torch.Tensor | None, rows: int) -> tuple[torch.Tensor | None, int]:
    """Stop ids as kernels take them, and how many."""
    if stops_RS is None or not stops_RS.shape[-1]:
        return None, 0
    _check("stop ids", stops_RS, torch.int64, rows, stops_RS.shape[-1])
    return stops_RS, stops_RS.shape[-1]


def _room(work: Workspace, rows: int, count: int) -> None:
    """Raise ValueError for more rows or tokens than there is room for."""
    if not 0 < rows <= work.rows or count > work.count:
        there_is = f"there is room for up to {work.rows} rows with {work.count}"
        raise ValueError(f"there are {rows} rows with {count} drafted tokens, but {there_is}")


def _source(laws: torch.Tensor | None) -> tuple[Any, ...]:
    return (None, 0, 0, 0) if laws is None else (laws, *laws.stride())


def _width(count: int) -> int:
    """The power of two that has room for so many, and for two."""
    return max(2, 1 << (count - 1).bit_length()) if count else 2


def _check(name: str, column: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Raise ValueError for a column of another type or shape, or one that does not lie in one piece."""
    if column.dtype != dtype or column.shape != shape or not column.is_contiguous():
        raise ValueError(f"{name} must be {dtype} {list(shape)} in one piece, got {column.dtype} {list(column.shape)}")
