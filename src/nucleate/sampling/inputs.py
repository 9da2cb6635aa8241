"""Checks the arguments of callers: logits, masks, steps, histories, token ids."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stage import Pipeline

LOGITS_DTYPES = ("float32", "float16", "bfloat16", "float64")
"""The data types of logits that kernels read."""

_DTYPE_CODES = {np.dtype(name): code for code, name in enumerate(LOGITS_DTYPES) if name != "bfloat16"}
_FLOAT32, _INT32 = np.dtype(np.float32), np.dtype(np.int32)

RowId = int | str
"""What names a row of a ``Sampler``."""

NO_ARRAY = np.zeros((1, 1), np.float32)

LogitsLayout = tuple[NDArray[np.float32], int, int, int]
"""Rows in memory, as (array, address, row stride in bytes, index in LOGITS_DTYPES). A contiguous float32 array has
address 0, other rows have NO_ARRAY and an address: passing an array to a kernel is faster than reading its address."""


class LogitsInput:
    """Logits [B, V], a NumPy array or a torch tensor. Rows are converted when they are read."""

    def __init__(self, logits: Any) -> None:
        self._logits, self._rows = logits, checked_logits(logits)
        if hasattr(logits, "detach"):
            self._rows = self._rows.cpu()
        rows, size = self._rows.shape
        self.shape: tuple[int, int] = rows, size

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        """One row as float32 [V], without a copy where possible. Values beyond float32 become infinite."""
        row = self._rows[index]
        if row.dtype is _FLOAT32:
            return row  # type: ignore[no-any-return]
        with np.errstate(over="ignore"):
            return np.asarray(row.float().numpy() if hasattr(row, "detach") else row).astype(np.float32, copy=False)

    def like(self, result: NDArray[Any]) -> Any:
        """Converts a result to the kind of the logits: a NumPy array, or a tensor on their device."""
        return like(self._logits, result)

    def layout(self) -> LogitsLayout:
        """The memory layout of the rows. Rows that kernels cannot read in place are copied."""
        rows = self._rows
        layout = contiguous_layout(rows, self.shape)
        if layout is not None:
            return layout
        if hasattr(rows, "detach"):
            dtype, address, item_size = _torch_dtype_code(rows.dtype), rows.data_ptr(), rows.itemsize
            row_stride, item_stride = (stride * item_size for stride in rows.stride())
        else:
            dtype = _DTYPE_CODES.get(rows.dtype, -1) if rows.flags.aligned else -1
            address, item_size, (row_stride, item_stride) = rows.ctypes.data, rows.itemsize, rows.strides
        if dtype < 0 or address % item_size or (item_stride != item_size and self.shape[1] > 1):
            self._rows = np.array(list(self), np.float32).reshape(self.shape)
            return self.layout()
        return NO_ARRAY, address, row_stride, dtype

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        return (self[index] for index in range(len(self)))


def as_row_id(row: Any) -> RowId:
    """The id of a row: a string, or an integer of any kind. Raises TypeError."""
    return row if row.__class__ is str or row.__class__ is int else operator.index(row)


def is_row(logits: Any) -> bool:
    """Whether logits are one row [V], and not rows [B, V]."""
    return getattr(logits, "ndim", None) == 1 or (not hasattr(logits, "ndim") and np.ndim(logits) == 1)


def checked_logits(logits: Any) -> Any:
    """Rows of floats [B, V] as a NumPy array, or a torch tensor without a gradient. Raises ValueError, TypeError."""
    is_tensor = hasattr(logits, "detach")
    array: Any = logits if is_tensor else np.asarray(logits)
    if array.ndim != 2 or array.shape[1] == 0:
        raise ValueError(f"logits must have the shape [rows, vocabulary], got {list(array.shape)}")
    if not (array.is_floating_point() if is_tensor else array.dtype.kind == "f"):
        raise TypeError(f"logits must be floating-point numbers, got {array.dtype}")
    return array.detach() if is_tensor and array.requires_grad else array


def check_shape(got: Sequence[int], rows: int, size: int) -> None:
    """Raise ValueError unless the shape of logits is [rows, size], those of the sampled rows."""
    if tuple(got) == (rows, size):
        return
    if rows == 0:
        about = f"Sampler({size}) sets the vocabulary size, and sampler.add(params) adds a row and returns its number"
        raise ValueError(f"there are no rows to sample, but the logits have the shape {list(got)}: {about}")
    raise ValueError(f"logits must have the shape {[rows, size]}, one row per row of the sampler, got {list(got)}")


def like(logits: Any, result: NDArray[Any]) -> Any:
    """The result itself for NumPy logits; for a tensor of logits, a tensor on its device."""
    if not hasattr(logits, "detach"):
        return result
    from nucleate.sampling.gpu.torch_device import to_device_of  # imports torch

    return to_device_of(logits, result)


def contiguous_layout(rows: Any, shape: tuple[int, int]) -> LogitsLayout | None:
    """The memory layout of plain NumPy logits of this shape; None for others, which need ``LogitsInput``."""
    if type(rows) is np.ndarray:
        is_contiguous = rows.dtype is _FLOAT32 and rows.shape == shape and rows.flags.carray
        return (rows, 0, 4 * shape[1], 0) if is_contiguous else None
    if not getattr(rows, "is_cpu", False) or rows.shape != shape or not rows.is_contiguous():
        return None
    dtype, address, item_size = _torch_dtype_code(rows.dtype), rows.data_ptr(), rows.itemsize
    return None if dtype < 0 or address % item_size else (NO_ARRAY, address, shape[1] * item_size, dtype)


@cache
def _torch_dtype_code(dtype: Any) -> int:
    """The index of a torch data type in LOGITS_DTYPES; -1 for others."""
    name = str(dtype)[6:]
    return LOGITS_DTYPES.index(name) if name in LOGITS_DTYPES else -1


def checked_mask(mask: Any, rows: int, size: int) -> Any:
    """Packed bitmasks [B, at least V / 32], int32 or uint32, as an array or a tensor. Raises ValueError, TypeError."""
    array, words = mask.detach() if hasattr(mask, "detach") else np.asarray(mask), -(-size // 32)
    if array.ndim != 2 or len(array) != rows or array.shape[1] < words:
        raise ValueError(f"mask must have the shape [{rows}, {words}], 32 tokens per word, got {list(array.shape)}")
    if str(array.dtype).removeprefix("torch.") not in ("int32", "uint32"):
        raise TypeError(f"mask must be of int32, got {array.dtype}")
    return array


def masks(mask: Any, rows: int, size: int) -> Sequence[NDArray[np.int32] | None]:
    """One checked bitmask per row, or None. Bit i % 32 of word i // 32 stands for token i."""
    if mask is None:
        return [None] * rows
    checked = checked_mask(mask, rows, size)
    array: NDArray[Any] = checked.cpu().numpy() if hasattr(checked, "detach") else checked
    return list(np.ascontiguousarray(array.view(np.int32)))


