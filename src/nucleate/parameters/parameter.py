"""Declared parameters: a name, a type, a range and a help text. Validation, flags, JSON and docs follow from them."""

from __future__ import annotations

import dataclasses
import difflib
import json
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, dataclass_transform

from nucleate.parameters.converters import CONVERT, NOUNS, TokenTable, shown

Kind = TypeVar("Kind", bound=type)

FEW = 12
"""An error about an unknown name lists all names if they are no more than this."""


class ParameterError(ValueError):
    """A parameter is unknown or has a value that is not allowed. ``field`` is its public name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)  # both, so that it can be pickled
        self.field = field

    def __str__(self) -> str:
        return str(self.args[1])


@dataclass(frozen=True)
class Parameter:
    """One declared parameter.

    ``neutral`` is the value at which its stage does nothing (MISSING for a parameter that is no switch), ``off`` other
    values that mean the same. ``low``/``high`` bound a number; ``open_low`` excludes the low end itself; ``choices``
    are all the strings there are. ``public`` ones are fields of SamplingParams, flags and JSON fields.
    """

    name: str
    kind: str
    default: Any
    neutral: Any
    off: tuple[Any, ...]
    low: float | None
    high: float | None
    open_low: bool
    choices: tuple[str, ...]
    help: str
    optional: bool
    public: bool

    @property
    def allowed(self) -> str:
        """The valid values in words, for messages and docs."""
        if self.kind == "bool":
            return "true or false"
        if self.choices:
            many = " or a list of stage names" if self.kind != "str" else ""
            return f"one of {', '.join(self.choices)}{many}{' or none' if self.optional else ''}"
        one, many = NOUNS[self.kind]
        bounds = []
        if self.low is not None:
            bounds.append(f"{'>' if self.open_low else '>='} {_plain(self.low)}")
        if self.high is not None:
            bounds.append(f"<= {_plain(self.high)}")
        words = (many or one) + (" " + " and ".join(bounds) if bounds else "")
        return " or ".join([words, *map(str, self.off), *(["none"] if self.optional else [])])

    @property
    def described(self) -> str:
        """What it does, the valid values and the default, on one line."""
        default = "none" if self.default is None else str(self.default).lower() if self.kind == "bool" else self.default
        required = self.default is MISSING or self.default in ((), "")
        return f"{self.help} ({self.allowed}{'' if required else f'; default {default}'})."

    def is_neutral(self, value: Any) -> bool:
        return value == self.neutral or value in self.off

    def admits(self, number: Any) -> bool:
        """Whether a number is in range, or one of those that mean off; of a string, whether it is a choice."""
        if number in self.off or number in self.choices:
            return True
        if self.choices:
            return False
        above = self.low is None or (number > self.low if self.open_low else number >= self.low)
        return above and (self.high is None or number <= self.high)

    def check(self, value: Any) -> Any:
        """The value in its canonical type, or a ParameterError that names field, value and what is allowed."""
        if value is None and self.optional:
            return None
        try:
            return CONVERT[self.kind](value, self.admits)
        except ParameterError:  # of a part of the value: it says more
            raise
        except (TypeError, ValueError, OverflowError):
            raise self.error(value) from None

    def error(self, value: object) -> ParameterError:
        return ParameterError(self.name, f"{self.name} must be {self.allowed}, got {shown(value)}")


def _plain(bound: float) -> str:
    powers = {2**bits - 1: f"2**{bits} - 1" for bits in (31, 64)}
    return powers.get(bound, f"{bound:g}") if isinstance(bound, int) else f"{bound:g}"


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
    choices: tuple[str, ...] = (),
    public: bool = True,
) -> Any:
    """Declare a parameter in the body of a stage.

    ``neutral`` (also the default, unless one is given) marks a switch: the stage is in a pipeline only if one of its
    switches is set to something else. Without either, a value must be given. ``name`` is the public name; without it,
    the stage's own name in snake case. ``public=False`` is for what a request does not say itself, such as the ids that
    end it; its name is the attribute's.
    """
    declared = dict(
        help=help,
        neutral=neutral,
        name=name,
        low=low,
        high=high,
        open_low=open_low,
        off=off,
        choices=choices,
        public=public,
    )
    declared["default"] = neutral if default is MISSING else default
    if isinstance(declared["default"], dict):
        declared["default"] = TokenTable(declared["default"])
    return dataclasses.field(default=declared["default"], metadata={"param": declared})


def declared(cls: type, prefix: str = "") -> dict[str, Parameter]:
    """The parameters in a class body, by attribute, in order.

    ``prefix`` names the public ones that have no name of their own; without it, and else, the attribute does.
    """
    fields = {a: f for a, f in vars(cls).items() if isinstance(f, dataclasses.Field) and "param" in f.metadata}
    found = {}
    for attribute, (kind, optional, choices) in _kinds(cls, fields).items():
        made = {**fields[attribute].metadata["param"]}
        made["choices"] = made["choices"] or choices
        made["name"] = made["name"] or (prefix if made["public"] else "") or attribute
        found[attribute] = Parameter(kind=kind, optional=optional, **made)
    names = [parameter.name for parameter in found.values()]
    if len(set(names)) < len(names):
        raise TypeError(f"{cls.__name__}: every parameter needs a name of its own, param(..., name=...), got {names}")
    return found


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(param,))
def with_parameters(kind: Kind) -> Kind:
    """A frozen dataclass that keeps the declarations of its parameters, as ``PARAMETERS``."""
    kind.PARAMETERS = declared(kind)  # type: ignore[attr-defined]  # before a dataclass takes them out of the class
    made: Kind = dataclass(frozen=True, kw_only=True)(kind)  # type: ignore[assignment]
    return made


def _kinds(cls: type, fields: Iterable[str]) -> dict[str, tuple[str, bool, tuple[str, ...]]]:
    """What the annotations of some attributes say: (kind, whether None is allowed, choices)."""
    own = {attribute: cls.__annotations__[attribute] for attribute in fields if attribute in cls.__annotations__}
    body = type(cls.__name__, (), {"__annotations__": own, "__module__": cls.__module__})
    found = {}
    for attribute, annotation in typing.get_type_hints(body).items():
        optional = type(None) in typing.get_args(annotation)
        kinds = [k for k in typing.get_args(annotation) if k is not type(None)] if optional else [annotation]
        kind = kinds[0].__name__ if isinstance(kinds[0], type) and not typing.get_args(kinds[0]) else str(kinds[0])
        kind = kind.removeprefix("typing.").removeprefix("collections.abc.")
        choices = typing.get_args(kinds[0]) if typing.get_origin(kinds[0]) is typing.Literal else ()
        kind = "str" if choices else kind
        if kind not in CONVERT:
            raise TypeError(f"{cls.__name__}.{attribute}: a parameter is one of {', '.join(CONVERT)}, not {kind}")
        found[attribute] = kind, optional, choices
    return found


def unknown(
    name: str, known: Iterable[str], what: str = "parameter", synonyms: Mapping[str, str] = MappingProxyType({})
) -> ParameterError:
    """The error for a name that does not exist. It names the nearest ones, or all of them if they are few.

    synonyms: names that other projects use, and ours.
    """
    names = sorted(known)
    near = [synonyms[name]] if name in synonyms else difflib.get_close_matches(name, names, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    if len(names) <= FEW:
        hint += f" (known: {', '.join(names)})"
    return ParameterError(name, f"unknown {what} {shown(name)}{hint}")


def read_json(text: str, field: str) -> Any:
    """What JSON text says. Raises ParameterError, also for NaN, a name that an object holds twice, and absurd depth."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except (ValueError, TypeError, RecursionError) as error:
        raise ParameterError(field, f"{field} must be JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{shown(next(name for name in made if names.count(name) > 1))} is there twice")
    return made


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
