"""Kernels with data races, and correct versions of them, to test ``race_detector``. Run as a script."""

from __future__ import annotations

import torch
import triton.language as tl
import triton_interpreter as interpreted
from triton import jit

SIZE = 256


@jit
def step(numbers: tl.tensor, out: tl.tensor, waits: tl.constexpr) -> None:
    """All threads read a number and then write it: later threads may read the new value."""
    number = tl.load(numbers)
    if waits:
        tl.debug_barrier()
    tl.store(numbers, number + 1)
    ids = tl.arange(0, 256)
    tl.store(out + ids, (number + ids).to(tl.int32))


@jit
def shift(numbers: tl.tensor, out: tl.tensor, waits: tl.constexpr) -> None:
    """Moves numbers by one position."""
    ids = tl.arange(0, 128)
    had = tl.load(numbers + ids)
    if waits:
        tl.debug_barrier()
    tl.store(numbers + ids + 1, had)


@jit
def handed(numbers: tl.tensor, out: tl.tensor, waits: tl.constexpr) -> None:
    """Threads read what other threads wrote."""
    ids = tl.arange(0, 128)
    tl.store(out + ids, ids)
    if waits:
        tl.debug_barrier()
    tl.store(numbers + ids, tl.load(out + 127 - ids))


@jit
def in_place(numbers: tl.tensor, out: tl.tensor, waits: tl.constexpr) -> None:
    """With fewer elements than threads, several threads update one element."""
    ids = tl.arange(0, 128) if waits else tl.arange(0, 64)
    tl.store(numbers + ids, tl.load(numbers + ids) + 1)


@jit
def one_for_all(numbers: tl.tensor, out: tl.tensor, waits: tl.constexpr) -> None:
    """Several threads write to one address, equal or different values."""
    ids = tl.arange(0, 128)
    if waits:
        tl.store(numbers + ids // 2, ids * 0 + 7)
    else:
        tl.store(numbers + ids // 2, ids)


@jit
def programs(numbers: tl.tensor, out: tl.tensor, waits: tl.constexpr) -> None:
    """Each program writes what the next one reads, or only its own elements."""
    here = tl.program_id(0)
    tl.debug_barrier()
    if waits:
        tl.store(out + here, tl.load(numbers + here).to(tl.int32))
    else:
        tl.store(numbers + here + 1, tl.load(numbers + here))


@jit
def added(numbers: tl.tensor, out: tl.tensor, waits: tl.constexpr) -> None:
    """All programs add to one address atomically; some also read it without an atomic operation."""
    ids = tl.arange(0, 128)
    tl.atomic_add(numbers + ids * 0, ids.to(tl.int64))
    if not waits:
        tl.store(out + tl.program_id(0), tl.load(numbers).to(tl.int32))


@jit
def changed(numbers: tl.tensor, out: tl.tensor, waits: tl.constexpr) -> None:
    """A program reads the result of its atomic operations."""
    ids = tl.arange(0, 128)
    tl.atomic_add(numbers + tl.program_id(0) + ids * 0, ids.to(tl.int64))
    if waits:
        tl.debug_barrier()
    tl.store(out + tl.program_id(0), tl.load(numbers + tl.program_id(0)).to(tl.int32))


def run(name: str, waits: bool, grid: int) -> None:
    numbers, out = torch.arange(SIZE), torch.zeros(SIZE, dtype=torch.int32)
    globals()[name][(grid,)](numbers, out, waits)


if __name__ == "__main__":
    interpreted.serve(globals())
