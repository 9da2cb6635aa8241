"""What a parameter is: a name, a kind, a range, a sentence. One declaration gives validation, flags, JSON and docs.

Refuses to know what any parameter is for.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import numbers
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

import numpy as np


class ParameterError(ValueError):
    """A parameter is unknown or has a value that is not allowed. ``field`` is its public name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)  # both, so that it can be pickled
        self.field = field

    def __str__(self) -> str:
        return str(self.args[1])


class Table(Mapping[int, float]):
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


@dataclass(frozen=True)
class Parameter:
    """One declared parameter.

    ``neutral`` is the value at which its stage does nothing (MISSING for a parameter that is no switch), ``off`` other
    values that mean the same. ``low``/``high`` bound a number; ``open_low`` excludes the low end itself. ``public``
    ones are fields of SamplingParams, flags and JSON fields.
    """

    name: str
    kind: str
    default: Any
    neutral: Any
    off: tuple[Any, ...]
    low: float | None
    high: float | None
    open_low: bool
    help: str
    optional: bool
    public: bool

    @property
    def allowed(self) -> str:
        """The valid values in words, for messages and docs."""
        if self.kind == "bool":
            return "true or false"
        one, many = _NOUNS[self.kind]
        bounds = []
        if self.low is not None:
            bounds.append(f"{'>' if self.open_low else '>='} {_plain(self.low)}")
        if self.high is not None:
            bounds.append(f"<= {_plain(self.high)}")
        words = (many or one) + (" " + " and ".join(bounds) if bounds else "")
        return " or ".join([words, *map(str, self.off), *(["none"] if self.optional else [])])

    def is_neutral(self, value: Any) -> bool:
        return value == self.neutral or value in self.off

    def check(self, value: Any) -> Any:
        """The value in its canonical type, or a ParameterError that names field, value and what is allowed."""
        if value is None and self.optional:
            return None
        try:
            return _CONVERT[self.kind](value, self)
        except (TypeError, ValueError, OverflowError):
            raise self.error(value) from None

    def error(self, value: object) -> ParameterError:
        return ParameterError(self.name, f"{self.name} must be {self.allowed}, got {_shown(value)}")


def _plain(bound: float) -> str:
    powers = {2**bits - 1: f"2**{bits} - 1" for bits in (31, 64)}
    return powers.get(bound, f"{bound:g}") if isinstance(bound, int) else f"{bound:g}"


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _number(value: Any, parameter: Parameter) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError
    number = float(value)  # first, because what is out of range may round into it, and the other way round
    if not math.isfinite(number) or not _in_range(number, parameter):
        raise ValueError
    return number


def _in_range(value: Any, parameter: Parameter) -> bool:
    low, high = parameter.low, parameter.high
    if value in parameter.off:
        return True
    above = low is None or (value > low if parameter.open_low else value >= low)
    return above and (high is None or value <= high)


def _integer(value: Any, parameter: Parameter) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not _in_range(int(value), parameter):
        raise TypeError
    return int(value)


def _switch(value: Any, parameter: Parameter) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError
    return bool(value)


def _integers(value: Any, parameter: Parameter) -> tuple[int, ...]:
    if isinstance(value, str | bytes | Mapping):
        raise TypeError
    return tuple(_integer(item, parameter) for item in value)


def _strings(value: Any, parameter: Parameter) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else tuple(value)
    if isinstance(value, bytes | Mapping) or not all(isinstance(item, str) and item for item in items):
        raise TypeError
    return tuple(str.__str__(item) for item in items)  # of a subclass too, the plain string


def _table(value: Any, parameter: Parameter) -> Table:
    if not isinstance(value, Mapping):
        raise TypeError
    made = {_key(key): _number(bias, parameter) for key, bias in value.items()}
    if len(made) != len(value):  # "5" and 5 would be one token with two values
        raise ValueError
    return Table(made)


def _key(key: Any) -> int:
    """A token id; JSON objects carry it as a string of digits."""
    number = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
    if isinstance(number, bool) or not isinstance(number, numbers.Integral) or number < 0:
        raise TypeError
    return int(number)


