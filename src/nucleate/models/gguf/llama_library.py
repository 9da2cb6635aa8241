"""The functions of llama.cpp, through llama-cpp-python: loaded on first use, with its log in Python's logging."""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from nucleate.models.matmul import limit_spinning
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
