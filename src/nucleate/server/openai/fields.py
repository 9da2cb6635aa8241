"""What fields of several bodies have in common: switches, names, token ids. Knows no body as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError, unknown

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def guarded(read: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """The same reader, which raises ParameterError instead of RecursionError, of an error message at the latest."""

    @wraps(read)
    def guarding(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        try:
            return read(*args, **kwargs)
        except RecursionError:
            raise ParameterError("body", "the body is nested too deeply") from None

    return guarding


def read_switch(given: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A field that is true or false."""
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return value


def read_model(given: Mapping[str, Any]) -> str | None:
    """The model that a body names."""
    model = given.get("model")
    if model is not None and (not isinstance(model, str) or not model):
        raise wrong("model", "a non-empty string", model)
    return model


def are_ids(value: Sequence[Any]) -> bool:
    """Whether all are integers; not whether there are such tokens."""
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def same(value: Any, other: Any) -> bool:
    """Whether two JSON values are the same; in Python 1 is true too."""
    return type(value) is type(other) and value == other


def wrong(name: str, allowed: str, value: object, field: str = "") -> ParameterError:
    """The error for a value of another kind. name: its place in the body. field: that in which it is, if not itself."""
    return ParameterError(field or name, f"{name} must be {allowed}, got {shown(value)}")


def unknown_field(name: str, known: Iterable[str], of: str = "") -> ParameterError:
    """The error for a name that is no field, cut: the nearest one is not looked for at any length."""
    return unknown(name[:100], known, f"field of {of}" if of else "field")
