"""Devices, transfers and CUDA graphs; and the state of rows on a device, in ``Slots``.

The state of a row is its parameters and counters, the state of its stages, and a ring buffer of its last tokens. A row
keeps its slot until it is removed, so nothing moves when other rows are added or removed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.suffix_automaton import repeat_lengths


def open_device(name: Any) -> torch.device:
    """The torch device of a name, with its index. Raises ParameterError if it is not available."""
    try:
        device: torch.device = torch.empty(0, device=torch.device(name)).device
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        why = " ".join(str(error).split())[:200]
        raise ParameterError(
            "device", f"device must be one that torch supports here, got {name!r:.60}: {why}"
        ) from error
    if device.type == "meta":
        raise ParameterError("device", f"device must store data, got {name!r:.60}")
    return device


def select_kernels(device: torch.device, backend: str) -> str:
    """The backend of the fused pipeline, "triton" or "torch". Raises ParameterError if the device lacks support."""
    if backend == "torch":
        return backend
    there = importlib.util.find_spec("triton") is not None
    if backend == "auto":  # ROCm devices are also named "cuda", but the kernels assume warps of 32
        return "triton" if there and device.type == "cuda" and torch.version.hip is None else "torch"
    if not there:
        raise ParameterError("backend", "backend 'triton' needs Triton: pip install triton (Linux only)")
    if device.type != "cuda" and not triton_interpreted():
        raise ParameterError("backend", f"backend 'triton' needs a CUDA device, got {str(device)!r}")
    if triton_interpreted() and _minor_version("triton") < (3, 7) and _minor_version("numpy") >= (2, 4):
        raise ParameterError("backend", "Triton's interpreter needs Triton 3.7 or newer, or a NumPy older than 2.4")
    return "triton"


def _minor_version(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.import_module(package).__version__.split(".")[:2])


def triton_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter (TRITON_INTERPRET), on any device."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def float_dtype(device: torch.device) -> torch.dtype:
    """The dtype of computations: float64, or float32 on devices without float64."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Context manager that makes this the current CUDA device, on which Triton launches kernels."""
    entered: AbstractContextManager[Any] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    return entered


def to_device(values: Any, device: torch.device) -> torch.Tensor:
    """Copy a tensor, an array or a list of integers (as int64) to a device, without synchronising.

    CUDA has staged a copy from pageable memory when the call returns, so the source may be reused.
    """
    tensor = torch.as_tensor(values, dtype=torch.int64) if isinstance(values, list) else torch.as_tensor(values)
    return tensor.to(device, non_blocking=device.type == "cuda")


