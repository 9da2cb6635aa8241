"""What waits for the device only if somebody looks at it: a sequence, and a mapping. Knows no device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

Item = TypeVar("Item")
Value = TypeVar("Value")


class LaterList(Sequence[Item]):
    """A sequence of a known length; its items are made when the first of them is asked for."""

    def __init__(self, length: int, make: Callable[[], Sequence[Item]]) -> None:
        self._length, self._make = length, make

    @cached_property
    def _items(self) -> Sequence[Item]:
        return tuple(self._make())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: Any) -> Any:
        return self._items[place]

    def __eq__(self, other: object) -> bool:
        return tuple(self._items) == (tuple(other) if isinstance(other, Sequence) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._items)


class LaterDict(Mapping[int, Value]):
    """A mapping; it is made when it is first looked at."""

    def __init__(self, make: Callable[[], Mapping[int, Value]]) -> None:
        self._make = make

    @cached_property
    def _items(self) -> Mapping[int, Value]:
        return self._make()

    def __getitem__(self, key: int) -> Value:
        return self._items[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)
