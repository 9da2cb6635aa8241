"""``ToolFormat``: how a family of models writes tool calls, and the shared part of their grammars."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from nucleate.chat.emitter import Emitter, call_id
from nucleate.chat.reader import Parsing, Reader
from nucleate.chat.tools import Tool

Structure = dict[str, Any]
"""A format of XGrammar's structural tags."""


class ToolFormat(ABC):
    """A format of tool calls."""

    name: ClassVar[str]
    special_tokens: ClassVar[Sequence[str]] = ()
    """The markers that may be special tokens: they stay in the text that is parsed."""
    arguments_are_text: ClassVar[bool] = False
    """Whether the chat template expects the arguments of earlier calls as text instead of an object."""
    in_template: ClassVar[bool] = True
    """Whether the chat template describes the tools."""

    @abstractmethod
    def parse(self, reader: Reader, out: Emitter) -> Parsing[None]:
        """Read a whole output, from the end of its reasoning section on."""

    @abstractmethod
    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> Structure:
        """Return the format of an output with calls of these tools.

        required: at least one call, and nothing else. parallel: calls may follow each other.
        """

    def structure_or_answer(self, tools: Sequence[Tool], answer: Structure, *, parallel: bool) -> Structure:
        """Return the format of an output with calls only, or with an answer of another format."""
        return {"type": "or", "elements": [self.structure(tools, required=True, parallel=parallel), answer]}

    def new_id(self) -> str:
        """Return a new id of a call."""
        return call_id()


def tag(begin: str, tool: Tool, end: str) -> Structure:
    """Return the format of a call: its arguments between two texts."""
    content = {"type": "json_schema", "json_schema": dict(tool.enforced_schema)}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def calls(
    tags: Sequence[Structure], *, triggers: Sequence[str], separator: str, required: bool, parallel: bool
) -> Structure:
    """Return the format of calls: with free text around them, or (required) at least one call and nothing else."""
    if not required:
        return {
            "type": "triggered_tags",
            "triggers": [*triggers],
            "tags": [*tags],
            "at_least_one": False,
            "stop_after_first": not parallel,
        }
    return separated(tags, separator, parallel=parallel)


def separated(tags: Sequence[Structure], separator: str, *, parallel: bool) -> Structure:
    """Return the format of at least one tag. parallel: several, with a separator between them."""
    return {
        "type": "tags_with_separator",
        "tags": [*tags],
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
