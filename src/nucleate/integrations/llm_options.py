"""The options of the models of the ``llm`` plug-in: one per sampling parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.cli.sampling_flags import parse_text
from nucleate.parameters.parameter import Parameter
from nucleate.sampling_params import FIELDS, plain

WITHOUT = ("n", "prompt_logprobs")
"""Fields that are no options: a response has one text."""

TYPES: Mapping[str, Any] = {"float": float, "int": int, "bool": bool, "str": str}


def options_class(base: type[Any]) -> type[Any]:
    """A subclass of the class ``Options`` of ``llm`` with a field per option. Values are checked."""
    from pydantic import Field, create_model, field_validator

    fields: dict[str, Any] = {
        name: (_type(parameter), Field(default=None, description=parameter.described))
        for name, parameter in FIELDS.items()
        if name not in WITHOUT
    }

    def check(value: Any, info: Any) -> Any:
        return checked(info.field_name, value)

    validators: dict[str, Any] = {"check": field_validator(*fields, mode="before")(check)}
    made: type[Any] = create_model("Options", __base__=base, __validators__=validators, **fields)
    return made


def _type(parameter: Parameter) -> Any:
    kind = TYPES.get(parameter.kind)
    return Any if kind is None else kind | None


def checked(name: str, value: Any) -> Any:
    """A value in plain JSON types, which ``llm`` logs. Text is parsed as on the command line. Raises ParameterError."""
    if value is None:
        return None
    return plain(parse_text(name, value) if isinstance(value, str) else FIELDS[name].check(value))


def given_values(options: Any) -> dict[str, Any]:
    found = options.model_dump(exclude_none=True)
    return {name: value for name, value in found.items() if name in FIELDS}
