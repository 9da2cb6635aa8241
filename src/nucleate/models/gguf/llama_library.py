"""llama.cpp, through llama-cpp-python: its functions, loaded on first use, its log, and contexts that run batches."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.models.cpu_operations import limit_spinning
from nucleate.models.gguf.gguf_options import CACHE_TYPES, FLASH_ATTENTION
from nucleate.models.protocol import ModelError
from nucleate.parameters.converters import install_extra

logger = logging.getLogger("nucleate.llama_cpp")

REQUIREMENT = f"GGUF models need llama-cpp-python 0.3.36 or newer: {install_extra('gguf')}"
_ERROR, _CONTINUATION = 4, 5  # levels of ggml

_errors: deque[str] = deque(maxlen=20)
_line: list[Any] = [0, b""]  # the level and the text of the line that is being written
_callbacks: list[Any] = []  # ctypes does not keep them alive


@cache
def llama_cpp() -> Any:
    """The module ``llama_cpp.llama_cpp``. Raises ModelError if it is not installed, or too old."""
    limit_spinning()
    try:
        from llama_cpp import llama_cpp as library
    except ImportError:
        raise ModelError(REQUIREMENT) from None
    except (OSError, RuntimeError) as error:  # the shared library
        raise ModelError(f"cannot load llama.cpp: {' '.join(str(error).split())}") from error
    if not hasattr(library, "llama_memory_seq_cp") or not hasattr(library.llama_context_params, "kv_unified"):
        raise ModelError(REQUIREMENT)
    _callbacks.append(library.llama_log_callback(_log))
    library.llama_log_set(_callbacks[-1], ctypes.c_void_p(0))
    library.llama_backend_init()
    return library


@contextmanager
def collected_errors() -> Iterator[deque[str]]:
    """The errors that llama.cpp logs in the meantime, for a message."""
    _errors.clear()
    yield _errors


def reason(errors: deque[str], default: str) -> str:
    """The first error that says what is wrong, on one line. llama.cpp logs general ones after it."""
    found = next((" ".join(line.split()) for line in errors if line.strip()), default)
    return found.rpartition(": error ")[2].removeprefix("loading model: ")[:400]


def _log(level: int, text: bytes, _data: Any) -> None:
    """Log whole lines. llama.cpp writes lines in parts."""
    if level != _CONTINUATION:
        _line[0] = level
    *lines, _line[1] = (_line[1] + (text or b"")).split(b"\n")
    for line in lines:
        message = line.decode(errors="replace").rstrip()
        if not message:
            continue
        if _line[0] == _ERROR:
            _errors.append(message)
        logger.log(logging.INFO if _line[0] == _ERROR else logging.DEBUG, "%s", message)


MAX_BATCH = 2048
"""Tokens per call of llama_decode."""
SPARE = 2
"""Sequences of a context besides those that are asked for."""
INVARIANT_ROWS = 56
"""Tokens per micro-batch with batch invariance, at most: llama.cpp attends with another kernel from 64 on. And at least
two: the attention of a single token is divided among threads."""
FAILURES = {1: "the KV cache is full", 2: "it was aborted", -1: "the batch is invalid"}


class Token(NamedTuple):
    """A token to compute."""

    token: int
    position: int
    slot: int
    logits: bool  #: return its logits


class GgufContext:
    """A context of a ``GgufModel`` for ``slots`` sequences, with ``size`` tokens in the KV cache. Raises ModelError.

    row_multiple: with batch invariance, micro-batches have 2 to INVARIANT_ROWS tokens, and their tokens and logits are
    filled up to a multiple of it: the last layer computes only tokens with logits. The context has two more sequences:
    ``slots``, and one for tokens that fill up and cells that are moved.
    """

    def __init__(self, model: Any, size: int, slots: int, row_multiple: int = 0) -> None:
        lib, options = llama_cpp(), model.options
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = size, slots + SPARE, MAX_BATCH
        if row_multiple:
            params.n_ubatch = INVARIANT_ROWS
        params.n_threads = params.n_threads_batch = options.threads
        params.type_k, params.type_v = (CACHE_TYPES[one][0] for one in (options.cache_type_k, options.cache_type_v))
        mode = "on" if row_multiple else options.flash_attn
        params.flash_attn_type = FLASH_ATTENTION[mode]
        params.kv_unified = params.swa_full = True  # sequences share cells, and every token stays in the cache
        params.no_perf = True
        with collected_errors() as errors:
            context = lib.llama_init_from_model(model.pointer, params)
        if not context:
            why = reason(errors, f"no memory for a KV cache of {size} tokens")
            raise ModelError(f"llama.cpp cannot run {model.path}: {why}")
        self._model = model  # freed after the context
        self._lib, self._context, self._vocab_size = lib, context, model.vocab_size
        self._memory, self._spare, self.slots = lib.llama_get_memory(context), slots + SPARE - 1, slots
        self.batch_size = min(lib.llama_n_batch(context), MAX_BATCH)
        self._row_multiple = row_multiple
        self.window = int(lib.llama_model_n_swa(model.pointer))  #: tokens that sliding attention sees; 0: all
        self.no_logits = np.empty((0, model.vocab_size), np.float32)
        self._batch = lib.llama_batch_init(MAX_BATCH + INVARIANT_ROWS, 0, 1)
        self._arrays = [
            np.ctypeslib.as_array(array, (MAX_BATCH + INVARIANT_ROWS,))
            for array in (self._batch.token, self._batch.pos, self._batch.logits)
        ]
        np.ctypeslib.as_array(self._batch.n_seq_id, (MAX_BATCH + INVARIANT_ROWS,))[:] = 1
        self.close = weakref.finalize(self, _free, lib, context, self._batch)

    def remove(self, slot: int, start: int) -> None:
        """Remove the tokens of a sequence from a position on. Raises ModelError if the memory cannot be cut there."""
        if not self._lib.llama_memory_seq_rm(self._memory, slot, start or -1, -1):
            raise ModelError(f"llama.cpp cannot remove tokens from {start} on")

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Add the cells of the positions start to stop - 1 of one sequence to another one."""
        self._lib.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def clear(self) -> None:
        """Remove all tokens."""
        self._lib.llama_memory_clear(self._memory, False)

    def save(self, slot: int, start: int, stop: int) -> NDArray[np.uint8]:
        """The cells of the positions start to stop - 1 of a sequence, for ``restore``. Raises ModelError."""
        self.copy(slot, self._spare, start, stop)
        data = np.empty(self._lib.llama_state_seq_get_size(self._context, self._spare), np.uint8)
        written = self._lib.llama_state_seq_get_data(self._context, _bytes(data), data.size, self._spare)
        self.remove(self._spare, 0)
        if written != data.size:
            raise ModelError("llama.cpp cannot save the KV cache of a sequence")
        return data

    def restore(self, data: NDArray[np.uint8], slots: Sequence[int], start: int, stop: int) -> None:
        """Put saved cells into the first free ones, for some sequences. Raises ModelError."""
        if self._lib.llama_state_seq_set_data(self._context, _bytes(data), data.size, self._spare) != data.size:
            raise ModelError("llama.cpp cannot restore the KV cache of a sequence")
        for slot in slots:
            self.copy(self._spare, slot, start, stop)
        self.remove(self._spare, 0)

    def padding(self, count: int) -> int:
        """The number of tokens that fill up a call with so many."""
        if not self._row_multiple:
            return 0
        missing = -count % self._row_multiple
        return missing + ((count + missing) % INVARIANT_ROWS == 1)

    def forward(self, tokens: list[Token]) -> NDArray[np.float32]:
        """Compute tokens. Returns the requested logits [L, V], valid until the next call. Raises ModelError."""
        size = self.batch_size
        if len(tokens) <= size:
            return self.decode(tokens) if tokens else self.no_logits
        return np.concatenate([self.decode(tokens[i : i + size]).copy() for i in range(0, len(tokens), size)])

    def decode(self, tokens: list[Token]) -> NDArray[np.float32]:
        """The same, for one call of llama_decode: 1 to ``batch_size`` tokens."""
        batch, padding = self._batch, self.padding(len(tokens))
        filled = [*tokens, *[Token(0, i, self._spare, logits=False) for i in range(padding)]]
        columns = list(zip(*filled, strict=True))
        wanted = np.array(columns[3], bool)
        flags = self._filled_flags(wanted) if self._row_multiple > 1 else wanted
        for array, column in zip(self._arrays, (columns[0], columns[1], flags), strict=True):
            array[: len(filled)] = column
        for i, slot in enumerate(columns[2]):
            batch.seq_id[i][0] = slot
        batch.n_tokens = len(filled)
        with collected_errors() as errors:
            status = self._lib.llama_decode(self._context, batch)
        if padding:
            self.remove(self._spare, 0)
        if status:
            raise ModelError(f"llama.cpp failed: {FAILURES.get(status) or reason(errors, f'status {status}')}")
        if not wanted.any():
            return self.no_logits
        logits: Any = self._lib.llama_get_logits(self._context)  # waits for the computation
        logits_LV = np.ctypeslib.as_array(logits, (int(flags.sum()), self._vocab_size))
        return logits_LV if flags is wanted else logits_LV[wanted[flags]]

    def _filled_flags(self, wanted: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Request the logits of more tokens, so that each micro-batch has a multiple of rows, or all of its own."""
        flags = wanted.copy()
        for start in range(0, len(flags), INVARIANT_ROWS):
            part = flags[start : start + INVARIANT_ROWS]
            if missing := -int(part.sum()) % self._row_multiple:
                part[np.flatnonzero(~part)[::-1][:missing]] = True
        return flags


def _bytes(data: NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _free(lib: Any, context: Any, batch: Any) -> None:
    lib.llama_batch_free(batch)
    lib.llama_free(context)
