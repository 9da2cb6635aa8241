"""Parameter declarations: name, type, range and help text. Validation, flags, JSON and docs are derived from them."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, NoReturn, TypeVar, dataclass_transform

from nucleate.parameters.converters import CONVERT, NOUNS, TokenTable, shown

Kind = TypeVar("Kind", bound=type)

_MODULES = re.compile(r"\b(?:[a-z_]+\.)+(?=\w)")
MAX_LISTED = 12
"""An error for an unknown name lists all known names if there are at most this many."""


class ParameterError(ValueError):
    """A parameter is unknown or has a value that is not allowed. ``field`` is its public name; message says why.

    An unknown keyword argument is a TypeError, too.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)  # both arguments, for pickling
        self.field = field

    def __str__(self) -> str:
        return str(self.args[1])


@dataclass(frozen=True)
class Parameter:
    """A parameter declaration.

    ``neutral``: the value at which the stage is a no-op (MISSING if there is none). ``off``: other values with the same
    meaning. ``low``, ``high``: bounds of a number; ``open_low`` excludes ``low``. ``choices``: the allowed strings.
    ``public``: whether it is a field of SamplingParams, a flag and a JSON field.
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
        """The allowed values in words, for messages and docs."""
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
        """The help text with the allowed values and the default, on one line."""
        default = "none" if self.default is None else str(self.default).lower() if self.kind == "bool" else self.default
        required = self.default is MISSING or self.default in ((), "")
        return f"{self.help} ({self.allowed}{'' if required else f'; default {default}'})."

    def is_neutral(self, value: Any) -> bool:
        """Whether the stage is a no-op with this value."""
        return value == self.neutral or value in self.off

    def admits(self, number: Any) -> bool:
        """Whether a number is in range or an ``off`` value; whether a string is a choice."""
        if number in self.off or number in self.choices:
            return True
        if self.choices:
            return False
        above = self.low is None or (number > self.low if self.open_low else number >= self.low)
        return above and (self.high is None or number <= self.high)

    def check(self, value: Any) -> Any:
        """The value in its canonical type. Raises ParameterError with the field, the value and what is allowed."""
        if value is None and self.optional:
            return None
        try:
            return CONVERT[self.kind](value, self.admits)
        except ParameterError:  # from a part of the value, with a more specific message
            raise
        except UnicodeEncodeError as error:
            reason = f"character {error.start} of a text is a lone surrogate"
            raise ParameterError(self.name, f"{self.name} must be valid Unicode, but {reason}") from None
        except (TypeError, ValueError, OverflowError):
            raise self.error(value) from None

    def error(self, value: object) -> ParameterError:
        """The error for a value that is not allowed."""
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

    ``help``: the help text, everywhere. ``low``, ``high``: bounds of a number, or of each number in a list; with
    ``open_low``, ``low`` itself is not allowed. ``off``: further values with the meaning of ``neutral``. ``choices``:
    the allowed strings.

    ``neutral``, also the default unless ``default`` is given: a stage is in a pipeline only if one of its parameters
    differs from its neutral value. Without either, a value is required. ``name``: the public name; by default the name
    of the stage in snake case. ``public=False``: not set by requests directly, such as EOS ids; its name is that of the
    attribute.
    """
    value = neutral if default is MISSING else default
    value = TokenTable(value) if isinstance(value, dict) else value
    made = Parameter(name, "", value, neutral, off, low, high, open_low, choices, help, optional=False, public=public)
    return dataclasses.field(default=value, metadata={"param": made})


