"""What a caller hands in, checked: rows of logits, masks, steps, histories, token ids. Knows no pipeline's meaning."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.core.parameter import ParameterError
from nucleate.core.stage import Pipeline


class Logits:
    """Rows of floats [B, V], a NumPy array or a torch tensor, kept as given: each row is read when it is asked for."""

    def __init__(self, logits: Any) -> None:
        if hasattr(logits, "detach"):  # a torch tensor; NumPy has no bfloat16
            logits = logits.detach()
            self._rows, floats = logits.cpu(), logits.is_floating_point()
        else:
            self._rows = logits = np.asarray(logits)
            floats = logits.dtype.kind == "f"
        if logits.ndim != 2 or logits.shape[1] == 0:
            raise ValueError(f"logits must have the shape [rows, vocabulary], got {list(logits.shape)}")
        if not floats:
            raise TypeError(f"logits must be floating-point numbers, got {logits.dtype}")
        self.shape: tuple[int, int] = tuple(logits.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, place: int) -> NDArray[np.float32]:
        """One row as float32 [V]; no copy where none is needed. What is beyond float32 becomes inf."""
        row = self._rows[place]
        with np.errstate(over="ignore"):
            return np.asarray(row.float().numpy() if hasattr(row, "detach") else row).astype(np.float32, copy=False)

    def plain(self) -> NDArray[np.float32] | None:
        """All rows as they lie in memory, if they are float32, one after the other and aligned; else None."""
        rows = self._rows
        if hasattr(rows, "detach"):
            if rows.dtype.itemsize != 4 or not rows.is_contiguous():
                return None
            rows = rows.numpy()
        flags = rows.flags
        plain = rows.dtype == np.float32 and rows.dtype.isnative and flags.c_contiguous and flags.aligned
        return rows if plain and flags.writeable else None

    def halves(self, place: int) -> tuple[NDArray[np.uint16], bool] | None:
        """The bits of a row of float16, or (True) bfloat16, that lies in one piece; None for any other row."""
        row = self._rows[place]
        if hasattr(row, "detach"):
            brain = str(row.dtype) == "torch.bfloat16"
            if not brain or not row.is_contiguous():
                return self._half(row.numpy()) if row.dtype.itemsize == 2 and not brain else None
            memory = (ctypes.c_uint16 * row.shape[0]).from_address(row.data_ptr())  # NumPy has no bfloat16
            return np.frombuffer(memory, np.uint16), True
        return self._half(row)

    @staticmethod
    def _half(row: NDArray[Any]) -> tuple[NDArray[np.uint16], bool] | None:
        half = row.dtype == np.float16 and row.dtype.isnative and row.flags.c_contiguous
        return (row.view(np.uint16), False) if half else None

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        return (self[place] for place in range(len(self)))


def masks(mask: Any, rows: int, size: int) -> list[NDArray[np.int32] | None]:
    """Packed bitmasks [B, at least V / 32], int32, a row each; None for none. Bit i % 32 of word i // 32 is token i."""
    if mask is None:
        return [None] * rows
    array = mask.detach().cpu().numpy() if hasattr(mask, "detach") else np.asarray(mask)
    words = -(-size // 32)
    if array.ndim != 2 or len(array) != rows or array.shape[1] < words:
        raise ValueError(f"mask must have the shape [{rows}, {words}], 32 tokens per word, got {list(array.shape)}")
    if array.dtype not in (np.int32, np.uint32):
        raise TypeError(f"mask must be of int32, got {array.dtype}")
    return list(array.view(np.int32))


def per_row(value: Any, rows: int, name: str) -> list[int]:
    """An integer for all rows, or one for each."""
    values = list(value) if isinstance(value, Sequence | np.ndarray) else [value] * rows
    if len(values) != rows:
        raise ValueError(f"{name} has {len(values)} entries, but the logits have {rows} rows")
    for one in values:
        if isinstance(one, bool) or not isinstance(one, int | np.integer) or not 0 <= one < 2**64:
            raise ParameterError(name, f"{name} must be an integer >= 0 and < 2**64, got {one!r}")
    return [int(one) for one in values]


def histories(lists: Any, rows: int, size: int, name: str) -> list[NDArray[np.int64]]:
    """A list of token ids per row."""
    if lists is None:
        return [np.zeros(0, np.int64)] * rows
    if len(lists) != rows:
        raise ValueError(f"{name} must hold one list of token ids per row: {rows} rows, got {len(lists)}")
    return [history(ids, size, name, "hold one list of token ids per row") for ids in lists]


def history(ids: Any, size: int, name: str, what: str = "be a list of token ids") -> NDArray[np.int64]:
    """Token ids of the vocabulary."""
    array = np.asarray(ids)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise TypeError(f"{name} must {what}, got {array!r:.60}")
    if len(array) and not 0 <= array.min() <= array.max() < size:
        raise ValueError(f"{name} holds token ids outside the vocabulary (0..{size - 1})")
    return array.astype(np.int64)


def check_ids(stages: Pipeline, size: int) -> None:
    """Raise ParameterError if a list, a table or a word in the stages has a token that is not in the vocabulary."""
    for stage in stages:
        for attribute, parameter in stage.parameters.items():
            for token in _ids(getattr(stage, attribute)):
                if token >= size:
                    message = f"{parameter.name} names token {token}, but the vocabulary ends at {size - 1}"
                    raise ParameterError(parameter.name, message)


def _ids(value: Any) -> Iterable[int]:
    """The token ids in the value of a parameter."""
    if isinstance(value, Mapping):
        yield from value
    elif isinstance(value, tuple):
        for item in value:
            yield from (item,) if isinstance(item, int) else () if isinstance(item, str) else item
