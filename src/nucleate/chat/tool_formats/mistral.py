"""Calls of Mistral models: ``[TOOL_CALLS]`` with a JSON list, or (tokenizer v11 and later) before each call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import SystemRandom
from string import ascii_letters, digits
from typing import Final, final

from nucleate.chat.reader import Emitter, Parsing, Reader
from nucleate.chat.tool_formats.tool_format import (
    Structure,
    ToolFormat,
    calls,
    end_call,
    read_arguments,
    read_call,
    separated,
    tag,
)
from nucleate.chat.tools import MAX_NAME, NAME_CHARACTERS, Tool

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_LENGTH: Final = 9
"""The chat templates require ids of 9 letters and digits."""
_ALPHANUMERIC = frozenset(ascii_letters + digits)


@final
class Mistral(ToolFormat):
    """lists: whether calls are written as a list. The parser reads both forms."""

    special_tokens = (CALLS, CALL_ID, ARGUMENTS)

    def __init__(self, *, lists: bool = True) -> None:
        self._lists = lists

    def new_id(self) -> str:
        return "".join(SystemRandom().choices(ascii_letters + digits, k=ID_LENGTH))

    def parse(self, reader: Reader, out: Emitter) -> Parsing[None]:
        while (yield from reader.until((CALLS,), out.content)) is not None:
            reader.record()
            yield from reader.spaces()
            if (yield from reader.literal("[")) is None:
                found = yield from _named_call(reader, out)
                yield from end_call(reader, out, CALLS + reader.recorded(), (CALLS,), well_formed=found)
            else:
                yield from _list_of_calls(reader, out)

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> Structure:
        if not self._lists:
            tags = [tag(f"{CALLS}{tool.name}{ARGUMENTS}", tool, "") for tool in tools]
            return calls(tags, triggers=[CALLS], separator="", required=required, parallel=parallel)
        items = [tag(f'{{"name": {json.dumps(tool.name)}, "arguments": ', tool, "}") for tool in tools]
        content = separated(items, ", ", parallel=parallel)
        whole = {"type": "tag", "begin": f"{CALLS} [", "content": content, "end": "]"}
        return calls([whole], triggers=[CALLS], separator="", required=required, parallel=False)


def _list_of_calls(reader: Reader, out: Emitter) -> Parsing[None]:
    """Read calls until the end of the list. The text of the first one that fails is text of the answer."""
    before = CALLS
    while True:
        found = (yield from reader.spaces()) and (yield from read_call(reader, out, ("arguments", "parameters")))
        yield from end_call(reader, out, before + reader.recorded(), (CALLS,), well_formed=found)
        if not found:
            return
        yield from reader.spaces()
        reader.record()
        if (yield from reader.literal(",")) is None:
            reader.recorded()
            yield from reader.literal("]")
            return
        before = ""


def _named_call(reader: Reader, out: Emitter) -> Parsing[bool]:
    name = yield from reader.while_in(NAME_CHARACTERS, MAX_NAME)
    if not name:
        return False
    if (yield from reader.literal(CALL_ID)) and (yield from reader.while_in(_ALPHANUMERIC, MAX_NAME)) is None:
        return False
    yield from reader.literal(ARGUMENTS)
    return (yield from read_arguments(reader, out, name))
