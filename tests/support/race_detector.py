"""Detects data races of GPU kernels from their reads and writes in Triton's interpreter.

The interpreter runs a program as one thread, one program after the other. On a GPU, the threads of a program
synchronize only at barriers, and programs of a launch never do. So no other thread may access an address that one
writes before the next barrier, and no other program may at all, except by atomic operations or with equal values.

The compiler assigns the elements of a block to threads. Two operations are considered to run on the same thread only
for the same element of blocks of equal size and type with at least one element per thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

READ, WRITE, ATOMIC = 0, 1, 2
DOES = ("reads", "writes", "changes")
MAX_REPORTED = 20
"""Maximum number of reported races."""


class RaceError(AssertionError):
    """A data race between threads or programs."""


class Access(NamedTuple):
    """An operation of a program on A addresses."""

    kind: int
    addresses: NDArray[np.uint64]  #: [A]
    elements: NDArray[np.int64]  #: [A], indices in the block
    bits: NDArray[np.uint64]  #: [A], of the written values
    block: tuple[int, int]  #: elements of the block, bits of an element
    line: str  #: source line of the kernel


class Watch:
    """Records the memory accesses of kernels in the interpreter. Only one per process."""

    def __init__(self) -> None:
        from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder

        self._found: dict[str, None] = {}
        self._threads = 0  # per program
        self._fresh: list[Access] = []  # since the last barrier
        self._launch: list[Access] = []
        self._programs: list[int] = []  # the program of each access
        _wrap(InterpreterBuilder, "create_masked_load", self._load)
        _wrap(InterpreterBuilder, "create_masked_store", self._store)
        _wrap(InterpreterBuilder, "create_atomic_rmw", self._change)
        _wrap(InterpreterBuilder, "create_barrier", self._barrier)
        _wrap(InterpreterBuilder, "set_grid_idx", self._barrier)  # the next program starts
        _wrap(InterpretedFunction, "run", self._sized)
        _wrap(GridExecutor, "__call__", self._launched)

    def check(self) -> None:
        """Raise RaceError for the races found since the last check."""
        found, self._found = list(self._found), {}
        if found:
            raise RaceError("\n".join(found))

    def _load(self, load: Any, _: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        self._note(READ, pointers, mask)
        return load(pointers, mask, *rest)

    def _store(self, store: Any, _: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._note(WRITE, pointers, mask, value.data)
        return store(pointers, value, mask, *rest)

    def _change(self, change: Any, _: Any, how: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._note(ATOMIC, pointers, mask)
        return change(how, pointers, value, mask, *rest)

    def _barrier(self, barrier: Any, builder: Any, *where: Any) -> Any:
        self._settle(builder)
        return barrier(*where)

    def _sized(self, run: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
        self._threads = 32 * kwargs.get("num_warps", 4)
        return run(*args, **kwargs)

    def _launched(self, launch: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
        from triton.runtime.interpreter import interpreter_builder

        self._fresh, self._launch, self._programs = [], [], []
        result = launch(*args, **kwargs)
        self._settle(interpreter_builder)
        self._report("in two programs", clashes(self._launch, self._programs, None), self._launch)
        return result

    def _note(self, kind: int, pointers: Any, mask: Any, values: NDArray[Any] | None = None) -> None:
        data = pointers.data
        elements = np.flatnonzero(np.broadcast_to(mask.data, data.shape))
        bits = np.zeros(elements.size, np.uint64)
        if values is not None:
            bits = values.reshape(-1)[elements].view(f"u{values.itemsize}").astype(np.uint64)
        block = data.size, pointers.get_element_ty().primitive_bitwidth
        if elements.size:
            self._fresh.append(Access(kind, data.reshape(-1)[elements], elements, bits, block, _line()))

    def _settle(self, builder: Any) -> None:
        """All threads of a program have reached a barrier or the end."""
        fresh, self._fresh = self._fresh, []
        self._report("before a barrier", clashes(fresh, range(len(fresh)), self._threads), fresh)
        self._launch += fresh
        if fresh:
            self._programs += [hash(builder.grid_idx)] * len(fresh)

    def _report(self, when: str, found: Iterator[set[int]], accesses: Sequence[Access]) -> None:
        for clash in found:
            if len(self._found) == MAX_REPORTED:
                return
            descriptions = dict.fromkeys(f"{accesses[i].line} {DOES[accesses[i].kind]}" for i in sorted(clash))
            self._found[f"{when}: {'; '.join(descriptions)}"] = None


def clashes(accesses: Sequence[Access], owners: Sequence[int], threads: int | None) -> Iterator[set[int]]:
    """For each address with a race, the indices of the accesses involved.

    threads: the number of threads if all accesses are of one program, where threads of one operation race too; or None.
    """
    if all(access.kind == READ for access in accesses) or (threads is None and len(set(owners)) < 2):
        return
    addresses = np.concatenate([access.addresses for access in accesses])
    order = np.argsort(addresses, kind="stable")
    begins = np.flatnonzero(np.append(True, np.diff(addresses[order]) != 0))
    which = np.repeat(np.arange(len(accesses)), [len(access.addresses) for access in accesses])[order]

    def bounds(values: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """The lowest and the highest at each address."""
        return np.minimum.reduceat(values, begins), np.maximum.reduceat(values, begins)

    def alike(values: Any) -> NDArray[np.bool_]:
        low, high = bounds(values)
        return low == high

    kind = np.array([access.kind for access in accesses])[which]
    low, high = bounds(kind)
    one_owner = alike(np.array(owners)[which])
    counts = np.diff(np.append(begins, len(order)))
    races = (counts > 1) & (high > READ) & (low < ATOMIC)  # neither only reads nor only atomic operations
    races &= ~((low == WRITE) & (high == WRITE) & alike(np.concatenate([access.bits for access in accesses])[order]))
    if threads is None:
        races &= ~one_owner
    else:
        blocks = {block: i for i, block in enumerate({access.block for access in accesses})}
        full = bounds(np.array([access.block[0] >= threads for access in accesses])[which])[0]
        same_block = alike(np.array([blocks[access.block] for access in accesses])[which])
        same_element = alike(np.concatenate([access.elements for access in accesses])[order])
        races &= ~(full & same_block & same_element)
    for i in np.flatnonzero(races):
        yield set(which[begins[i] : begins[i] + counts[i]].tolist())


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by ``around(method, self, ...)``."""
    original = getattr(owner, name)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original.__get__(self), self, *args, **kwargs)

    setattr(owner, name, called)


def _line() -> str:
    """The kernel's current line, and up to two callers."""
    frame, lines = sys._getframe(1), []
    while frame is not None and len(lines) < 3:
        name = _kernel_file(frame.f_code.co_filename)
        if name:
            lines.append(f"{name}:{frame.f_lineno}")
        elif lines:
            break
        frame = frame.f_back
    return " < ".join(lines)


@cache
def _kernel_file(path: str) -> str:
    """The file name; "" for files of Triton and for this one."""
    import triton

    ours = not Path(path).is_relative_to(Path(triton.__file__).parent) and path != __file__
    return Path(path).name if ours else ""
