"""Builds the constraint of a chat: tool calls and structured output, after the reasoning section."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Final

from nucleate.chat.reasoning import ReasoningFormat
from nucleate.chat.tool_formats.tool_format import Structure, ToolFormat
from nucleate.chat.tools import Tool, ToolUse
from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.spec import StructuredOutputs
from nucleate.structured_output.structural_tag import format_of

Check = Callable[[StructuredOutputs], object]
"""Compiles a constraint. Raises ParameterError."""

MAX_SECONDS: Final = 5.0
"""Maximum time to find the schemas that cannot be enforced."""
_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True)
class ChatConstraint:
    """What constrains the outputs of a chat.

    given: the structured output of the request. reasoning: the format of the section that an output may begin with;
    opened: the prompt has opened it. special_markers: its markers that are special tokens, and so never in free text.
    """

    use: ToolUse
    given: StructuredOutputs | None
    tool_format: ToolFormat | None
    reasoning: ReasoningFormat | None
    opened: bool
    special_markers: Collection[str] = ()

    @property
    def constrains(self) -> bool:
        return self.given is not None or bool(self.use.callable_tools)

    def resolve(self, check: Check) -> StructuredOutputs | None:
        """Return a constraint that can be enforced. check: compiles it. Raises ParameterError.

        If the schema of a tool that is not strict cannot be enforced, its keywords that can be are enforced, and the
        validation of the outputs names the others; if none can be, its arguments are any JSON object. If calls are
        optional and no tool is strict, they are not constrained if the grammar engine does not support the model.
        """
        tools = self.use.callable_tools
        if not tools:
            if self.given is not None and self.reasoning is not None:
                check(self.given)  # its errors name the places in what was given
            return self.spec()
        try:
            spec = self.spec()
            if spec is not None:
                check(spec)
        except ParameterError:
            return self._relaxed(check)
        return spec

    def _relaxed(self, check: Check) -> StructuredOutputs | None:
        deadline = time.monotonic() + MAX_SECONDS
        if self.given is not None:
            check(self.given)  # only the schemas of tools are relaxed
        tools = [_enforceable(tool, check, deadline) for tool in self.use.tools]
        spec = replace(self, use=replace(self.use, tools=tuple(tools))).spec()
        spec = None if spec is None else replace(spec, on_unsupported="ignore")
        is_optional = self.use.mode == "auto" and self.given is None and not any(tool.strict for tool in tools)
        try:
            if spec is not None:
                check(spec)
        except ParameterError as error:
            if is_optional:
                return None
            raise ParameterError("tools", f"tools cannot be enforced: {error}") from None
        return spec

    def spec(self) -> StructuredOutputs | None:
        """Return the constraint, which may be impossible to enforce."""
        structure = self._structure()
        if structure is None:
            return self.given
        changes: dict[str, Any] = {"structural_tag": {"type": "structural_tag", "format": structure}}
        if self.given is not None:
            changes |= {name: getattr(self.given, name) for name in ("whitespace", "on_unsupported", "strict_keywords")}
        return StructuredOutputs(**changes)

    def _structure(self) -> Structure | None:
        """The format of a whole output; None if it is ``given``."""
        tools, given, reasoning = self.use.callable_tools, self.given, self.reasoning
        if not tools and (given is None or reasoning is None or given.grammar_lazy):
            return None
        required = bool(tools) and self.use.mode == "required"
        in_messages = reasoning is not None and reasoning.in_messages
        answer = None if given is None else _answer(given, in_messages=in_messages)
        if not tools or self.tool_format is None:
            structure = answer
        else:
            parallel = self.use.parallel
            if not required and answer is not None:
                structure = self.tool_format.structure_or_answer(tools, answer, parallel=parallel)
            else:
                structure = self.tool_format.structure(tools, required=required, parallel=parallel)
            if not required and answer is None and not (self.opened or in_messages or self.special_markers):
                return structure  # it allows any text before the calls
        if structure is None or reasoning is None:
            return structure
        spaced = required if given is None else given.kind.startswith("json")
        return reasoning.before(structure, opened=self.opened, spaced=spaced, special=self.special_markers)


def _answer(given: StructuredOutputs, *, in_messages: bool) -> Structure:
    """The format of an answer with structured output."""
    structure: Structure
    if given.grammar_lazy:
        raise ParameterError("grammar_lazy", "grammar_lazy cannot be combined with tools")
    if given.kind.startswith("json"):
        structure = {"type": "json_schema", "json_schema": given.schema}
    elif given.kind == "regex":
        structure = {"type": "regex", "pattern": given.regex}
    elif given.choice is not None:
        structure = {"type": "or", "elements": [{"type": "const_string", "value": text} for text in given.choice]}
    elif given.kind == "grammar":
        structure = {"type": "grammar", "grammar": given.grammar}
    else:
        structure = format_of(given.to_dict()["structural_tag"])
    if not in_messages:
        return structure
    header = {"type": "const_string", "value": "<|channel|>final<|message|>"}
    return {"type": "sequence", "elements": [header, structure]}


def _enforceable(tool: Tool, check: Check, deadline: float) -> Tool:
    """Return a tool, with any object as its arguments if nothing of its schema can be enforced and it is not strict."""
    if time.monotonic() > deadline:
        raise ParameterError("tools", f"the schemas of the tools took longer than {MAX_SECONDS} s to compile")
    try:
        check(StructuredOutputs(json_schema=tool.parameters_json, on_unsupported="error" if tool.strict else "ignore"))
    except ParameterError as error:
        if tool.strict:
            raise ParameterError("tools", f"the parameters of the strict tool {tool.name}: {error}") from None
        return replace(tool, parameters_json=_ANY_OBJECT)
    return tool
