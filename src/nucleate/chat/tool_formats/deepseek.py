"""Calls of DeepSeek models: markers around each name and its arguments, which in V3 and R1 are a block of code."""

# ruff: noqa: RUF001  # the markers have full-width characters

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from nucleate.chat.reader import Emitter, Parsing, Reader
from nucleate.chat.tool_formats.tool_format import (
    Structure,
    ToolFormat,
    calls,
    end_call,
    read_arguments,
    separated,
    tag,
)
from nucleate.chat.tools import MAX_NAME, NAME_CHARACTERS, Tool

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_ENDS = ("\n```", CALL_END, CALL, CALLS_END)
KIND, CODE, CODE_END = "function", "```json", "```"


@final
class DeepSeek(ToolFormat):
    """blocks: whether arguments are in a block of code (V3, R1), or not (V3.1). The parser reads both forms."""

    arguments_are_text = True
    special_tokens = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)

    def __init__(self, *, blocks: bool) -> None:
        self._blocks = blocks

    def parse(self, reader: Reader, out: Emitter) -> Parsing[None]:
        while (marker := (yield from reader.until((CALLS, CALL, CALLS_END), out.content))) is not None:
            reader.record()
            yield from reader.spaces()
            if marker == CALLS_END:
                reader.recorded()
                out.marker()
                continue
            begins = marker == CALL or (yield from reader.literal(CALL)) is not None
            found = begins and (yield from _call(reader, out))
            if (yield from end_call(reader, out, marker + reader.recorded(), _ENDS, well_formed=found)):
                yield from reader.spaces()
                if (yield from reader.literal(CODE_END)) is not None:
                    yield from reader.spaces()
                yield from reader.literal(CALL_END)

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> Structure:
        tags = [
            tag(f"{CALL}{KIND}{SEPARATOR}{tool.name}\n{CODE}\n", tool, f"\n{CODE_END}{CALL_END}")
            if self._blocks
            else tag(f"{CALL}{tool.name}{SEPARATOR}", tool, CALL_END)
            for tool in tools
        ]
        content = separated(tags, "\n" if self._blocks else "", parallel=parallel)
        whole = {"type": "tag", "begin": CALLS, "content": content, "end": CALLS_END}
        return calls([whole], triggers=[CALLS], separator="", required=required, parallel=False)


def _call(reader: Reader, out: Emitter) -> Parsing[bool]:
    yield from reader.spaces()
    name = yield from reader.while_in(NAME_CHARACTERS, MAX_NAME)
    if not name or (yield from reader.literal(SEPARATOR)) is None:
        return False
    if (yield from reader.character()) == "{":
        return (yield from read_arguments(reader, out, name))
    name = yield from reader.while_in(NAME_CHARACTERS, MAX_NAME)
    if not name or not (yield from reader.spaces()) or (yield from reader.literal(CODE)) is None:
        return False
    return (yield from read_arguments(reader, out, name))