def declared(cls: type, prefix: str = "") -> dict[str, Parameter]:
    """The parameters in a class body, by attribute, in order.

    ``prefix`` is the name of public parameters declared without a name; the default is the attribute's name.
    """
    fields = {a: f for a, f in vars(cls).items() if isinstance(f, dataclasses.Field) and "param" in f.metadata}
    found = {}
    for attribute, (kind, optional, choices) in _kinds(cls, fields).items():
        made: Parameter = fields[attribute].metadata["param"]
        choices, name = made.choices or choices, made.name or (prefix if made.public else "") or attribute
        found[attribute] = dataclasses.replace(made, name=name, kind=kind, optional=optional, choices=choices)
    names = [parameter.name for parameter in found.values()]
    if len(set(names)) < len(names):
        raise TypeError(f"{cls.__name__}: every parameter needs a unique name, param(..., name=...), got {names}")
    return found


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(param,))
def with_parameters(kind: Kind) -> Kind:
    """Make a class a frozen dataclass with the declarations of its parameters as ``PARAMETERS``."""
    kind.PARAMETERS = declared(kind)  # type: ignore[attr-defined]  # before dataclass() removes them from the class
    made: Kind = dataclass(frozen=True, kw_only=True)(kind)  # type: ignore[assignment]
    return made


def _kinds(cls: type, fields: Iterable[str]) -> dict[str, tuple[str, bool, tuple[str, ...]]]:
    """The types of attributes by their annotations: (kind, whether None is allowed, choices)."""
    own = {attribute: cls.__annotations__[attribute] for attribute in fields if attribute in cls.__annotations__}
    body = type(cls.__name__, (), {"__annotations__": own, "__module__": cls.__module__})
    found = {}
    for attribute, annotation in typing.get_type_hints(body).items():
        optional = type(None) in typing.get_args(annotation)
        kinds = [k for k in typing.get_args(annotation) if k is not type(None)] if optional else [annotation]
        kind = kinds[0].__name__ if isinstance(kinds[0], type) and not typing.get_args(kinds[0]) else str(kinds[0])
        kind = _MODULES.sub("", kind)  # "tuple[Stage, ...]", not "tuple[nucleate.sampling.stage.Stage, ...]"
        choices = typing.get_args(kinds[0]) if typing.get_origin(kinds[0]) is typing.Literal else ()
        kind = "str" if choices else kind
        if kind not in CONVERT:
            raise TypeError(f"{cls.__name__}.{attribute}: a parameter is one of {', '.join(CONVERT)}, not {kind}")
        found[attribute] = kind, optional, choices
    return found


def unknown(name: str, known: Iterable[str], what: str = "parameter", near: Iterable[str] = ()) -> ParameterError:
    """The error for an unknown name. It suggests the closest names, and lists all names if they are few.

    near: suggestions to make instead.
    """
    names = sorted({*known})
    near = [*near] or difflib.get_close_matches(name, names, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    if len(names) <= MAX_LISTED:
        hint += f" (known: {', '.join(names)})"
    return ParameterError(name, f"unknown {what} {shown(name)}{hint}")


def invalid_value(name: str, allowed: str, value: object, field: str = "") -> ParameterError:
    """The error for an invalid value. name: its place. field: the parameter that it belongs to, if different."""
    return ParameterError(field or name, f"{name} must be {allowed}, got {shown(value)}")


def entries(value: Any, known: Collection[str], where: str = "", field: str = "", *, strict: bool = False) -> Any:
    """The entries of a JSON object that are not null. Raises ParameterError for another value or an unknown entry.

    where: its place in the request body; "": it is the body. field: the top-level field that it belongs to. strict: an
    unknown entry is an error also if it is null.
    """
    if not isinstance(value, Mapping):
        raise invalid_value(where or "body", "an object" if where else "a JSON object", value, field)
    given = {name: item for name, item in value.items() if item is not None}
    for name in value if strict else given:
        if name not in known:
            error = unknown(str(name)[:100], known, f"field of {where}" if where else "field")
            raise ParameterError(field, str(error)) if field else error
    return given


def read_json(text: str, field: str) -> Any:
    """Parse JSON. Raises ParameterError, also for NaN, duplicate names in an object, and excessive depth."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except (ValueError, TypeError, RecursionError) as error:
        raise ParameterError(field, f"{field} must be JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate name {shown(next(name for name in made if names.count(name) > 1))}")
    return made


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")
