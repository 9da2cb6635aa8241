"""Finds what would race on a GPU, from what kernels read and write in Triton's interpreter.

There a program is one thread, and one program runs after the other. On a GPU the threads of a program wait for each
other at barriers only, and programs of a launch never do. So what one writes, no other may read or write before the
next barrier, or in another program at all, unless both do it by an atomic operation, or both write the same.

Which thread has which place of a block is the compiler's business. Two operations are taken to be done by the same
threads only at the same place of blocks of one kind that have a place for each thread: what moves on in place is safe.
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
MOST = 20
"""Races that are told at once."""


class RaceError(AssertionError):
    """Two threads, or two programs, do in either order what matters in one."""


class Access(NamedTuple):
    """An operation of a program on A addresses."""

    kind: int
    addresses: NDArray[np.uint64]  #: [A]
    places: NDArray[np.int64]  #: [A], in its block
    bits: NDArray[np.uint64]  #: [A], of what it writes
    block: tuple[int, int]  #: places of the block, bytes of an element
    line: str  #: of the kernel


class Watch:
    """Looks on while kernels run in the interpreter. Only one per process."""

    def __init__(self) -> None:
        from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder

        self._found: dict[str, None] = {}
        self._threads = 0  # of a program
        self._fresh: list[Access] = []  # since the last barrier
        self._launch: list[Access] = []
        self._programs: list[int] = []  # whose these are
        _wrap(InterpreterBuilder, "create_masked_load", self._load)
        _wrap(InterpreterBuilder, "create_masked_store", self._store)
        _wrap(InterpreterBuilder, "create_atomic_rmw", self._change)
        _wrap(InterpreterBuilder, "create_barrier", self._barrier)
        _wrap(InterpreterBuilder, "set_grid_idx", self._barrier)  # another program begins
        _wrap(InterpretedFunction, "run", self._sized)
        _wrap(GridExecutor, "__call__", self._launched)

    def check(self) -> None:
        """Raise RaceError for the races that were found since the last check."""
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

    def _sized(self, run: Any, _: Any, *given: Any, **named: Any) -> Any:
        self._threads = 32 * named.get("num_warps", 4)
        return run(*given, **named)

    def _launched(self, launch: Any, _: Any, *given: Any, **named: Any) -> Any:
        from triton.runtime.interpreter import interpreter_builder

        self._fresh, self._launch, self._programs = [], [], []
        answer = launch(*given, **named)
        self._settle(interpreter_builder)
        self._tell("in two programs", clashes(self._launch, self._programs, None), self._launch)
        return answer

    def _note(self, kind: int, pointers: Any, mask: Any, values: NDArray[Any] | None = None) -> None:
        data = pointers.data
        places = np.flatnonzero(np.broadcast_to(mask.data, data.shape))
        bits = np.zeros(places.size, np.uint64)
        if values is not None:
            bits = values.reshape(-1)[places].view(f"u{values.itemsize}").astype(np.uint64)
        block = data.size, pointers.get_element_ty().primitive_bitwidth
        if places.size:
            self._fresh.append(Access(kind, data.reshape(-1)[places], places, bits, block, _line()))

    def _settle(self, builder: Any) -> None:
        """All threads of a program have come to a barrier, or to its end."""
        fresh, self._fresh = self._fresh, []
        self._tell("before a barrier", clashes(fresh, range(len(fresh)), self._threads), fresh)
        self._launch += fresh
        if fresh:
            self._programs += [hash(builder.grid_idx)] * len(fresh)

    def _tell(self, when: str, found: Iterator[set[int]], accesses: Sequence[Access]) -> None:
        for clash in found:
            if len(self._found) == MOST:
                return
            told = dict.fromkeys(f"{accesses[i].line} {DOES[accesses[i].kind]}" for i in sorted(clash))
            self._found[f"{when}: {'; '.join(told)}"] = None


def clashes(accesses: Sequence[Access], owners: Sequence[int], threads: int | None) -> Iterator[set[int]]:
    """Operations of several owners that race at an address, for each address.

    threads: of the one program that all of them are of, where those of one operation race, too; or None.
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
    odd = (counts > 1) & (high > READ) & (low < ATOMIC)  # neither read only, nor changed by atomic operations only
    odd &= ~((low == WRITE) & (high == WRITE) & alike(np.concatenate([access.bits for access in accesses])[order]))
    if threads is None:
        odd &= ~one_owner
    else:
        blocks = {block: i for i, block in enumerate({access.block for access in accesses})}
        full = bounds(np.array([access.block[0] >= threads for access in accesses])[which])[0]
        same_block = alike(np.array([blocks[access.block] for access in accesses])[which])
        same_place = alike(np.concatenate([access.places for access in accesses])[order])
        odd &= ~(full & same_block & same_place)
    for i in np.flatnonzero(odd):
        yield set(which[begins[i] : begins[i] + counts[i]].tolist())


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Have a method called by ``around(method, self, ...)``."""
    original = getattr(owner, name)

    def called(self: Any, *given: Any, **named: Any) -> Any:
        return around(original.__get__(self), self, *given, **named)

    setattr(owner, name, called)


def _line() -> str:
    """Where the kernel is, and the two functions that called it there."""
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
    """The name of a file of kernels; "" for those of Triton, and for this one."""
    import triton

    ours = not Path(path).is_relative_to(Path(triton.__file__).parent) and path != __file__
    return Path(path).name if ours else ""
