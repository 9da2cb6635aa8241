"""Calls of Hermes and Qwen models: a JSON object between ``<tool_call>`` and ``</tool_call>``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import final

from nucleate.chat.emitter import Emitter
from nucleate.chat.reader import Parsing, Reader
from nucleate.chat.tool_formats.tool_format import Structure, ToolFormat, calls, end_call, read_call, tag
from nucleate.chat.tools import Tool

START, END = "<tool_call>", "</tool_call>"


@final
class Hermes(ToolFormat):
    name = "hermes"
    special_tokens = (START, END)

    def parse(self, reader: Reader, out: Emitter) -> Parsing[None]:
        while (yield from reader.until((START,), out.content)) is not None:
            reader.record()
            found = (yield from reader.spaces()) and (yield from read_call(reader, out, ("arguments", "parameters")))
            if (yield from end_call(reader, out, START + reader.recorded(), (END, START), well_formed=found)):
                yield from reader.spaces()
                yield from reader.literal(END)

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> Structure:
        tags = [tag(f'{START}\n{{"name": {json.dumps(tool.name)}, "arguments": ', tool, f"}}\n{END}") for tool in tools]
        return calls(tags, triggers=[START], separator="\n", required=required, parallel=parallel)
