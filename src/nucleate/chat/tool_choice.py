"""``ToolChoice``: whether and which tools a model may or must call, as in OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from nucleate.chat.tools import Tool, read_tools
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError

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

    def with_tools(self, tools: Sequence[Tool]) -> ToolUse:
        """Return the same choice for other tools of the same names."""
        return replace(self, tools=tuple(tools))

    @classmethod
    def read(cls, tools: Any, tool_choice: Any = None, parallel_tool_calls: Any = None) -> ToolUse:
        """Read OpenAI's fields; None: absent. tools: also Python functions and Tools.

        tool_choice: "none", "auto", "required", ``{"type": "function", "function": {"name": ...}}``, the name of a tool
        or OpenAI's ``allowed_tools``; by default "auto" if there are tools. Raises ParameterError.
        """
        made = () if tools is None else read_tools(tools)
        parallel = True if parallel_tool_calls is None else parallel_tool_calls
        if not isinstance(parallel, bool):
            message = f"parallel_tool_calls must be true or false, got {shown(parallel)}"
            raise ParameterError("parallel_tool_calls", message)
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
        raise ParameterError("tool_choice", f"{where} must be {allowed}, got {shown(value)}")
    return mode, [_name(tool, f"{where}.tools[{index}]") for index, tool in enumerate(tools)]


def _name(value: Any, where: str) -> str:
    """Return the name of a chosen tool."""
    name = value
    if isinstance(value, Mapping) and value.get("type", "function") == "function":
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        example = '{"type": "function", "function": {"name": ...}}'
        raise ParameterError(
            "tool_choice", f"{where} must be one of {', '.join(MODES)}, or {example}, got {shown(value)}"
        )
    return name


def _check_given(tools: Sequence[Tool], choice: str, *names: str) -> None:
    if not tools:
        raise ParameterError("tool_choice", f"tool_choice {shown(choice)} needs tools")
    known = [tool.name for tool in tools]
    for name in names:
        if name not in known:
            found = ", ".join(known[:20])
            raise ParameterError("tool_choice", f"tool_choice names {shown(name)}, but the tools are {found}")
