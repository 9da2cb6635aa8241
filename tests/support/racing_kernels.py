"""Kernels that race on a GPU, and their twins that do not: what ``races`` is held by. Run as a script."""

from __future__ import annotations

import torch
import triton.language as tl
import triton_interpreter as interpreted
from triton import jit

SIZE = 256


@jit
def step(numbers: tl.tensor, out: tl.tensor, waits: tl.constexpr) -> None:
    """All threads read a number, and one writes it: later ones may read what it wrote."""
    number = tl.load(numbers)
    if waits:
        tl.debug_barrier()
    tl.store(numbers, number + 1)
    ids = tl.arange(0, 256)
    tl.store(out + ids, (number + ids).to(tl.int32))


@jit
def shift(numbers: tl.tensor, out: tl.tensor, waits: tl.constexpr) -> None:
    """Numbers move on by one place."""
    ids = tl.arange(0, 128)
    had = tl.load(numbers + ids)
    if waits:
        tl.debug_barrier()
    tl.store(numbers + ids + 1, had)


@jit
def handed(numbers: tl.tensor, out: tl.tensor, waits: tl.constexpr) -> None:
    """What some threads write, others read."""
    ids = tl.arange(0, 128)
    tl.store(out + ids, ids)
    if waits:
        tl.debug_barrier()
    tl.store(numbers + ids, tl.load(out + 127 - ids))


@jit
def in_place(numbers: tl.tensor, out: tl.tensor, waits: tl.constexpr) -> None:
    """With fewer places than threads some of these read what others write."""
    ids = tl.arange(0, 128) if waits else tl.arange(0, 64)
    tl.store(numbers + ids, tl.load(numbers + ids) + 1)


@jit
def one_for_all(numbers: tl.tensor, out: tl.tensor, waits: tl.constexpr) -> None:
    """Many threads write at one place: the same, or not."""
    ids = tl.arange(0, 128)
    if waits:
        tl.store(numbers + ids // 2, ids * 0 + 7)
    else:
        tl.store(numbers + ids // 2, ids)


@jit
def programs(numbers: tl.tensor, out: tl.tensor, waits: tl.constexpr) -> None:
    """Each program writes what the next one reads, or keeps to itself."""
    here = tl.program_id(0)
    tl.debug_barrier()
    if waits:
        tl.store(out + here, tl.load(numbers + here).to(tl.int32))
    else:
        tl.store(numbers + here + 1, tl.load(numbers + here))


@jit
def added(numbers: tl.tensor, out: tl.tensor, waits: tl.constexpr) -> None:
    """All programs and threads count at one place, by atomic operations or beside them."""
    ids = tl.arange(0, 128)
    tl.atomic_add(numbers + ids * 0, ids.to(tl.int64))
    if not waits:
        tl.store(out + tl.program_id(0), tl.load(numbers).to(tl.int32))


@jit
def changed(numbers: tl.tensor, out: tl.tensor, waits: tl.constexpr) -> None:
    """What atomic operations have made is read by the same program."""
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
