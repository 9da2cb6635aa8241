"""llama.cpp, through llama-cpp-python: its functions, loaded on first use, its log, and contexts that run batches."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import deque
from collections.abc import Iterator
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
FAILURES = {1: "the KV cache is full", 2: "it was aborted", -1: "the batch is invalid"}


class Token(NamedTuple):
    """A token to compute."""

    token: int
    position: int
    slot: int
    logits: bool  #: return its logits


class GgufContext:
    """A context of a ``GgufModel`` for ``slots`` sequences, with ``size`` tokens in the KV cache. Raises ModelError."""

    def __init__(self, model: Any, size: int, slots: int) -> None:
        lib, options = llama_cpp(), model.options
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = size, slots, MAX_BATCH
        params.n_threads = params.n_threads_batch = options.threads
        params.type_k, params.type_v = (CACHE_TYPES[one][0] for one in (options.cache_type_k, options.cache_type_v))
        params.flash_attn_type = FLASH_ATTENTION[options.flash_attn]
        params.kv_unified = params.swa_full = True  # sequences share cells, and every token stays in the cache
        params.no_perf = True
        with collected_errors() as errors:
            context = lib.llama_init_from_model(model.pointer, params)
        if not context:
            why = reason(errors, f"no memory for a KV cache of {size} tokens")
            raise ModelError(f"llama.cpp cannot run {model.path}: {why}")
        self._model = model  # freed after the context
        self._lib, self._context, self._vocab_size = lib, context, model.vocab_size
        self._memory = lib.llama_get_memory(context)
        self._batch_size = min(lib.llama_n_batch(context), MAX_BATCH)
        self._batch = lib.llama_batch_init(MAX_BATCH, 0, 1)
        self._arrays = [
            np.ctypeslib.as_array(array, (MAX_BATCH,))
            for array in (self._batch.token, self._batch.pos, self._batch.logits)
        ]
        np.ctypeslib.as_array(self._batch.n_seq_id, (MAX_BATCH,))[:] = 1
        self._close = weakref.finalize(self, _free, lib, context, self._batch)

    def remove(self, slot: int, start: int) -> None:
        """Remove the tokens of a sequence from a position on. Raises ModelError if the memory cannot be cut there."""
        if not self._lib.llama_memory_seq_rm(self._memory, slot, start or -1, -1):
            raise ModelError(f"llama.cpp cannot remove tokens from {start} on")

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Add the cells of the positions start to stop - 1 of one sequence to another one."""
        self._lib.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def forward(self, tokens: list[Token]) -> NDArray[np.float32]:
        """Compute tokens. Returns the requested logits [L, V], valid until the next call. Raises ModelError."""
        size = self._batch_size
        if len(tokens) <= size:
            return self._decode(tokens) if tokens else np.empty((0, self._vocab_size), np.float32)
        return np.concatenate([self._decode(tokens[i : i + size]).copy() for i in range(0, len(tokens), size)])

    def _decode(self, tokens: list[Token]) -> NDArray[np.float32]:
        count, batch = len(tokens), self._batch
        columns = list(zip(*tokens, strict=True))
        for array, column in zip(self._arrays, (columns[0], columns[1], columns[3]), strict=True):
            array[:count] = column
        for i, slot in enumerate(columns[2]):
            batch.seq_id[i][0] = slot
        batch.n_tokens = count
        with collected_errors() as errors:
            status = self._lib.llama_decode(self._context, batch)
        if status:
            raise ModelError(f"llama.cpp failed: {FAILURES.get(status) or reason(errors, f'status {status}')}")
        rows = sum(columns[3])
        if not rows:
            return np.empty((0, self._vocab_size), np.float32)
        logits: Any = self._lib.llama_get_logits(self._context)  # waits for the computation
        return np.ctypeslib.as_array(logits, (rows, self._vocab_size))


def _free(lib: Any, context: Any, batch: Any) -> None:
    lib.llama_batch_free(batch)
    lib.llama_free(context)
