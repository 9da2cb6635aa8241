"""Finds public names without documentation.

A function describes each parameter, by its name or in words: ``prompt_ids`` is described by a text with "prompt" and
"ids". The fields of value classes are documented where they are declared.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import nucleate as nc
from generate.api import data_home, members, resolve
from generate.api_names import PAGES, WITHOUT_MEMBERS

_REFERENCE = re.compile(r"(?i)\barguments?(:| as) (in|there|for|those of)\b|\bas in ``|\bas ``|\bsame as ``")
"""A docstring that refers to the one of another function for the arguments."""


def undocumented() -> list[str]:
    """Return the public names on no page, and those without a docstring or with a parameter that is not described."""
    names = [name for one in PAGES for name in one.names]
    shown = {
        *names,
        *(member for name in names if inspect.ismodule(resolve(name)) for member in members(resolve(name))),
    }
    problems = [f"nucleate.{name} is on no page of the API reference" for name in {*nc.__all__} - {*shown, "stages"}]
    for name in names:
        thing = resolve(name)
        if inspect.ismodule(thing):
            for member in members(thing):
                problems += _of(f"{name}.{member}", getattr(thing, member))
        else:
            problems += _of(name, thing)
    return sorted(problems)


def _of(name: str, thing: Any) -> Iterator[str]:
    if inspect.isclass(thing):
        yield from _of_class(name, thing)
    elif inspect.isfunction(thing):
        yield from _of_function(name, thing, inspect.getdoc(thing) or "")
    else:
        try:
            data_home(name, thing)
        except LookupError as error:
            yield error.args[0]


def _of_class(name: str, kind: type[Any]) -> Iterator[str]:
    about = vars(kind).get("__doc__") or ""
    if not about or about.startswith(f"{kind.__name__}("):  # the signature, which dataclass and NamedTuple write
        yield f"nucleate.{name} has no docstring"
    if name in WITHOUT_MEMBERS:
        return
    if "__init__" in vars(kind) and not dataclasses.is_dataclass(kind) and not getattr(kind, "_is_protocol", False):
        yield from _of_function(name, kind.__init__, about)
    for member, value in vars(kind).items():
        function = getattr(value, "fget", getattr(value, "func", getattr(value, "__func__", value)))
        if member.startswith("_") or not inspect.isfunction(function):
            continue
        if function.__doc__:
            yield from _of_function(f"{name}.{member}", function, function.__doc__, about)
        elif not inspect.getdoc(getattr(kind, member)):  # of a base class
            yield f"nucleate.{name}.{member} has no docstring"


def _of_function(name: str, function: Any, text: str, about: str = "") -> Iterator[str]:
    if not text:
        yield f"nucleate.{name} has no docstring"
    if not text or _REFERENCE.search(text):
        return
    given = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls", "_")]
    for parameter in given if len(given) > 1 else ():
        if parameter.kind is not parameter.VAR_KEYWORD and not _mentions(f"{text}\n{about}".lower(), parameter.name):
            yield f"nucleate.{name}: its docstring does not describe the parameter {parameter.name}"


def _mentions(text: str, name: str) -> bool:
    words = [word.rstrip("s").removesuffix("ed").lower() for word in name.split("_")]
    return re.search(rf"\b{re.escape(name.lower())}\b", text) is not None or all(word in text for word in words)
