"""Runs rows of logits through the fused kernel, on one or several threads: edit programs, row table, kernel calls.

The kernel finds all per-row arrays through one address, that of the control block of a ``RowSelection``. An
``EditProgram`` has the Shifts of a row as logit edits: a list of commands, four integers each. Commands hold addresses;
the program keeps the buffers alive that they point to.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import FUSED
from nucleate.jit.thread_pool import cores, per_thread, pool
from nucleate.sampling.history import HistoryView
from nucleate.sampling.incremental_history import IncrementalHistory
from nucleate.sampling.inputs import RowId, masked_tokens, packed_ids
from nucleate.sampling.maths import SLACK
from nucleate.sampling.noise import GROUP, GROUP_SIZE, TOKEN, gumbel, uniform
from nucleate.sampling.pipeline import (
    FREQUENCY,
    REPETITION,
    CountPenalties,
    FusedParams,
    FusedPipeline,
    LogitEdit,
    has_constant_listing,
)
from nucleate.sampling.stage import Shift

SECONDS_PER_THREAD = 250e-6
"""Minimum work per thread: with less, waking a thread costs more than it saves while the model's threads are busy."""

ENTRY = np.dtype(
    [
        ("params", np.float64, (len(FusedParams._fields),)),
        *(("commands", np.int64), ("command_count", np.int64), ("seed", np.uint64), ("step", np.uint64)),
    ]
)
"""A row as the kernel reads it. commands, command_count: ``EditProgram.commands_at``, or 0, 0 without edits."""

POSITIONS, SLOTS, ENTRIES, TOKENS = range(4)
"""The addresses in a control block."""

NOT_DRAWN = -1
"""The token of a row that the kernel leaves to another path: invalid logits, or a decision too close to a tie."""

ROW_ARRAYS, GROUP_ARRAYS, EXTRA = 7, 11, GROUP_SIZE + 8
"""A workspace has ROW_ARRAYS arrays of one number per token, and GROUP_ARRAYS of one per group and EXTRA more."""


