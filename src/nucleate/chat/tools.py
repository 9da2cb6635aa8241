"""``Tool``: a function that a model can call, from an OpenAI tool object or a Python function."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters, digits
from typing import Any, Final

from nucleate.chat.function_schema import describe_function
from nucleate.parameters.converters import shown
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError, unknown

MAX_NAME: Final = 128
NAME_CHARACTERS: Final = frozenset(ascii_letters + digits + "_-")
NAME: Final = f"[a-zA-Z0-9_-]{{1,{MAX_NAME}}}"
"""The pattern of a tool's name. OpenAI's API allows 64 characters, Anthropic's 128."""
_ALLOWED_NAME: Final = f"1 to {MAX_NAME} letters, digits, - and _"
MAX_TOOLS: Final = 128
"""Maximum number of tools of a request, as in OpenAI's API."""
NO_PARAMETERS: Final = {"type": "object", "properties": {}}
"""The schema of a tool without ``parameters``."""
_OF_NO_PROPERTIES: Final = {"type", "properties", "required", "title", "description", "$schema"}
"""Keywords that allow no property."""


@with_suggestions
@dataclass(frozen=True)
class Tool:
    """A function that a model can call.

    parameters_json: the JSON schema of its arguments, an object, as JSON text. strict: an error if the schema cannot be
    enforced; otherwise, the arguments are then any JSON object. Raises ParameterError.
    """

    name: str
    description: str = ""
    parameters_json: str = json.dumps(NO_PARAMETERS)
    strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments."""
        schema: dict[str, Any] = json.loads(self.parameters_json)
        return schema

    @property
    def enforced_schema(self) -> Mapping[str, Any]:
        """The JSON schema that the arguments of a call follow: a tool whose list of properties is empty takes none.

        So OpenAI defines a tool without ``parameters``. By the schema alone, a model might invent properties.
        """
        schema = self.schema
        closes = schema.keys() <= _OF_NO_PROPERTIES and schema.get("properties") == {} and not schema.get("required")
        return {**schema, "additionalProperties": False} if closes else schema

    def to_dict(self) -> dict[str, Any]:
        """Return the OpenAI tool object, as chat templates expect it."""
        about = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": self.schema}}

    @classmethod
    def from_dict(cls, value: Any, where: str = "tool") -> Tool:
        """Make a tool. value: a tool object of OpenAI's API. where: its place, for errors. Raises ParameterError."""
        given = _object(value, where, ("type", "function"))
        if given.get("type", "function") != "function":
            raise _error(f"{where}.type", "function", given["type"])
        where = f"{where}.function"
        given = _object(given.get("function"), where, ("name", "description", "parameters", "strict"))
        name, description = given.get("name"), given.get("description", "")
        parameters, strict = given.get("parameters", NO_PARAMETERS), given.get("strict", False)
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise _error(f"{where}.name", _ALLOWED_NAME, name)
        if not isinstance(description, str):
            raise _error(f"{where}.description", "a string", description)
        if not isinstance(strict, bool):
            raise _error(f"{where}.strict", "true or false", strict)
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise _error(f"{where}.parameters", "a JSON schema of type object", parameters)
        try:
            text = json.dumps({"type": "object", **parameters}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ParameterError("tools", f"{where}.parameters must be JSON: {str(error)[:100]}") from None
        try:
            json.dumps([description, parameters], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ParameterError("tools", f"{where} is not valid Unicode: it has a lone surrogate") from None
        return cls(name, description, text, strict)

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> Tool:
        """Make a tool from a Python function: its signature and docstring. Raises ParameterError."""
        name, description, schema = describe_function(function)
        if not re.fullmatch(NAME, name):
            raise _error("the name of a function", _ALLOWED_NAME, name)
        return cls(name, description, json.dumps(schema))


def read_tools(value: Any) -> tuple[Tool, ...]:
    """Return tools given as a list of OpenAI tool objects, Python functions and Tools. Raises ParameterError."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _error("tools", "a list", value)
    if len(value) > MAX_TOOLS:
        raise ParameterError("tools", f"tools has {len(value)} entries, but at most {MAX_TOOLS} are allowed")
    made = tuple(_read_tool(one, f"tools[{index}]") for index, one in enumerate(value))
    names = [tool.name for tool in made]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ParameterError("tools", f"tools[{index}]: there is another tool {name}")
    return made


def _read_tool(value: Any, where: str) -> Tool:
    if isinstance(value, Tool):
        return value
    return Tool.from_function(value) if callable(value) else Tool.from_dict(value, where)


def _object(value: Any, where: str, known: Sequence[str]) -> dict[str, Any]:
    """Return the entries of an object that are not null."""
    if not isinstance(value, Mapping):
        raise _error(where, "an object", value)
    for name in value:
        if name not in known:
            raise ParameterError("tools", str(unknown(str(name)[:100], known, f"field of {where}")))
    return {name: item for name, item in value.items() if item is not None}


def _error(where: str, allowed: str, value: object) -> ParameterError:
    return ParameterError("tools", f"{where} must be {allowed}, got {shown(value)}")
