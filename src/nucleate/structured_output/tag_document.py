"""Reads the objects of a structural tag's document field by field, with errors that name the place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from nucleate.parameters.converters import shown
from nucleate.structured_output.tag_formats import reject

T = TypeVar("T")


class Fields:
    """The fields of one object. Reading a field removes it; ``done`` rejects the others. null counts as absent."""

    def __init__(self, value: Any, at: str) -> None:
        if not isinstance(value, Mapping):
            reject(at, f"must be an object, got {shown(value)}")
        self.given = {name: item for name, item in value.items() if item is not None}
        self.at = at

    def place(self, name: str) -> str:
        return f"{self.at}.{name}" if self.at else name

    def expect_type(self, name: str) -> None:
        if self.given.get("type") != name:
            reject(self.place("type"), f"must be {name!r}, got {shown(self.given.get('type'))}")
        del self.given["type"]

    def take(self, name: str) -> Any:
        if name not in self.given:
            reject(self.at, f"needs {name}")
        return self.given.pop(name)

    def text(self, name: str, *, empty: bool = False) -> str:
        return check_text(self.take(name), self.place(name), empty=empty)

    def flag(self, name: str) -> bool:
        value = self.given.pop(name, False)
        if not isinstance(value, bool):
            reject(self.place(name), f"must be true or false, got {shown(value)}")
        return value

    def number(self, name: str, minimum: int) -> int:
        value = self.take(name)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= 10**9:
            reject(self.place(name), f"must be an integer >= {minimum}, got {shown(value)}")
        return value

    def items(self, name: str, *, empty: bool = False) -> list[tuple[Any, str]]:
        """Return the items of a list with their places."""
        value = self.take(name)
        if not isinstance(value, list | tuple) or not (value or empty):
            reject(self.place(name), f"must be a non-empty list, got {shown(value)}")
        return [(item, f"{self.place(name)}[{index}]") for index, item in enumerate(value)]

    def texts(self, name: str, *, optional: bool = False) -> tuple[str, ...]:
        if optional and name not in self.given:
            return ()
        return tuple(check_text(item, at) for item, at in self.items(name, empty=optional))

    def done(self, kind: Callable[..., T], **values: Any) -> T:
        """Reject the fields that were not read, and return the format."""
        for name in self.given:
            reject(self.at, f"unknown field {shown(name)}")
        return kind(self.at, **values)


def check_text(value: Any, at: str, *, empty: bool = False) -> str:
    """Return a value if it is a string of valid Unicode without NUL."""
    if not isinstance(value, str) or not (value or empty):
        reject(at, f"must be a {'' if empty else 'non-empty '}string, got {shown(value)}")
    if "\0" in value:
        reject(at, "must not contain the character NUL")
    try:
        value.encode()
    except UnicodeEncodeError:
        reject(at, "is not valid Unicode")
    return str.__str__(value)