def workspace_size(size: Any) -> Any:
    """The number of float64 in a ``workspace.Workspace`` for rows of ``size`` scores."""
    groups = -(-size // GROUP_SIZE)
    return ROW_ARRAYS * GROUP_SIZE * groups + GROUP_ARRAYS * (groups + EXTRA)


class RowSelection(NamedTuple):
    """Some rows of a ``RowTable``, in the order of a call. Adding or removing a row of the table invalidates it."""

    control: int  #: address of the control block
    tokens: NDArray[np.int64]  #: output of the last call
    buffers: Any  #: keeps the memory alive that the control block points to


class RowTable:
    """The rows of the fused kernel in one structured array. Growing it moves it; ``slots`` maps rows to entries."""

    def __init__(self, capacity: int = 4) -> None:
        self.rows: list[RowId] = []
        self.slots: dict[RowId, int] = {}
        self.entries = np.zeros(capacity, ENTRY)
        self._address = self.entries.ctypes.data

    def add(self, row: RowId, params: Sequence[float], commands_at: tuple[int, int], seed: int, step: int) -> None:
        """Append an entry."""
        slot = len(self.rows)
        if slot == len(self.entries):
            self.entries = np.concatenate((self.entries, np.zeros_like(self.entries)))
            self._address = self.entries.ctypes.data
        self.entries[slot] = tuple(params), *commands_at, seed, step
        self.slots[row] = slot
        self.rows.append(row)

    def remove(self, row: RowId) -> None:
        """Remove the entry of a row, if it has one; the last one takes its slot."""
        if row not in self.slots:
            return
        slot, last = self.slots.pop(row), self.rows.pop()
        if last != row:
            self.entries[slot] = self.entries[len(self.rows)]
            self.rows[slot], self.slots[last] = last, slot

    def advance(self, row: RowId, steps: int = 1) -> None:
        """Change the step of a row that has an entry by ``steps``: tokens sampled elsewhere, or taken back."""
        if row in self.slots:
            step = self.entries["step"]
            step[self.slots[row]] = int(step[self.slots[row]]) + steps

    def set_noise(self, row: RowId, seed: int, step: int) -> None:
        """Set the seed and step of a row's next draw."""
        entry = self.entries[self.slots[row]]
        entry["seed"], entry["step"] = seed, step

    def select(self, rows: Sequence[RowId], positions: Sequence[int] | None = None) -> RowSelection:
        """The control block for some rows. positions: of their logits in the batch; default: 0, 1, 2, ..."""
        count = len(rows)
        block = np.empty(3 * count + TOKENS + 1, np.int64)  # one array: ``ctypes.data`` takes a microsecond
        block[:count] = range(count) if positions is None else positions
        block[count : 2 * count] = [self.slots[row] for row in rows]
        address = block.ctypes.data
        block[3 * count :] = address, address + 8 * count, self._address, address + 16 * count
        return RowSelection(address + 24 * count, block[2 * count : 3 * count], (block, self.entries))


class FusedRunner:
    """Samples rows of ``size`` scores. Owns one workspace per thread, so calls allocate nothing of the row's size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._draw_rows = FUSED.draw_rows
        self._workspaces: list[NDArray[np.float64]] = []
        self._workspace_addresses: list[int] = []
        self._add_workspace()
        self._next_row = np.zeros(1, np.int64)  #: atomic counter that the threads of a call share
        self._next_row_address = self._next_row.ctypes.data
        self._seconds_per_row = size * 1e-10  #: measured in recent calls

    def _add_workspace(self) -> None:
        self._workspaces.append(np.empty(workspace_size(self.size)))
        self._workspace_addresses.append(self._workspaces[-1].ctypes.data)

    def draw(
        self, layout: tuple[Any, int, int, int], count: int, control: int, mask_layout: tuple[int, int] = (0, 0)
    ) -> None:
        """Sample ``count`` rows into ``RowSelection.tokens``; rows that the kernel cannot sample get NOT_DRAWN.

        layout: of the logits, see ``inputs.LogitsLayout``. control: ``RowSelection.control``. mask_layout: address of
        the first row's bitmask, and stride in bytes; 0, 0 for none.
        """
        self._next_row[0] = 0
        addresses = self._workspace_addresses
        if count == 1:
            self._draw_rows(*layout, self.size, *mask_layout, 1, self._next_row_address, control, addresses[0])
            return
        arguments: tuple[Any, ...] = (*layout, self.size, *mask_layout, count, self._next_row_address, control)
        jobs: list[Future[int]] = []
        if count * self._seconds_per_row > 2 * SECONDS_PER_THREAD and cores() > 1:
            threads = min(int(count * self._seconds_per_row / SECONDS_PER_THREAD), count, cores())
            while len(addresses) < threads:
                self._add_workspace()
            jobs = [pool().submit(self._draw_rows, *(*arguments, address)) for address in addresses[1:threads]]
        try:
            start = perf_counter()
            drawn = self._draw_rows(*arguments, addresses[0])
            if drawn:  # bounded growth: a call that compiles the kernel is no measurement
                self._seconds_per_row = min((perf_counter() - start) / drawn, 8 * self._seconds_per_row)
        finally:
            for job in jobs:
                if not job.cancel():  # a cancelled job never started: its core is busy
                    job.result()


thread_runner = per_thread(FusedRunner)
"""The cached ``FusedRunner`` of the calling thread for rows of ``size`` scores."""

MARGIN = 1e-9
"""Decisions that are closer than this, relative to the mass or to the scores, are left to the reference."""
FEW = 512
"""Tokens whose noise is computed along with that of the groups."""


def draw_with_numpy(
    logits_V: NDArray[np.float32], pipeline: FusedPipeline, past: HistoryView, seed: int, step: int
) -> int:
    """The token of the fused kernel for one row, while the kernels are not loaded: in a tenth of the reference's time.

    float64 in NumPy, without sorting the row. NOT_DRAWN leaves the row to the reference: invalid scores, logprobs,
    added values, and decisions closer than MARGIN.
    """
    if pipeline.tap is not None or pipeline.values is not None:
        return NOT_DRAWN
    params, size = pipeline.params, len(logits_V)
    x_V = logits_V.astype(np.float64)
    if not np.isfinite(x_V.max()) or not _edit(x_V, pipeline.edits, past):
        return NOT_DRAWN
    if past.mask is not None:
        x_V[masked_tokens(past.mask, size)] = -np.inf
    top = x_V.max()
    if not np.isfinite(top):
        return NOT_DRAWN
    if params.t == 0:
        return int(x_V.argmax())
    x_V -= top
    if params.t != 1.0:
        x_V /= params.t
    if not _truncate(x_V, params):
        return NOT_DRAWN
    if params.late_t != 1.0:
        x_V /= params.late_t
    return _race(x_V, seed, step)


def _edit(x_V: NDArray[np.float64], edits: Sequence[LogitEdit], past: HistoryView) -> bool:
    """Apply logit edits. Returns False for scores that are not sampled, and for a list that raises an exception."""
    for edit in edits:
        if isinstance(edit, CountPenalties):
            ids_K, _, output_K = past.counts(edit.window)
            x_K = x_V[ids_K]
            for kind, value in edit.rules:
                if kind == REPETITION:
                    x_K = np.where(x_K > 0, x_K / value, x_K * value)
                else:
                    x_K = x_K - value * (output_K if kind == FREQUENCY else output_K > 0)
            x_V[ids_K] = x_K
            if not (x_K < np.inf).all():
                return False
            continue
        try:
            listing = past.listing(edit)
        except Exception:  # noqa: BLE001  # a user-defined stage may raise anything
            return False
        ids = np.fromiter(listing, np.int64, len(listing))
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(x_V):
            return False
        if edit.touches == "listed":
            x_V[ids] += np.fromiter(listing.values(), np.float64, len(ids))
            if not (x_V[ids] < np.inf).all():
                return False
        else:
            kept_K = x_V[ids]
            x_V[:] = -np.inf
            x_V[ids] = kept_K
    return True


def _truncate(x_V: NDArray[np.float64], params: FusedParams) -> bool:
    """Set the scores of removed tokens to -inf; the highest is 0. Returns False if a decision is close."""
    if params.sigmas and not _apply_floor(x_V, -params.sigmas * np.sqrt(x_V[x_V > -np.inf].var()) - SLACK):
        return False
    if 0 < params.k < len(x_V):
        _keep_first(x_V, params.k, -np.partition(-x_V, params.k - 1)[params.k - 1])
    if params.m and not _apply_floor(x_V, np.log(params.m) - SLACK):
        return False
    if params.p < 1.0:
        weight_V = np.exp(x_V)
        mass = weight_V.sum()
        ids_N = np.flatnonzero(weight_V >= mass * (1.0 - params.p) / (2 * len(x_V)))  # the others are surely removed
        x_N = -np.sort(-x_V[ids_N])
        weight_N = np.exp(x_N)
        before_N = weight_N.cumsum() - weight_N
        distance_N = before_N - params.p * mass * (1.0 - SLACK)
        if np.abs(distance_N).min() < MARGIN * mass:
            return False
        count = max(int((distance_N < 0).sum()), 1)
        _keep_first(x_V, count, x_N[count - 1])
    return not params.late_m or _apply_floor(x_V, np.log(params.late_m) - SLACK)


def _apply_floor(x_V: NDArray[np.float64], floor: float) -> bool:
    """Remove the scores below a floor; the highest stays. Returns False if one is close to it."""
    if np.abs(x_V - floor).min() < MARGIN * (1 - floor):
        return False
    x_V[(x_V < floor) & (x_V < 0)] = -np.inf
    return True


def _keep_first(x_V: NDArray[np.float64], count: int, lowest: float) -> None:
    """Keep ``count`` tokens: those above the score ``lowest``, and of those at it the first ones."""
    equal_N = np.flatnonzero(x_V == lowest)
    removed_N = equal_N[max(count - np.count_nonzero(x_V > lowest), 0) :]
    x_V[x_V < lowest] = -np.inf
    x_V[removed_N] = -np.inf


def _race(x_V: NDArray[np.float64], seed: int, step: int) -> int:
    """The Gumbel draw in two levels: a group, and a token of it. NOT_DRAWN if a decision is close."""
    weight_V = np.exp(x_V)
    padded = np.zeros(-(-len(x_V) // GROUP_SIZE) * GROUP_SIZE)
    padded[: len(x_V)] = weight_V
    mass_G = padded.reshape(-1, GROUP_SIZE).sum(1)
    groups_G = np.flatnonzero(mass_G)
    many = np.count_nonzero(weight_V) > FEW  # then the noise of the likeliest group, along with that of the groups
    ids_N = _in_group(x_V, int(mass_G.argmax())) if many else np.flatnonzero(weight_V)
    stream = np.repeat(np.array([GROUP, TOKEN]), (len(groups_G), len(ids_N)))
    noise = gumbel(uniform(seed, step, stream, np.concatenate((groups_G, ids_N))))
    winner = _winner(groups_G, np.log(mass_G[groups_G]) + noise[: len(groups_G)])
    if winner < 0:
        return NOT_DRAWN
    noise_N, chosen_N = noise[len(groups_G) :], ids_N // GROUP_SIZE == winner
    ids_N, noise_N = ids_N[chosen_N], noise_N[chosen_N]
    if not len(ids_N):
        ids_N = _in_group(x_V, winner)
        noise_N = gumbel(uniform(seed, step, TOKEN, ids_N))
    return _winner(ids_N, x_V[ids_N] + noise_N)


def _in_group(x_V: NDArray[np.float64], group: int) -> NDArray[np.int64]:
    """The tokens of a group that have not been removed."""
    start = group * GROUP_SIZE
    return start + np.flatnonzero(x_V[start : start + GROUP_SIZE] > -np.inf)


def _winner(ids_N: NDArray[np.int64], total_N: NDArray[np.float64]) -> int:
    """The id with the highest total; NOT_DRAWN if another one is close."""
    best = int(total_N.argmax())
    close = np.count_nonzero(total_N > total_N[best] - MARGIN * (1 + abs(total_N[best])))
    return int(ids_N[best]) if close == 1 else NOT_DRAWN


PENALISE, ADD, ALLOW = range(3)
"""Commands: PENALISE tokens that occurred (table, rules, number of rules); ADD to scores (ids, values, number of ids);
ALLOW only the tokens of a bitmask (words)."""

INVALID_IDS = np.array([-1], np.int64)
"""An id list that the kernel rejects; the fallback path then raises the error."""


class EditProgram:
    """The edits of a row. ``commands``: int64 [K, 4]. Call ``refresh`` before each step."""

    def __init__(self, edits: Sequence[LogitEdit], past: HistoryView, size: int) -> None:
        self.commands = np.zeros((len(edits), 4), np.int64)
        self._past, self._size = past, size
        self._buffers: list[Any] = [None] * len(edits)
        self.dynamic: list[tuple[int, Shift]] = []  #: token lists that depend on the history: index of the edit, stage
        for index, edit in enumerate(edits):
            if isinstance(edit, CountPenalties):
                table, rules = count_table(past, edit.window), np.array(edit.rules, np.float64)
                self._set_command(index, PENALISE, table[0], rules, len(rules), table)
            elif has_constant_listing(edit):
                self._set_listing(index, edit)
            else:
                self.dynamic.append((index, edit))
        self.commands_at = self.commands.ctypes.data, len(edits)
        self.refresh()

    def refresh(self) -> None:
        """Update the token lists that depend on the history."""
        for index, stage in self.dynamic:
            self._set_listing(index, stage)

    def _set_listing(self, index: int, stage: Shift) -> None:
        try:
            listing = self._past.listing(stage)
            ids = np.fromiter(listing, np.int64, len(listing))
            values = np.fromiter(listing.values(), np.float64, len(listing))
        except Exception:  # noqa: BLE001  # custom stages may raise anything
            ids = INVALID_IDS
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._size:
            self._set_command(index, ADD, INVALID_IDS, np.zeros(1), 1)
        elif stage.touches == "listed":
            self._set_command(index, ADD, ids, values, len(ids))
        else:
            words = packed_ids(ids, self._size)
            self._set_command(index, ALLOW, words, words, 0)

    def _set_command(self, index: int, code: int, first: Any, second: Any, count: int, *buffers: Any) -> None:
        self._buffers[index] = first, second, buffers
        self.commands[index] = code, first.ctypes.data, second.ctypes.data, count


def count_table(past: HistoryView, window: int | None) -> tuple[NDArray[np.int64], Any]:
    """The addresses of token counts, see ``IncrementalHistory.table``, and the object that owns them."""
    if isinstance(past, IncrementalHistory):
        return past.table(window), past
    columns = np.array(past.counts(window), np.int64)
    return np.array([*(column.ctypes.data for column in columns), columns.shape[1]], np.int64), columns
