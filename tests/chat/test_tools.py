"""``Tool``: from OpenAI objects and from Python functions."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict, Union

import pytest

import nucleate as nc
from nucleate.chat.tools import MAX_TOOLS, ToolUse, read_tools

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "Do.", "parameters": OBJECT, "strict": True}}


STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    """The schema of an object with these properties only."""
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


class Place(TypedDict):
    city: str
    country: NotRequired[str]


@dataclass
class Span:
    start: int
    end: int = 5
    tags: list[str] = field(default_factory=list)


@dataclass
class Loop:
    inner: Loop | None = None


def get_weather(city: str, unit: Literal["celsius", "kelvin"] = "celsius", days: int = 1) -> str:
    """Return the weather forecast.

    It is for a city.

    Args:
        city (str): The name of the city,
            in English.
        unit: The unit: of temperature.

    Returns:
        A text.
    """
    return f"{city}{unit}{days}"


def test_a_function_with_a_docstring_of_googles_style() -> None:
    tool = nc.Tool.from_function(get_weather)
    assert (tool.name, tool.description, tool.strict) == (
        "get_weather",
        "Return the weather forecast.\n\nIt is for a city.",
        False,
    )
    assert tool.schema == closed(
        ["city"],
        city={"type": "string", "description": "The name of the city, in English."},
        unit={"enum": ["celsius", "kelvin"], "description": "The unit: of temperature.", "default": "celsius"},
        days={"type": "integer", "default": 1},
    )


def test_a_docstring_of_sphinxs_style() -> None:
    def add(a: float, b: float) -> float:
        """Add numbers.

        :param a: The first one.
        :param float b: The second one.
        :returns: their sum
        """
        return a + b

    tool = nc.Tool.from_function(add)
    assert tool.description == "Add numbers."
    about = {name: schema["description"] for name, schema in tool.schema["properties"].items()}
    assert about == {"a": "The first one.", "b": "The second one."}


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (str, STRING),
        (bool, {"type": "boolean"}),
        (int, INTEGER),
        (float, NUMBER),
        (None, {"type": "null"}),
        (Any, {}),
        (Optional[int], {"anyOf": [INTEGER, {"type": "null"}]}),  # noqa: UP045
        (int | None, {"anyOf": [INTEGER, {"type": "null"}]}),
        (Union[int, str], {"anyOf": [INTEGER, STRING]}),  # noqa: UP007
        (Literal[1, "a"], {"enum": [1, "a"]}),
        (list, {"type": "array"}),
        (list[str], {"type": "array", "items": STRING}),
        (Sequence[int], {"type": "array", "items": INTEGER}),
        (tuple[int, ...], {"type": "array", "items": INTEGER}),
        (
            tuple[int, str],
            {"type": "array", "prefixItems": [INTEGER, STRING], "items": False, "minItems": 2, "maxItems": 2},
        ),
        (dict, {"type": "object"}),
        (dict[str, int], {"type": "object", "additionalProperties": INTEGER}),
        (Mapping[str, Any], {"type": "object"}),
        (Annotated[int, "a number", 5], {"type": "integer", "description": "a number"}),
        (Unit, {"enum": ["celsius", "kelvin"]}),
        (Place, closed(["city"], city=STRING, country=STRING)),
        (Span, closed(["start"], start=INTEGER, end=INTEGER, tags={"type": "array", "items": STRING})),
    ],
)
def test_types(kind: Any, schema: dict[str, Any]) -> None:
    assert with_parameter(kind).schema["properties"]["x"] == schema


def with_parameter(kind: Any) -> nc.Tool:
    """A tool from a function whose parameter x has this type."""

    def f(x):  # type: ignore[no-untyped-def]
        pass

    f.__annotations__ = {"x": kind}
    return nc.Tool.from_function(f)


def test_a_pydantic_model_with_definitions() -> None:
    pydantic = pytest.importorskip("pydantic")
    inner = pydantic.create_model("Inner", a=(int, ...))
    outer = pydantic.create_model("Outer", b=(inner, ...))
    schema = with_parameter(list[outer]).schema
    assert schema["$defs"]["Inner"]["properties"]["a"]["type"] == "integer"
    assert schema["properties"]["x"]["items"]["properties"]["b"] == {"$ref": "#/$defs/Inner"}


class Custom:
    pass


@pytest.mark.parametrize("kind", [Custom, dict[int, str], bytes, complex, Loop, type[int]])
def test_types_without_a_schema_are_errors_that_name_the_parameter(kind: Any) -> None:
    with pytest.raises(nc.ParameterError, match="parameter x of the function f") as caught:
        with_parameter(kind)
    assert caught.value.field == "tools"


def test_signatures_that_are_not_called_by_name_are_errors() -> None:
    for function in (lambda *a: a, lambda **a: a, lambda a, /: a):
        function.__name__ = "f"
        with pytest.raises(nc.ParameterError, match="by its name"):
            nc.Tool.from_function(function)
    with pytest.raises(nc.ParameterError, match="name of a function"):
        nc.Tool.from_function(lambda a: a)


def test_a_method_has_no_self() -> None:
    class Shop:
        def price(self, name: str) -> float:
            """Return a price."""
            return len(name)

    assert list(nc.Tool.from_function(Shop().price).schema["properties"]) == ["name"]


def test_an_openai_tool_round_trips() -> None:
    tool = nc.Tool.from_dict(TOOL)
    assert tool == nc.Tool("f", "Do.", json.dumps(OBJECT), strict=True)
    assert tool.to_dict() == {"type": "function", "function": {"name": "f", "description": "Do.", "parameters": OBJECT}}
    plain = nc.Tool.from_dict({"type": "function", "function": {"name": "f", "parameters": None, "strict": None}})
    assert plain.schema == {"type": "object", "properties": {}}
    assert nc.Tool.from_dict({"function": {"name": "f", "parameters": {}}}).schema == {"type": "object"}


@pytest.mark.parametrize(
    ("tool", "place"),
    [
        (5, "tools[0]"),
        ({}, "tools[0].function"),
        ({"type": "web_search"}, "tools[0].type"),
        *(({"function": {"name": name}}, "tools[0].function.name") for name in ("a b", "x" * 129)),
        *(({"function": {"name": "f", name: 1}}, f"tools[0].function.{name}") for name in ("description", "strict")),
        *(
            ({"function": {"name": "f", "parameters": wrong}}, "tools[0].function.parameters")
            for wrong in ({"type": "string"}, {"a": float("nan")})
        ),
        ({"function": {"name": "f", "params": {}}}, "did you mean parameters?"),
    ],
)
def test_invalid_tools_are_named(tool: Any, place: str) -> None:
    with pytest.raises(nc.ParameterError) as caught:
        read_tools([tool])
    assert caught.value.field == "tools"
    assert place in str(caught.value)


def test_lists_of_tools_are_checked() -> None:
    assert [tool.name for tool in read_tools([TOOL, get_weather, nc.Tool("g")])] == ["f", "get_weather", "g"]
    for wrong in ({}, "f", 5, [TOOL] * 2, [nc.Tool(f"f{index}") for index in range(MAX_TOOLS + 1)]):
        with pytest.raises(nc.ParameterError):
            read_tools(wrong)


def chosen(choice: Any, parallel: Any = None) -> tuple[str, list[str], bool]:
    use = ToolUse.read([nc.Tool("f"), nc.Tool("g")], choice, parallel)
    assert len(use.tools) == 2
    return use.mode, [tool.name for tool in use.callable_tools], use.parallel


def test_tool_choices() -> None:
    assert chosen(None) == ("auto", ["f", "g"], True)
    assert chosen("none") == ("none", [], True)
    assert chosen("auto", parallel=False) == ("auto", ["f", "g"], False)
    assert chosen("required") == ("required", ["f", "g"], True)
    for name in ("g", {"type": "function", "function": {"name": "g"}}, {"type": "function", "name": "g"}):
        assert chosen(name) == ("required", ["g"], False)
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert chosen({"type": "allowed_tools", "allowed_tools": allowed}) == ("required", ["f"], True)
    assert chosen({"type": "allowed_tools", **allowed, "mode": "auto"}) == ("auto", ["f"], True)
    for tools in (None, []):
        for choice in (None, "none", "auto"):
            assert ToolUse.read(tools, choice) == ToolUse()


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        (None, "required", "needs tools"),
        ([], "f", "needs tools"),
        ([TOOL], "g", "names 'g', but the tools are f"),
        ([TOOL], {"type": "function"}, "must be one of none, auto, required"),
        ([TOOL], {"type": "other"}, "must be one of"),
        ([TOOL], 5, "must be one of"),
        ([TOOL], {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [{"name": "f"}]}}, "mode"),
        ([TOOL], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tools"),
    ],
)
def test_invalid_choices_are_named(tools: Any, choice: Any, words: str) -> None:
    with pytest.raises(nc.ParameterError, match=words) as caught:
        ToolUse.read(tools, choice)
    assert caught.value.field == "tool_choice"
