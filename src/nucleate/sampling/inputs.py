"""What a caller hands in, checked: rows of logits, masks, steps, histories, token ids. Knows no pipeline's meaning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stage import Pipeline

FLOATS = ("float32", "float16", "bfloat16", "float64")
"""What kernels read."""

_KINDS = {np.dtype(name): kind for kind, name in enumerate(FLOATS) if name != "bfloat16"}
_FLOAT32, _INT32 = np.dtype(np.float32), np.dtype(np.int32)

NOTHING = np.zeros((1, 1), np.float32)

Lying = tuple[NDArray[np.float32], int, int, int]
"""Rows in memory: a contiguous array and 0, or NOTHING and the address of the first; how many bytes further the next
is; and which of FLOATS they are. A kernel takes an array in a third of the time in which Python tells its address."""


class LogitsInput:
    """Rows of floats [B, V], a NumPy array or a torch tensor, kept as given: each row is read when it is asked for."""

    def __init__(self, logits: Any) -> None:
        self._given, self._rows = logits, checked(logits)
        if hasattr(logits, "detach"):
            self._rows = self._rows.cpu()
        rows, size = self._rows.shape
        self.shape: tuple[int, int] = rows, size

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, place: int) -> NDArray[np.float32]:
        """One row as float32 [V]; no copy where none is needed. What is beyond float32 becomes inf."""
        row = self._rows[place]
        if row.dtype is _FLOAT32:
            return row  # type: ignore[no-any-return]
        with np.errstate(over="ignore"):
            return np.asarray(row.float().numpy() if hasattr(row, "detach") else row).astype(np.float32, copy=False)

    def like(self, result: NDArray[Any]) -> Any:
        """A result for these logits, NumPy or a tensor on their device as they are."""
        return like(self._given, result)

    def lying(self) -> Lying:
        """Where the rows are in memory. Those a kernel cannot read, or that are not in one piece, are copied."""
        rows = self._rows
        plainly = lying_plainly(rows, self.shape)
        if plainly is not None:
            return plainly
        if hasattr(rows, "detach"):
            kind, start, size = _torch_kind(rows.dtype), rows.data_ptr(), rows.itemsize
            between, step = (stride * size for stride in rows.stride())
        else:
            kind = _KINDS.get(rows.dtype, -1) if rows.flags.aligned else -1
            start, size, (between, step) = rows.ctypes.data, rows.itemsize, rows.strides
        if kind < 0 or start % size or (step != size and self.shape[1] > 1):
            self._rows = np.array(list(self), np.float32).reshape(self.shape)
            return self.lying()
        return NOTHING, start, between, kind

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        return (self[place] for place in range(len(self)))


def checked(logits: Any) -> Any:
    """Rows of floats [B, V] as a NumPy array, or a torch tensor without a gradient. Raises ValueError, TypeError."""
    tensor = hasattr(logits, "detach")
    given: Any = logits if tensor else np.asarray(logits)
    if given.ndim != 2 or given.shape[1] == 0:
        raise ValueError(f"logits must have the shape [rows, vocabulary], got {list(given.shape)}")
    if not (given.is_floating_point() if tensor else given.dtype.kind == "f"):
        raise TypeError(f"logits must be floating-point numbers, got {given.dtype}")
    return given.detach() if tensor and given.requires_grad else given


def like(logits: Any, result: NDArray[Any]) -> Any:
    """A result as it is for NumPy logits; for a tensor of logits, as a tensor on its device."""
    if not hasattr(logits, "detach"):
        return result
    from nucleate.sampling.backends.torch.torch_device import on_device_of  # it imports torch

    return on_device_of(logits, result)


def lying_plainly(rows: Any, shape: tuple[int, int]) -> Lying | None:
    """Where logits of this shape are in memory, if a glance tells; None leaves them to ``LogitsInput``."""
    if type(rows) is np.ndarray:
        plain = rows.dtype is _FLOAT32 and rows.shape == shape and rows.flags.carray
        return (rows, 0, 4 * shape[1], 0) if plain else None
    if not getattr(rows, "is_cpu", False) or rows.shape != shape or not rows.is_contiguous():
        return None
    kind, start, size = _torch_kind(rows.dtype), rows.data_ptr(), rows.itemsize
    return None if kind < 0 or start % size else (NOTHING, start, shape[1] * size, kind)


@cache
def _torch_kind(dtype: Any) -> int:
    """The place in FLOATS of torch's name for a kind of number; -1 where it has none."""
    name = str(dtype)[6:]
    return FLOATS.index(name) if name in FLOATS else -1


