"""Parsing shared by several request bodies: booleans, the model name, token ids, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError, unknown

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def reject_deep_nesting(read: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """Decorate a parser: it raises ParameterError instead of RecursionError for a deeply nested body."""

    @wraps(read)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        try:
            return read(*args, **kwargs)
        except RecursionError:
            raise ParameterError("body", "the body is nested too deeply") from None

    return wrapper


def read_bool(given: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Read a boolean field."""
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise invalid_value(name, "true or false", value)
    return value


def read_int(given: Mapping[str, Any], name: str, low: int, default: int = 0) -> int:
    """Read an integer field of 64 bits."""
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
        least = "-2**63" if low == -(2**63) else low
        raise invalid_value(name, f"an integer >= {least} and < 2**63", value)
    return value


def read_model(given: Mapping[str, Any]) -> str | None:
    """Read the model name."""
    model = given.get("model")
    if model is not None and (not isinstance(model, str) or not model):
        raise invalid_value("model", "a non-empty string", model)
    return model


def are_token_ids(value: Sequence[Any]) -> bool:
    """Return whether all entries are integers."""
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def json_equal(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; unlike in Python, 1 and true differ."""
    return type(value) is type(other) and value == other


def invalid_value(name: str, allowed: str, value: object, field: str = "") -> ParameterError:
    """Return the error for an invalid value. name: its place in the body. field: the top-level field, if different."""
    return ParameterError(field or name, f"{name} must be {allowed}, got {shown(value)}")


def unknown_field(name: str, known: Iterable[str], of: str = "") -> ParameterError:
    """Return the error for an unknown field, whose name is cut to a bounded length."""
    return unknown(name[:100], known, f"field of {of}" if of else "field")
