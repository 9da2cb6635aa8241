"""Describes a Python function as a tool: its signature becomes a JSON schema, its docstring the descriptions."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Union

from nucleate.parameters.parameter import ParameterError

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
    schema, definitions = _object(properties, required), dict[str, Any]()
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
        fields = {
            name: explicit.get(typing.get_origin(hint), name in kind.__required_keys__) for name, hint in hints.items()
        }
    if fields is None:
        raise ParameterError("tools", f"{where}: the type {_shown(kind)} has no JSON schema")
    properties = {name: type_schema(hints[name], f"{where}.{name}", depth - 1) for name in fields}
    return _object(properties, [name for name, is_required in fields.items() if is_required])


def _without_definitions(value: Any, found: dict[str, Any]) -> Any:
    """Return a schema without the definitions in it, which are added to ``found``: references are to the root."""
    if isinstance(value, list):
        return [_without_definitions(item, found) for item in value]
    if not isinstance(value, dict):
        return value
    found.update(value.get("$defs", {}))
    return {name: _without_definitions(item, found) for name, item in value.items() if name != "$defs"}


def _object(properties: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**properties},
        "required": [*required],
        "additionalProperties": False,
    }


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
