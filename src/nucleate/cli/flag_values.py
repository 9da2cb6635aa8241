"""Parses the values of flags: one kind of parameter each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from nucleate.cli.structured_flags import read_content, read_structured
from nucleate.parameters.parameter import Parameter, ParameterError, read_json, unknown
from nucleate.sampling.pipeline_format import KIND as PIPELINE
from nucleate.sampling_params import FIELDS, SamplingParams
from nucleate.structured_output.spec import StructuredOutputs


def read_values(arguments: argparse.Namespace, parameters: Mapping[str, Parameter] = FIELDS) -> dict[str, Any]:
    """Return the validated values of the flags that are given, by default of the sampling parameters."""
    values: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.kind == STRUCTURED:
            value: Any = read_structured(arguments)
        else:
            value = getattr(arguments, f"param_{parameter.name}", None)
        if value is not None:
            values[name] = value if isinstance(value, StructuredOutputs) else parse_value(parameter, value)
    return values


def parse_value(parameter: Parameter, text: Any) -> Any:
    """Parse the value of a parameter from a command line. Raises ParameterError."""
    try:
        return parameter.check(_PARSE[parameter.kind](text) if parameter.kind in _PARSE else text)
    except ValueError as error:
        if parameter.kind in (STRUCTURED, PIPELINE) and isinstance(
            error, ParameterError
        ):  # it names a part of the value
            raise
        raise parameter.error(text) from None  # with the text as written


def set_parameter(params: SamplingParams, name: str, text: str) -> SamplingParams:
    """Return the parameters with one of them set from text, as ``/set`` does. Raises ParameterError."""
    name = name.replace("-", "_")
    return params.override(**{name: parse_text(name, text)})


def parse_text(name: str, text: str) -> Any:
    """Parse the value of a sampling parameter from one text. Raises ParameterError."""
    if name not in FIELDS:
        raise unknown(name, FIELDS)
    kind = FIELDS[name].kind
    return parse_value(FIELDS[name], _FROM_TEXT[kind](text) if kind in _FROM_TEXT else text)


def _bool(text: str) -> Any:
    return {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}.get(text.lower(), text)


def _integer(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


def _integers(text: str) -> tuple[int, ...] | None:
    return None if text.lower() == "none" else tuple(int(part) for part in text.split(","))


def _table(text: str) -> dict[int, float]:
    pairs = [part.split("=") for part in text.split(",")]
    table = {int(token): float(value) for token, value in pairs}
    if len(table) < len(pairs):
        raise ValueError("a token id is repeated")
    return table


def _names(text: str) -> Any:
    """Parse one name, or a list of names; a list of one ends with a comma."""
    return tuple(name.strip() for name in text.removesuffix(",").split(",")) if "," in text else text


def _structured(text: str) -> StructuredOutputs | None:
    return None if text.lower() == "none" else StructuredOutputs.from_json(text)


def _pipeline(text: str) -> Any:
    """Parse stages separated by |, or the JSON list of ``SamplingParams.to_json``; ``@FILE`` reads them from a file."""
    text = read_content("pipeline", text).strip()
    return None if text.lower() == "none" else read_json(text, "pipeline") if text.startswith("[") else text


STRUCTURED = "StructuredOutputs"
"""The kind of parameter with several flags; ``/set`` takes it as JSON."""

REPEATABLE = ("tuple[str, ...]", "tuple[str | tuple[int, ...], ...]")
"""The kinds whose flag can be repeated, with one text each."""

_PARSE: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "int": _integer,
    "tuple[int, ...]": _integers,
    "Mapping[int, float]": _table,
    "str | tuple[str, ...]": _names,
    STRUCTURED: _structured,
    PIPELINE: _pipeline,
}
_FROM_TEXT: dict[str, Callable[[str], Any]] = {"bool": _bool, **dict.fromkeys(REPEATABLE, lambda text: (text,))}
