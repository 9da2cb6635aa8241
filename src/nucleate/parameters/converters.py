"""Converters of parameter values to their canonical types, one per kind. They check types and ranges only."""

from __future__ import annotations

import copy
import math
import numbers
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

Admits = Callable[[Any], bool]
"""Whether a number is in the range of its parameter."""


class TokenTable(Mapping[int, float]):
    """An immutable, hashable ``{token id: value}``, in ascending order of the ids. Prints as a dict."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[int, float] | Iterable[tuple[int, float]] = ()) -> None:
        self._items = dict(sorted(dict(items).items()))

    def __getitem__(self, key: int) -> float:
        return self._items[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def shown(value: object) -> str:
    """The repr of a value, truncated to 60 characters, at a cost independent of the size of the value."""
    try:
        text = repr(_prefix(value))
    except ValueError:  # Python does not print integers of more than 4300 digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def install_extra(name: str) -> str:
    """How to install an extra of nucleate: the end of the message of an error."""
    return f"install the extra {name!r} (in the source tree: pip install -e '.[{name}]')"


def one_line(error: Exception) -> str:
    """The message of an error on one line, at most 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def changed_copy(original: T, **attributes: Any) -> T:
    """A copy that shares everything with the original but these attributes. They may be slots, and private."""
    copied = copy.copy(original)
    for name, value in attributes.items():
        setattr(copied, name, value)
    return copied


def _prefix(value: Any, depth: int = 60) -> Any:
    """As much of a value as its repr shows in the first 60 characters."""
    if isinstance(value, str | bytes):
        return value[:61]
    if type(value) not in (list, tuple, dict):
        return value
    if depth == 0:
        return ...
    if isinstance(value, dict):
        return {_prefix(key, depth): _prefix(item, depth - 1) for key, item in islice(value.items(), 16)}
    return type(value)(_prefix(item, depth - 1) for item in islice(value, 31))


def _number(value: Any, admits: Admits) -> float:
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise TypeError
    number = float(value)  # before the range check, as rounding may move it in or out of range
    rounded = isinstance(value, int) and abs(value) > sys.float_info.max  # rounded to the largest float
    if not math.isfinite(number) or rounded or not admits(number):
        raise ValueError
    return number


def _integer(value: Any, admits: Admits) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not admits(int(value)):
        raise TypeError
    return int(value)


def _switch(value: Any, admits: Admits) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError
    return bool(value)


def _integers(value: Any, admits: Admits) -> tuple[int, ...]:
    if isinstance(value, str | bytes | Mapping):
        raise TypeError
    return tuple(_integer(item, admits) for item in value)


def _strings(value: Any, admits: Admits) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else tuple(value)
    if isinstance(value, bytes | Mapping) or not all(isinstance(item, str) and item for item in items):
        raise TypeError
    return tuple(map(_text, items))


def _text(item: str) -> str:
    """A plain string, also from a subclass. Raises UnicodeEncodeError for a lone surrogate."""
    item.encode()
    return str.__str__(item)


def _choice(value: Any, admits: Admits) -> str:
    if not isinstance(value, str) or not admits(value):
        raise TypeError
    return str.__str__(value)


def _choices(value: Any, admits: Admits) -> str | tuple[str, ...]:
    return _choice(value, admits) if isinstance(value, str) else _strings(value, admits)


def _prompt(value: Any, admits: Admits) -> str | tuple[int, ...]:
    if not isinstance(value, str):
        return _integers(value, admits)
    if not value:
        raise ValueError
    return _text(value)


def _words(value: Any, admits: Admits) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str | bytes | Mapping):
        raise TypeError
    words = tuple(_text(item) if isinstance(item, str) else _integers(item, admits) for item in value)
    if not all(words):
        raise ValueError
    return words


def _table(value: Any, admits: Admits) -> TokenTable:
    if not isinstance(value, Mapping):
        raise TypeError
    made = {_key(key): _number(bias, admits) for key, bias in value.items()}
    if len(made) != len(value):  # "5" and 5 are the same token
        raise ValueError
    return TokenTable(made)


def _key(key: Any) -> int:
    """A token id; as a key of a JSON object, a string of digits."""
    number = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
    if isinstance(number, bool) or not isinstance(number, numbers.Integral) or number < 0:
        raise TypeError
    return int(number)


CONVERT: dict[str, Callable[[Any, Admits], Any]] = {
    "float": _number,
    "int": _integer,
    "bool": _switch,
    "str": _choice,
    "str | tuple[str, ...]": _choices,
    "tuple[int, ...]": _integers,
    "str | tuple[int, ...]": _prompt,
    "tuple[str, ...]": _strings,
    "tuple[str | tuple[int, ...], ...]": _words,
    "Mapping[int, float]": _table,
}
NOUNS = {
    "float": ("a number", ""),
    "int": ("an integer", ""),
    "tuple[int, ...]": ("", "a list of integers"),
    "str | tuple[int, ...]": ("", "a non-empty text or a list of token ids"),
    "tuple[str, ...]": ("", "a non-empty string or a list of such"),
    "tuple[str | tuple[int, ...], ...]": ("", "a list of non-empty strings or non-empty lists of token ids"),
    "Mapping[int, float]": ("", "a mapping of token ids (>= 0) to finite numbers"),
}


def register(kind: type, convert: Callable[[Any], Any], noun: str) -> None:
    """Allow a class as the type of parameters. convert: to an instance, or TypeError. noun: description for errors."""
    CONVERT[kind.__name__] = lambda value, _: value if isinstance(value, kind) else convert(value)
    NOUNS[kind.__name__] = "", noun