def packed_ids(ids: Sequence[int] | NDArray[np.int64], size: int) -> NDArray[np.int32]:
    """A bitmask, int32 [V / 32], that allows some tokens only."""
    allowed = np.zeros(-(-size // 32) * 32, bool)
    allowed[ids] = True
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)


def masked_tokens(mask: NDArray[np.int32] | None, size: int) -> NDArray[np.bool_]:
    """A bitmask as booleans [V]: True for tokens that are not allowed."""
    if mask is None:
        return np.zeros(size, bool)
    bits = np.unpackbits(np.asarray(mask).astype("<i4").view(np.uint8), bitorder="little")
    return np.asarray(bits[:size] == 0)


def contiguous_mask_layout(mask: Any, rows: int, size: int) -> tuple[int, int] | None:
    """Address and stride of plain NumPy masks, 0, 0 for none; None for others, which need ``masks``."""
    if mask is None:
        return 0, 0
    if type(mask) is not np.ndarray or mask.dtype is not _INT32 or mask.ndim != 2 or not mask.flags.c_contiguous:
        return None
    return (mask.ctypes.data, mask.strides[0]) if len(mask) == rows and 32 * mask.shape[1] >= size else None


def mask_layout(masks_B: Sequence[NDArray[np.int32] | None]) -> tuple[int, int]:
    """Address and stride, in bytes, of the masks of rows; 0, 0 for none."""
    first = masks_B[0]
    return (0, 0) if first is None else (first.ctypes.data, first.nbytes)


def per_row(value: Any, rows: int, name: str) -> list[int]:
    """One integer per row, from one for all rows or a list."""
    values = list(value) if isinstance(value, Sequence | np.ndarray) else [value] * rows
    if len(values) != rows:
        raise ValueError(f"{name} has {len(values)} entries, but the logits have {rows} rows")
    for number in values:
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or not 0 <= number < 2**64:
            raise ParameterError(name, f"{name} must be an integer >= 0 and < 2**64, got {number!r}")
    return [int(number) for number in values]


def histories(lists: Any, rows: int, size: int, name: str) -> list[NDArray[np.int64]]:
    """The token ids of each row, checked."""
    if lists is None:
        return [np.zeros(0, np.int64)] * rows
    if len(lists) != rows:
        raise ValueError(f"{name} must hold one list of token ids per row: {rows} rows, got {len(lists)}")
    return [history(ids, size, name, "hold one list of token ids per row") for ids in lists]


def history(ids: Any, size: int, name: str, what: str = "be a list of token ids") -> NDArray[np.int64]:
    """Token ids, checked against the vocabulary."""
    array = np.asarray(ids)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        got = f"the text {ids!r:.60}; encode it with the tokenizer" if isinstance(ids, str) else f"{array!r:.60}"
        raise TypeError(f"{name} must {what}, got {got}")
    if len(array) and not 0 <= array.min() <= array.max() < size:
        raise ValueError(f"{name} holds token ids outside the vocabulary (0..{size - 1})")
    return array.astype(np.int64)


def check_count(value: Any, name: str, least: int = 1, what: str = "") -> None:
    """Raise ParameterError unless a value is an integer >= least. what: how messages name ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        at = f"{what} ({least})" if what else str(least)
        raise ParameterError(name, f"{name} must be an integer >= {at}, got {value!r:.60}")


def check_token(token: Any, size: int) -> None:
    """Raise ParameterError unless a value is a token id of the vocabulary."""
    if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < size:
        raise ParameterError("token", f"token must be an integer in 0..{size - 1}, got {token!r:.60}")


def check_ids(stages: Pipeline, size: int) -> None:
    """Raise ParameterError if a parameter of the stages names a token outside the vocabulary."""
    for field, token in ids_in(stages):
        if token >= size:
            raise ParameterError(field, f"{field} names token {token}, but the vocabulary ends at {size - 1}")


def ids_in(stages: Pipeline) -> Iterator[tuple[str, int]]:
    """The token ids in the parameters of stages, with the names of the parameters."""
    for stage in stages:
        for attribute, parameter in stage.parameters.items():
            value = getattr(stage, attribute)
            if not isinstance(value, float | int | None):  # isinstance(number, Mapping) takes a microsecond
                for token in _ids(value):
                    yield parameter.name, token


def _ids(value: Any) -> Iterable[int]:
    """The token ids in the value of a parameter."""
    if isinstance(value, Mapping):
        yield from value
    elif isinstance(value, tuple):
        for item in value:
            yield from (item,) if isinstance(item, int) else () if isinstance(item, str) else item
