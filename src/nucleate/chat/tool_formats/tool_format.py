"""``ToolFormat``: how a family of models writes tool calls, and what the formats share.

These are parts of their grammars, and the parser of a call that is a JSON object with a name and arguments.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final, final

from nucleate.chat.reader import Emitter, Parsing, Reader, call_id
from nucleate.chat.tools import Tool

Structure = dict[str, Any]
"""A format of XGrammar's structural tags."""


class ToolFormat(ABC):
    """A format of tool calls."""

    special_tokens: ClassVar[Sequence[str]] = ()
    """The markers that may be special tokens: they stay in the text that is parsed."""
    arguments_are_text: ClassVar[bool] = False
    """Whether the chat template expects the arguments of earlier calls as text instead of an object."""
    in_template: bool = True
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


MAX_KEY: Final = 64
"""Maximum length of a key in the object, in characters of JSON."""
MAX_HELD: Final = 16_384
"""Maximum length of arguments that come before the name of the tool, and of other values. They are held back."""


def read_call(reader: Reader, out: Emitter, keys: Sequence[str]) -> Parsing[bool]:
    """Read a call as a JSON object with a name, and arguments under one of these keys. Returns whether it is one."""
    return _CallObject(reader, out, keys).read()


def read_arguments(reader: Reader, out: Emitter, name: str) -> Parsing[bool]:
    """Read the arguments of a call, a JSON object, and white space before it. Returns whether they are one."""
    if not (yield from reader.spaces()):
        return False
    first = yield from reader.character()
    if not (first == "{" or (reader.cut and not first)) or not out.start_call(name):
        return False
    if not (yield from reader.json(out.arguments)):
        return False
    out.has_arguments = True
    return True


def end_call(
    reader: Reader, out: Emitter, raw: str, ends: Sequence[str], *, well_formed: bool, is_marked: bool = True
) -> Parsing[bool]:
    """End an attempt to read a call. Returns whether it is a call.

    raw: its text. A call that has started stays one, because its beginning may have been sent already: the text up to
    the next of the markers ``ends`` belongs to it. Otherwise ``raw`` is text of the answer. It is dropped if it is cut
    and ``is_marked`` as a call.
    """
    if not out.in_call:
        if not (reader.cut and is_marked):
            out.not_a_call(raw)
        return False
    if not well_formed:
        yield from reader.until(ends, ignore if out.has_arguments else out.arguments, read=False)
    out.end_call()
    return True


@final
class _CallObject:
    def __init__(self, reader: Reader, out: Emitter, keys: Sequence[str]) -> None:
        self._reader, self._out, self._keys = reader, out, keys
        self._name: str | None = None
        self._held: list[str] = []  # arguments before the name
        self._started = False

    def read(self) -> Parsing[bool]:
        well_formed = yield from self._read()
        if not well_formed and self._reader.cut and self._name is not None and not self._started:
            self._out.start_call(self._name)
        return well_formed

    def _read(self) -> Parsing[bool]:
        separator = yield from self._reader.literal("{")
        while separator is not None and separator != "}":
            if not (yield from self._member()) or not (yield from self._reader.spaces()):
                return False
            separator = yield from self._reader.literal(",", "}")
        if separator is None or self._name is None:
            return False
        if not self._started:  # a tool without parameters
            return self._start(["{}"])
        return True

    def _member(self) -> Parsing[bool]:
        """Read a key and its value."""
        key = yield from self._string()
        if key is None or not (yield from self._reader.spaces()) or (yield from self._reader.literal(":")) is None:
            return False
        if key == "name" and self._name is None:
            self._name = yield from self._string()
            return self._name is not None and (not self._held or self._start(self._held))
        if key in self._keys and not self._started and not self._held:
            return (yield from self._arguments())
        return (yield from self._reader.json(ignore, MAX_HELD))

    def _arguments(self) -> Parsing[bool]:
        if self._name is not None:
            self._started = True
            return (yield from read_arguments(self._reader, self._out, self._name))
        if not (yield from self._reader.spaces()) or (yield from self._reader.character()) != "{":
            return False
        return (yield from self._reader.json(self._held.append, MAX_HELD))

    def _start(self, arguments: Sequence[str]) -> bool:
        self._started = self._name is not None and self._out.start_call(self._name)
        if self._started:
            self._out.arguments("".join(arguments))
            self._out.has_arguments = True
        return self._started

    def _string(self) -> Parsing[str | None]:
        """Read a short JSON string, and white space before it."""
        parts: list[str] = []
        if not (yield from self._reader.spaces()) or (yield from self._reader.character()) != '"':
            return None
        if not (yield from self._reader.json(parts.append, MAX_KEY + 2)):
            return None
        return str(json.loads("".join(parts)))


def ignore(_: str) -> None:
    """Drop text."""