def checked_mask(mask: Any, rows: int, size: int) -> Any:
    """Packed bitmasks [B, at least V / 32], int32 or uint32, as an array or a tensor. Raises ValueError, TypeError."""
    given, words = mask.detach() if hasattr(mask, "detach") else np.asarray(mask), -(-size // 32)
    if given.ndim != 2 or len(given) != rows or given.shape[1] < words:
        raise ValueError(f"mask must have the shape [{rows}, {words}], 32 tokens per word, got {list(given.shape)}")
    if str(given.dtype).removeprefix("torch.") not in ("int32", "uint32"):
        raise TypeError(f"mask must be of int32, got {given.dtype}")
    return given


def masks(mask: Any, rows: int, size: int) -> Sequence[NDArray[np.int32] | None]:
    """``checked_mask``, a row each; None for none. Bit i % 32 of word i // 32 is token i."""
    if mask is None:
        return [None] * rows
    given = checked_mask(mask, rows, size)
    array: NDArray[Any] = given.cpu().numpy() if hasattr(given, "detach") else given
    return list(np.ascontiguousarray(array.view(np.int32)))


def masks_plainly(mask: Any, rows: int, size: int) -> tuple[int, int] | None:
    """``where`` masks are, if a glance tells, 0, 0 for none; None leaves them to ``masks``."""
    if mask is None:
        return 0, 0
    if type(mask) is not np.ndarray or mask.dtype is not _INT32 or mask.ndim != 2 or not mask.flags.c_contiguous:
        return None
    return (mask.ctypes.data, mask.strides[0]) if len(mask) == rows and 32 * mask.shape[1] >= size else None


def where(masks_B: Sequence[NDArray[np.int32] | None]) -> tuple[int, int]:
    """The address of the first of some ``masks``, and how many bytes further the next one is; 0, 0 for none."""
    first = masks_B[0]
    return (0, 0) if first is None else (first.ctypes.data, first.nbytes)


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


def check_count(value: Any, name: str, least: int = 1, what: str = "") -> None:
    """Raise ParameterError unless a value is an integer of at least so much. what: the name of ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        at = f"{what} ({least})" if what else str(least)
        raise ParameterError(name, f"{name} must be an integer >= {at}, got {value!r:.60}")


def check_token(token: Any, size: int) -> None:
    """Raise ParameterError unless a value is a token id of the vocabulary."""
    if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < size:
        raise ParameterError("token", f"token must be an integer in 0..{size - 1}, got {token!r:.60}")


def check_ids(stages: Pipeline, size: int) -> None:
    """Raise ParameterError if a list, a table or a word in the stages has a token that is not in the vocabulary."""
    for field, token in ids_in(stages):
        if token >= size:
            raise ParameterError(field, f"{field} names token {token}, but the vocabulary ends at {size - 1}")


def ids_in(stages: Pipeline) -> Iterator[tuple[str, int]]:
    """The token ids in the parameters of stages, and the names of these."""
    for stage in stages:
        for attribute, parameter in stage.parameters.items():
            value = getattr(stage, attribute)
            if not isinstance(value, float | int | None):  # to ask whether a number is a mapping takes a microsecond
                for token in _ids(value):
                    yield parameter.name, token


def _ids(value: Any) -> Iterable[int]:
    """The token ids in the value of a parameter."""
    if isinstance(value, Mapping):
        yield from value
    elif isinstance(value, tuple):
        for item in value:
            yield from (item,) if isinstance(item, int) else () if isinstance(item, str) else item
