"""Flags for every sampling parameter, made from the parameters themselves; and those that name the model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from typing import Any

from nucleate.core.parameter import Parameter, unknown
from nucleate.params import FIELDS, SamplingParams


def add_sampling(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add a flag per field of SamplingParams. Flags that are not given leave the model's recommendation."""
    title = "sampling parameters (what a model recommends in its generation_config.json goes before these defaults)"
    group = parser.add_argument_group(title)
    for name, parameter in FIELDS.items():
        if name not in without:
            _add(group, name.replace("_", "-"), parameter)


def _add(group: Any, name: str, parameter: Parameter) -> None:
    shared: dict[str, Any] = {"dest": f"param_{parameter.name}", "default": None}
    if parameter.kind == "bool":  # the flag is for what is not the default
        flag, value = (f"--no-{name}", False) if parameter.default else (f"--{name}", True)
        group.add_argument(
            flag, action="store_const", const=value, help=f"{'turn off: ' * (not value)}{parameter.help}", **shared
        )
        return
    if parameter.kind in TEXTS:
        shared |= {"action": "append", "metavar": "TEXT"}
    else:
        shared["metavar"] = _METAVARS[parameter.kind]
    text = f"{parameter.help} [{parameter.allowed}; default {shown(parameter.default)}]"
    group.add_argument(f"--{name}", help=text.replace("%", "%%"), **shared)


def shown(default: Any) -> str:
    """A default in words."""
    if isinstance(default, bool):
        return str(default).lower()
    return str(default) if isinstance(default, str) else f"{default:g}" if default or default == 0 else "none"


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a model and how it runs."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="MODEL", help="a folder or a Hugging Face id; without it, the embedded model")
    group.add_argument("--device", metavar="DEVICE", default="auto", help='"auto", "cpu", "cuda", "cuda:1"...')
    group.add_argument("--dtype", metavar="DTYPE", default="auto", help='"auto", "float32", "bfloat16", "float16"')
    group.add_argument("--runtime", metavar="RUNTIME", default="auto", help='"auto", "numpy" or "torch"')


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters given as flags, parsed and checked."""
    values = {}
    for name, parameter in FIELDS.items():
        text = getattr(arguments, f"param_{name}", None)
        if text is not None:
            values[name] = parse(parameter, text)
    return values


def parse(parameter: Parameter, text: Any) -> Any:
    """The value of a parameter as written on a command line. Raises ParameterError."""
    try:
        return parameter.check(_PARSE[parameter.kind](text) if parameter.kind in _PARSE else text)
    except ValueError:
        raise parameter.error(text) from None  # as it was written, not as it was read


def assign(params: SamplingParams, name: str, text: str) -> SamplingParams:
    """The parameters with one of them set from text, as ``/set`` does. Raises ParameterError."""
    name = name.replace("-", "_")
    if name not in FIELDS:
        raise unknown(name, FIELDS)
    kind = FIELDS[name].kind
    return params.replace(**{name: parse(FIELDS[name], _READ[kind](text) if kind in _READ else text)})


def _switch(text: str) -> Any:
    return {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}.get(text.lower(), text)


def _integer(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


def _integers(text: str) -> tuple[int, ...] | None:
    return None if text.lower() == "none" else tuple(int(part) for part in text.split(","))


def _table(text: str) -> dict[int, float]:
    pairs = [part.split("=") for part in text.split(",")]
    table = {int(token): float(value) for token, value in pairs}
    if len(table) < len(pairs):
        raise ValueError("a token is there twice")
    return table


def _names(text: str) -> Any:
    """One name, or a list of them; a list of one ends with a comma."""
    return tuple(name.strip() for name in text.removesuffix(",").split(",")) if "," in text else text


TEXTS = ("tuple[str, ...]", "tuple[str | tuple[int, ...], ...]")
"""The kinds whose flag may be given several times, a text each."""

_PARSE: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "int": _integer,
    "tuple[int, ...]": _integers,
    "Mapping[int, float]": _table,
    "str | tuple[str, ...]": _names,
}
_READ: dict[str, Callable[[str], Any]] = {"bool": _switch, **dict.fromkeys(TEXTS, lambda text: (text,))}
_METAVARS = {
    "str": "NAME",
    "str | tuple[str, ...]": "NAME,...",
    "float": "NUMBER",
    "int": "INTEGER",
    "tuple[int, ...]": "ID,ID...",
    "Mapping[int, float]": "ID=NUMBER,...",
}
