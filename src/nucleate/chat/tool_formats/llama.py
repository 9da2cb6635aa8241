"""Calls of Llama 3.1 and later: JSON objects separated by semicolons, possibly after ``<|python_tag|>``."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Final, final

from nucleate.chat.reader import Emitter, Parsing, Reader
from nucleate.chat.tool_formats.tool_format import Structure, ToolFormat, calls, end_call, read_call, tag
from nucleate.chat.tools import Tool

PYTHON_TAG: Final = "<|python_tag|>"
CALL: Final = '{"name":'
"""The start of a call after other text. At the start of an output, any object may be a call."""
_NAME_AT_END: Final = re.compile(r'"name"\s*:\s*(?:"([^"]*))?$')


@final
class Llama(ToolFormat):
    special_tokens = (PYTHON_TAG,)

    def parse(self, reader: Reader, out: Emitter) -> Parsing[None]:
        reader.record()
        yield from reader.spaces()
        out.content(reader.recorded())
        found = (yield from reader.character()) == "{"
        while found or (yield from reader.until((PYTHON_TAG, CALL), out.content, read=False)) is not None:
            reader.record()
            yield from reader.literal(PYTHON_TAG)
            found = (yield from reader.spaces()) and (yield from read_call(reader, out, ("parameters", "arguments")))
            raw, ends = reader.recorded(), (PYTHON_TAG, CALL)
            well_formed, found, marked = found, False, _is_marked(raw, out.names)
            if (yield from end_call(reader, out, raw, ends, well_formed=well_formed, is_marked=marked)):
                yield from reader.spaces()
                if (yield from reader.literal(";")) is not None:
                    yield from reader.spaces()
                    found = (yield from reader.character()) == "{"

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> Structure:
        tags = [tag(f'{CALL} {json.dumps(tool.name)}, "parameters": ', tool, "}") for tool in tools]
        return calls(tags, triggers=[CALL], separator="; ", required=required, parallel=parallel)

    def structure_or_answer(self, tools: Sequence[Tool], answer: Structure, *, parallel: bool) -> Structure:
        # An answer in JSON may begin like a call, so that calls need a marker.
        own = self.structure(tools, required=True, parallel=parallel)
        marked = {"type": "sequence", "elements": [{"type": "const_string", "value": PYTHON_TAG}, own]}
        return {"type": "or", "elements": [marked, answer]}


def _is_marked(raw: str, names: Collection[str]) -> bool:
    """Whether the beginning of an object can only be that of a call, and not of an answer in JSON."""
    if raw.startswith(PYTHON_TAG) or CALL.startswith(raw):
        return True
    name = _NAME_AT_END.search(raw)
    return name is not None and any(one.startswith(name[1] or "") for one in names)