def capture_graph(run: Callable[[], None]) -> Callable[[], None]:
    """Run a function once, capture it in a CUDA graph, and return a function that replays the graph.

    The tensors that it reads and writes must keep their addresses.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], None] = graph.replay
    return replay


def to_device_of(logits: torch.Tensor, result: NDArray[Any]) -> torch.Tensor:
    """Copy an array to the device of the logits; as float32 if the device has no float64."""
    tensor = torch.from_numpy(result)
    if logits.is_cpu:
        return tensor
    return tensor.to(logits.device, float_dtype(logits.device) if tensor.is_floating_point() else tensor.dtype)


SEED, STEP, PROMPT_LENGTH, SINCE_BREAKER, COLUMNS = range(7, 12)
"""Columns of the row state after the seven FusedParams: seed, number of output tokens, length of the prompt, number of
tokens since the last DRY sequence breaker. COLUMNS is their number."""


class Slots:
    """Device buffers of S slots. ``reallocations`` counts how often buffers have been replaced by larger ones.

    - ``state_SC``: int64, the row state, see ``pack_row_state``.
    - ``tokens_SL``: int64, ring buffers of the last ``ring_size`` tokens; token i is at i % ring_size.
    - ``stage_params_SP``: the numeric parameters of pipelines with stateful stages.
    - ``repeat_lengths_SL``: int32, for the token at each distance from the end, how many tokens directly before it
      equal the last tokens of the sequence. For DRY and n-gram bans; equal to ``suffix_automaton.repeat_lengths``.
    """

    def __init__(self, device: torch.device, floats: torch.dtype, ring_size: int) -> None:
        self.device, self.floats, self.ring_size, self.reallocations = device, floats, ring_size, 0
        self.state_SC = torch.zeros((0, COLUMNS), dtype=torch.int64, device=device)
        self.columns = self.state_SC.unbind(1)  # views
        self.tokens_SL = torch.zeros((0, ring_size), dtype=torch.int64, device=device)
        self.stage_params_SP = torch.zeros((0, 0), dtype=floats, device=device)
        self.repeat_lengths_SL = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self._free: list[int] = []

    def add(self, state: NDArray[np.int64], last_tokens: list[int], length: int, *, tracks_repeats: bool) -> int:
        """Add a row with one copy from the host; returns its slot.

        state: see ``pack_row_state``. last_tokens: those that its stages read; see ``ensure_ring_size``. length: the
        number of all its tokens. tracks_repeats: whether it needs ``repeat_lengths_SL``.
        """
        if not self._free:
            self._grow(max(4, 2 * len(self.state_SC)))
        slot, last_tokens = self._free.pop(), last_tokens[max(0, len(last_tokens) - self.ring_size) :]
        lengths = repeat_lengths(last_tokens)[::-1] if tracks_repeats else []
        parts = [np.asarray(part, np.int64) for part in (state, last_tokens, lengths)]
        packed = torch.from_numpy(np.concatenate(parts))
        packed = packed.pin_memory() if self.device.type == "cuda" else packed  # for an asynchronous copy
        packed = to_device(packed, self.device)
        state_C, tokens_L, repeat_lengths_L = packed.split([len(part) for part in parts])
        self.state_SC[slot] = state_C
        if last_tokens:
            self.tokens_SL[slot, : len(last_tokens)] = tokens_L
            self.tokens_SL[slot] = self.tokens_SL[slot].roll((length - len(last_tokens)) % self.ring_size)
        if tracks_repeats:
            if not len(self.repeat_lengths_SL):
                self.repeat_lengths_SL = torch.zeros_like(self.tokens_SL, dtype=torch.int32)
                self.reallocations += 1
            self.repeat_lengths_SL[slot] = 0
            self.repeat_lengths_SL[slot, : len(last_tokens)] = repeat_lengths_L
        return slot

    def set_stage_params(self, slot: int, params: Sequence[float]) -> None:
        """Set the numeric parameters of the stages of a row for its next step."""
        more = len(params) - self.stage_params_SP.shape[1]
        if more > 0:
            self.stage_params_SP = torch.nn.functional.pad(self.stage_params_SP, (0, more))
            self.reallocations += 1
        self.stage_params_SP[slot, : len(params)] = to_device(torch.tensor(params, dtype=self.floats), self.device)

    def release(self, slot: int) -> None:
        """Free the slot of a removed row."""
        self._free.append(slot)

    def ensure_ring_size(self, count: int) -> None:
        """Enlarge the ring buffers to at least ``count`` tokens."""
        if count <= self.ring_size:
            return
        ring_size = 1 << (count - 1).bit_length()
        lengths_S1 = self.lengths(torch.arange(len(self.state_SC), device=self.device))[:, None]
        back_SL = (lengths_S1 - 1 - torch.arange(ring_size, device=self.device)) % ring_size  # to the last token
        index_SL = (lengths_S1 - 1 - back_SL) % self.ring_size
        self.tokens_SL = torch.where(back_SL < self.ring_size, self.tokens_SL.gather(1, index_SL), 0)
        more = ring_size - self.ring_size if len(self.repeat_lengths_SL) else 0
        self.repeat_lengths_SL = torch.nn.functional.pad(self.repeat_lengths_SL, (0, more))
        self.ring_size, self.reallocations = ring_size, self.reallocations + 1

    def _grow(self, count: int) -> None:
        old_count = len(self.state_SC)
        for name in ("state_SC", "tokens_SL", "stage_params_SP", "repeat_lengths_SL"):
            old = getattr(self, name)
            if len(old) or name != "repeat_lengths_SL":
                setattr(self, name, torch.nn.functional.pad(old, (0, 0, 0, count - old_count)))
        self.columns = self.state_SC.unbind(1)
        self._free = [*range(count - 1, old_count - 1, -1)]
        self.reallocations += 1

    def gather_column(self, slots_R: torch.Tensor, column: int) -> torch.Tensor:
        """One column of the row state: int64 [R]."""
        return self.columns[column].index_select(0, slots_R)

    def lengths(self, slots_R: torch.Tensor) -> torch.Tensor:
        """Number of prompt and output tokens: [R]."""
        return self.gather_column(slots_R, STEP) + self.gather_column(slots_R, PROMPT_LENGTH)

    def last_tokens(self, slots_R: torch.Tensor) -> torch.Tensor:
        """The last tokens, latest first: int64 [R, ring_size], padded with -1."""
        lengths_R1 = self.lengths(slots_R)[:, None]
        back_L = torch.arange(1, self.ring_size + 1, device=self.device)
        tokens_RL = self.tokens_SL.index_select(0, slots_R).gather(1, (lengths_R1 - back_L) % self.ring_size)
        return torch.where(back_L <= lengths_R1, tokens_RL, -1)

    def push(self, slots_R: torch.Tensor, tokens_R: torch.Tensor, steps_R: torch.Tensor | None = None) -> None:
        """Append a token to each row; -1 appends nothing. steps_R: the STEP column, if known."""
        steps_R = self.gather_column(slots_R, STEP) if steps_R is None else steps_R
        index_R = (steps_R + self.gather_column(slots_R, PROMPT_LENGTH)) % self.ring_size
        self.tokens_SL.index_put_((slots_R, index_R), tokens_R)
        self.columns[STEP].index_copy_(0, slots_R, steps_R + (tokens_R >= 0))

    def sampled_since(self, slots: Sequence[int], steps: Sequence[int], count: int) -> list[list[int]]:
        """The output tokens of each row from a step on, at most ``count``. Synchronises."""
        slots_R, steps_R = to_device([slots, steps], self.device)
        state_RC = self.state_SC.index_select(0, slots_R)
        index_RN = (state_RC[:, PROMPT_LENGTH] + steps_R)[:, None] + torch.arange(count, device=self.device)
        tokens_RN = self.tokens_SL.index_select(0, slots_R).gather(1, index_RN % self.ring_size)
        found = torch.cat((state_RC[:, STEP, None] - steps_R[:, None], tokens_RN), 1).tolist()
        return [tokens[:new] for new, *tokens in found]


def pack_row_state(
    params: Sequence[float], floats: torch.dtype, seed: int, prompt: int, output: int, since_breaker: int
) -> NDArray[np.int64]:
    """The state of a new row, int64 [COLUMNS]. seed: 0..2**64 - 1. prompt, output: lengths.

    params: FusedParams; their bits are stored as integers.
    """
    numbers, words = np.asarray(params, np.float64), np.array([seed], np.uint64).view(np.int64)
    with np.errstate(over="ignore"):
        bits = numbers.view(np.int64) if floats == torch.float64 else numbers.astype(np.float32).view(np.int32)
    return np.concatenate((bits, words, [output, prompt, since_breaker]))
