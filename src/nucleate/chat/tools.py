"""The tools of a chat: ``Tool``, a function that a model can call, and ``ToolUse``, which of them it may or must call.

A tool is an OpenAI tool object or a Python function: its signature becomes a JSON schema, its docstring the
descriptions. The choice is that of OpenAI's API.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters, digits
from typing import Any, Final, Literal, Union

from nucleate.parameters.converters import shown
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError, entries, invalid_value

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
        given = entries(value, ("type", "function"), where, "tools", strict=True)
        if given.get("type", "function") != "function":
            raise invalid_value(f"{where}.type", "function", given["type"], "tools")
        where = f"{where}.function"
        known = ("name", "description", "parameters", "strict")
        given = entries(given.get("function"), known, where, "tools", strict=True)
        name, description = given.get("name"), given.get("description", "")
        parameters, strict = given.get("parameters", NO_PARAMETERS), given.get("strict", False)
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise invalid_value(f"{where}.name", _ALLOWED_NAME, name, "tools")
        if not isinstance(description, str):
            raise invalid_value(f"{where}.description", "a string", description, "tools")
        if not isinstance(strict, bool):
            raise invalid_value(f"{where}.strict", "true or false", strict, "tools")
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise invalid_value(f"{where}.parameters", "a JSON schema of type object", parameters, "tools")
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
            raise invalid_value("the name of a function", _ALLOWED_NAME, name, "tools")
        return cls(name, description, json.dumps(schema))


def read_tools(value: Any) -> tuple[Tool, ...]:
    """Return tools given as a list of OpenAI tool objects, Python functions and Tools. Raises ParameterError."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise invalid_value("tools", "a list", value, "tools")
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


MODES: Final = ("none", "auto", "required")


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request. Tools that may not be called are described to the model all the same.

    mode: "none" (no calls), "auto" (text, calls or both) or "required" (one call or more). callable_names: the tools
    that may be called; None: all. parallel: whether there may be several calls.
    """

    tools: tuple[Tool, ...] = ()
    mode: str = "none"
    callable_names: frozenset[str] | None = None
    parallel: bool = True

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.mode == "none":
            return ()
        return tuple(tool for tool in self.tools if self.callable_names is None or tool.name in self.callable_names)

    @classmethod
    def read(cls, tools: Any, tool_choice: Any = None, parallel_tool_calls: Any = None) -> ToolUse:
        """Read OpenAI's fields; None: absent. tools: also Python functions and Tools.

        tool_choice: "none", "auto", "required", ``{"type": "function", "function": {"name": ...}}``, the name of a tool
        or OpenAI's ``allowed_tools``; by default "auto" if there are tools. Raises ParameterError.
        """
        made = () if tools is None else read_tools(tools)
        parallel = True if parallel_tool_calls is None else parallel_tool_calls
        if not isinstance(parallel, bool):
            raise invalid_value("parallel_tool_calls", "true or false", parallel)
        if tool_choice is None:
            tool_choice = "auto" if made else "none"
        if tool_choice in ("none", "auto") and not made:
            return cls()
        if tool_choice in MODES:
            _check_given(made, tool_choice)
            return cls(made, tool_choice, None, parallel)
        if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
            allowed = tool_choice.get("allowed_tools", tool_choice)
            mode, names = _allowed(allowed)
            _check_given(made, names[0], *names)
            return cls(made, mode, frozenset(names), parallel)
        name = _name(tool_choice, "tool_choice")
        _check_given(made, name, name)
        return cls(made, "required", frozenset([name]), parallel=False)


def _allowed(value: Any) -> tuple[str, list[str]]:
    where = "tool_choice.allowed_tools"
    mode = value.get("mode", "auto") if isinstance(value, Mapping) else None
    tools = value.get("tools") if isinstance(value, Mapping) else None
    if mode not in MODES[1:] or not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        allowed = "an object with mode (auto or required) and tools (a list)"
        raise invalid_value(where, allowed, value, "tool_choice")
    return mode, [_name(tool, f"{where}.tools[{index}]") for index, tool in enumerate(tools)]


def _name(value: Any, where: str) -> str:
    """Return the name of a chosen tool."""
    name = value
    if isinstance(value, Mapping) and value.get("type", "function") == "function":
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        example = '{"type": "function", "function": {"name": ...}}'
        raise invalid_value(where, f"one of {', '.join(MODES)}, or {example}", value, "tool_choice")
    return name


def _check_given(tools: Sequence[Tool], choice: str, *names: str) -> None:
    if not tools:
        raise ParameterError("tool_choice", f"tool_choice {shown(choice)} needs tools")
    known = [tool.name for tool in tools]
    for name in names:
        if name not in known:
            found = ", ".join(known[:20])
            raise ParameterError("tool_choice", f"tool_choice names {shown(name)}, but the tools are {found}")


MAX_DEPTH: Final = 16
"""Maximum nesting of types."""
_PLAIN: Final[Mapping[Any, str]] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}
_LISTS = (list, tuple, set, frozenset, Sequence)
_MAPPINGS = (dict, Mapping)
_OTHER_SECTIONS = (
    *("return:", "returns:", "raises:", "yields:", "example:", "examples:", "note:", "notes:"),
    *(":return", ":raises", ":rtype"),
)
_HEADINGS = ("args:", "arguments:", "parameters:", "params:")


def describe_function(function: Callable[..., Any]) -> tuple[str, str, dict[str, Any]]:
    """Return the name, the description and the JSON schema of the parameters. Raises ParameterError."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError, NameError, AttributeError) as error:
        raise ParameterError("tools", f"the function {name} has no usable signature: {error}") from None
    description, about = _docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in parameters.values():
        where = f"parameter {parameter.name} of the function {name}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ParameterError("tools", f"{where} must be one that is passed by its name")
        schema = type_schema(hints.get(parameter.name, Any), where)
        if parameter.name in about:
            schema = {**schema, "description": about[parameter.name]}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif isinstance(parameter.default, str | bool | int | float | None):
            schema = {**schema, "default": parameter.default}
        properties[parameter.name] = schema
    schema, definitions = _object_schema(properties, required), dict[str, Any]()
    schema = _without_definitions(schema, definitions)
    return name, description, {**schema, **({"$defs": definitions} if definitions else {})}


