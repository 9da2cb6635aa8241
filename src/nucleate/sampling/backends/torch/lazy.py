"""A list and a dict that are computed when they are first read."""

from __future__ import annotations

from collections import UserDict, UserList
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any


class LazyList(UserList[Any]):
    """A list of known length. Its items are computed when one of them is first read."""

    def __init__(self, length: int, make: Callable[[], Iterable[Any]]) -> None:
        self._length, self._make = length, make

    @cached_property
    def data(self) -> list[Any]:  # type: ignore[override]
        return [*self._make()]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]


class LazyDict(UserDict[int, Any]):
    """A mapping that is computed when it is first read."""

    def __init__(self, make: Callable[[], Mapping[int, Any]]) -> None:
        self._make = make

    @cached_property
    def data(self) -> dict[int, Any]:  # type: ignore[override]
        return {**self._make()}
