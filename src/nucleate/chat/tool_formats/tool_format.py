"""``ToolFormat``: how a family of models writes tool calls, and the shared part of their parsers and grammars."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from nucleate.chat.emitter import Emitter, call_id
from nucleate.chat.reader import Parsing, Reader
from nucleate.chat.tools import Tool

Structure = dict[str, Any]
"""A format of XGrammar's structural tags."""

MAX_KEY: Final = 64
"""Maximum length of a key in the JSON object of a call, in characters of JSON."""
MAX_HELD: Final = 16_384
"""Maximum length of arguments that come before the name of the tool, and of other values. They are held back."""


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

    def new_id(self) -> str:
        """Return a new id of a call."""
        return call_id()


def read_call(reader: Reader, out: Emitter, keys: Sequence[str]) -> Parsing[bool]:
    """Read a call as a JSON object with a name, and arguments under one of these keys. Returns whether it is one."""
    if (yield from reader.literal("{")) is None:
        return False
    name: str | None = None
    held: list[str] | None = None  # arguments before the name
    started = False
    while True:
        key = yield from _string(reader)
        if key is None or not (yield from reader.spaces()) or (yield from reader.literal(":")) is None:
            return False
        if key == "name" and name is None:
            name = yield from _string(reader)
            if name is None:
                return False
            if held is not None:
                if not out.start_call(name):
                    return False
                started = True
                out.arguments("".join(held))
        elif key in keys and not started and held is None:
            if not (yield from reader.spaces()) or (yield from reader.character()) != "{":
                return False
            if name is None:
                held = []
                if not (yield from reader.json(held.append, MAX_HELD)):
                    return False
            else:
                started = out.start_call(name)
                if not started or not (yield from reader.json(out.arguments)):
                    return False
        elif not (yield from reader.json(_ignore, MAX_HELD)):
            return False
        if not (yield from reader.spaces()):
            return False
        separator = yield from reader.literal(",", "}")
        if separator is None:
            return False
        if separator == "}":
            break
    if not started:  # a tool without parameters
        if name is None or not out.start_call(name):
            return False
        out.arguments("{}")
    return True


def read_arguments(reader: Reader, out: Emitter, name: str) -> Parsing[bool]:
    """Read the arguments of a call, a JSON object. Returns whether they are one."""
    if not (yield from reader.spaces()) or (yield from reader.character()) != "{" or not out.start_call(name):
        return False
    return (yield from reader.json(out.arguments))


def _string(reader: Reader) -> Parsing[str | None]:
    """Read a short JSON string, and white space before it."""
    parts: list[str] = []
    if not (yield from reader.spaces()) or (yield from reader.character()) != '"':
        return None
    if not (yield from reader.json(parts.append, MAX_KEY + 2)):
        return None
    return str(json.loads("".join(parts)))


def _ignore(_: str) -> None:
    """Drop text."""


def tag(begin: str, tool: Tool, end: str) -> Structure:
    """Return the format of a call: its arguments between two texts."""
    content = {"type": "json_schema", "json_schema": dict(tool.schema)}
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