def type_schema(kind: Any, where: str, depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Return the JSON schema of a type. where: its place, for errors. Raises ParameterError."""
    if not depth:
        raise ParameterError("tools", f"{where} has a type that is nested too deeply or contains itself")
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return {}
    if isinstance(kind, type) and kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if kind in _LISTS or origin in _LISTS:
        return _list_schema(origin or kind, arguments, where, depth)
    if kind in _MAPPINGS or origin in _MAPPINGS:
        return _mapping_schema(kind, arguments, where, depth)
    return _class_schema(kind, where, depth) if origin is None else _special_schema(kind, origin, where, depth)


def _special_schema(kind: Any, origin: Any, where: str, depth: int) -> dict[str, Any]:
    """The schema of a form of ``typing``."""
    arguments = typing.get_args(kind)
    if origin is Literal:
        return {"enum": [*arguments]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [type_schema(one, where, depth - 1) for one in arguments]}
    if origin in (typing.Annotated, typing.Required, typing.NotRequired):
        texts = [one for one in arguments[1:] if isinstance(one, str)]
        about = {"description": texts[0]} if texts else {}
        return {**type_schema(arguments[0], where, depth - 1), **about}
    raise ParameterError("tools", f"{where}: the type {_shown(kind)} has no JSON schema")


def _mapping_schema(kind: Any, arguments: Sequence[Any], where: str, depth: int) -> dict[str, Any]:
    if arguments and arguments[0] is not str:
        raise ParameterError("tools", f"{where}: the keys of a dict must be strings, got {_shown(kind)}")
    values = type_schema(arguments[1], where, depth - 1) if arguments else {}
    return {"type": "object", **({"additionalProperties": values} if values else {})}


def _list_schema(kind: Any, arguments: Sequence[Any], where: str, depth: int) -> dict[str, Any]:
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        items = [type_schema(one, where, depth - 1) for one in arguments]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items), "maxItems": len(items)}
    return {"type": "array", **({"items": type_schema(arguments[0], where, depth - 1)} if arguments else {})}


def _class_schema(kind: Any, where: str, depth: int) -> dict[str, Any]:
    """The schema of an enumeration, a dataclass, a TypedDict or a Pydantic model."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if hasattr(kind, "model_json_schema"):
        schema: dict[str, Any] = kind.model_json_schema()
        return schema
    fields: Mapping[str, bool] | None = None  # whether each is required
    hints = typing.get_type_hints(kind, include_extras=True) if isinstance(kind, type) else {}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        missing = dataclasses.MISSING
        fields = {
            field.name: field.default is missing and field.default_factory is missing
            for field in dataclasses.fields(kind)
            if field.init
        }
    elif typing.is_typeddict(kind):
        # ``__required_keys__`` is wrong for annotations that are strings.
        explicit = {typing.Required: True, typing.NotRequired: False}
        named = kind.__required_keys__
        fields = {name: explicit.get(typing.get_origin(hint), name in named) for name, hint in hints.items()}
    if fields is None:
        raise ParameterError("tools", f"{where}: the type {_shown(kind)} has no JSON schema")
    properties = {name: type_schema(hints[name], f"{where}.{name}", depth - 1) for name in fields}
    return _object_schema(properties, [name for name, is_required in fields.items() if is_required])


def _without_definitions(value: Any, found: dict[str, Any]) -> Any:
    """Return a schema without the definitions in it, which are added to ``found``: references are to the root."""
    if isinstance(value, list):
        return [_without_definitions(item, found) for item in value]
    if not isinstance(value, dict):
        return value
    found.update(value.get("$defs", {}))
    return {name: _without_definitions(item, found) for name, item in value.items() if name != "$defs"}


def _object_schema(properties: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    made = {"type": "object", "properties": {**properties}, "required": [*required]}
    return {**made, "additionalProperties": False}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description of a function, and those of its parameters (Google's or Sphinx's style)."""
    lines, about, last = [], dict[str, str](), ""
    in_arguments = False
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.lower() in _HEADINGS:
            in_arguments = True
        elif in_arguments or stripped.startswith(":param "):
            if line and not line[0].isspace() and not stripped.startswith(":param "):
                break  # another section
            before, colon, after = stripped.removeprefix(":param ").partition(":")
            words = before.partition("(")[0].split()  # Google: NAME (TYPE): TEXT. Sphinx: :param TYPE NAME: TEXT
            if colon and words and words[-1].isidentifier():
                last = words[-1]
                about[last] = after.strip()
            elif stripped and last:
                about[last] += f" {stripped}"
        elif stripped.lower().startswith(_OTHER_SECTIONS):
            break
        else:
            lines.append(line)
    return "\n".join(lines).strip(), about


def _shown(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))[:60]