_CONVERT = {
    "float": _number,
    "int": _integer,
    "bool": _switch,
    "tuple[int, ...]": _integers,
    "tuple[str, ...]": _strings,
    "Mapping[int, float]": _table,
}
_NOUNS = {
    "float": ("a number", ""),
    "int": ("an integer", ""),
    "tuple[int, ...]": ("", "a list of integers"),
    "tuple[str, ...]": ("", "a non-empty string or a list of such"),
    "Mapping[int, float]": ("", "a mapping of token ids (>= 0) to finite numbers"),
}


def param(
    help: str,
    *,
    neutral: Any = MISSING,
    default: Any = MISSING,
    name: str = "",
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
    off: tuple[Any, ...] = (),
    public: bool = True,
) -> Any:
    """Declare a parameter in the body of a stage.

    ``neutral`` (also the default, unless one is given) marks a switch: the stage is in a pipeline only if one of its
    switches is set to something else. Without either, a value must be given. ``name`` is the public name; without it,
    the stage's own name in snake case. ``public=False`` is for what a request does not say itself, such as the ids that
    end it; its name is the attribute's.
    """
    declared = dict(
        help=help, neutral=neutral, name=name, low=low, high=high, open_low=open_low, off=off, public=public
    )
    declared["default"] = neutral if default is MISSING else default
    if isinstance(declared["default"], dict):
        declared["default"] = Table(declared["default"])
    return dataclasses.field(default=declared["default"], metadata={"param": declared})


def declared(cls: type, prefix: str = "") -> dict[str, Parameter]:
    """The parameters in a class body, by attribute, in order.

    ``prefix`` names the public ones that have no name of their own; without it, and else, the attribute does.
    """
    fields = {a: f for a, f in vars(cls).items() if isinstance(f, dataclasses.Field) and "param" in f.metadata}
    found = {}
    for attribute, (kind, optional) in _kinds(cls, fields).items():
        made = {**fields[attribute].metadata["param"]}
        made["name"] = made["name"] or (prefix if made["public"] else "") or attribute
        found[attribute] = Parameter(kind=kind, optional=optional, **made)
    names = [parameter.name for parameter in found.values()]
    if len(set(names)) < len(names):
        raise TypeError(f"{cls.__name__}: every parameter needs a name of its own, param(..., name=...), got {names}")
    return found


def _kinds(cls: type, fields: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """What the annotations of some attributes say: (kind, whether None is allowed). Others are not looked at."""
    own = {attribute: cls.__annotations__[attribute] for attribute in fields if attribute in cls.__annotations__}
    body = type(cls.__name__, (), {"__annotations__": own, "__module__": cls.__module__})
    found = {}
    for attribute, annotation in typing.get_type_hints(body).items():
        optional = type(None) in typing.get_args(annotation)
        kinds = [k for k in typing.get_args(annotation) if k is not type(None)] if optional else [annotation]
        kind = kinds[0].__name__ if isinstance(kinds[0], type) and not typing.get_args(kinds[0]) else str(kinds[0])
        kind = kind.removeprefix("typing.").removeprefix("collections.abc.")
        if kind not in _CONVERT:
            raise TypeError(f"{cls.__name__}.{attribute}: a parameter is one of {', '.join(_CONVERT)}, not {kind}")
        found[attribute] = kind, optional
    return found


def unknown(name: str, known: Iterable[str], what: str = "parameter") -> ParameterError:
    """The error for a name that does not exist: says the nearest one, then all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ParameterError(name, f"unknown {what} {_shown(name)}{hint} (known: {', '.join(names)})")


def read_json(text: str, field: str) -> Any:
    """What JSON text says. Raises ParameterError, also for a name that an object holds twice, and for absurd depth."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, TypeError, RecursionError) as error:
        raise ParameterError(field, f"{field} must be JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{_shown(next(name for name in made if names.count(name) > 1))} is there twice")
    return made
