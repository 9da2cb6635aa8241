"""Messages of GPT-OSS (harmony): reasoning, calls and answer are messages with a header, in channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

from nucleate.chat.reader import Emitter, Parsing, Reader
from nucleate.chat.tool_formats.tool_format import (
    Structure,
    ToolFormat,
    end_call,
    ignore,
    read_arguments,
    separated,
    tag,
)
from nucleate.chat.tools import Tool

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
RECIPIENT: Final = "to=functions."
MAX_HEADER: Final = 256
"""Maximum length of the header of a message. It is held back."""
_ENDS = (END, CALL, RETURN, START)
_IN_HEADER = frozenset(map(chr, range(32, 127))) - {"<"}


@final
class Harmony(ToolFormat):
    special_tokens = (START, CHANNEL, MESSAGE, END, CONSTRAIN, CALL, RETURN)

    def parse(self, reader: Reader, out: Emitter) -> Parsing[None]:
        while (yield from reader.character()):
            reader.record()
            header = yield from _header(reader)
            raw = reader.recorded()
            if header is None:
                if not reader.cut:
                    out.content(raw)
                yield from reader.until(_ENDS, out.content)
                continue
            out.marker()
            channel = _word_after(CHANNEL, header)
            if RECIPIENT in header:
                reader.record()
                found = yield from read_arguments(reader, out, _word_after(RECIPIENT, header))
                if (yield from end_call(reader, out, reader.recorded(), _ENDS, well_formed=found)):
                    yield from reader.until(_ENDS, ignore)
                    continue
            emit: Callable[[str], object] = out.reasoning if channel == "analysis" else out.content
            if (yield from reader.until(_ENDS, emit)) is None:
                out.close(reasoning=channel == "analysis")
            out.marker()

    def structure(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> Structure:
        del parallel  # a call ends the output
        tags = [tag(f"{CHANNEL}commentary {RECIPIENT}{tool.name} {CONSTRAIN}json{MESSAGE}", tool, "") for tool in tools]
        if required:
            return separated(tags, "", parallel=False)
        header = {"type": "const_string", "value": f"{CHANNEL}final{MESSAGE}"}
        answer = {"type": "sequence", "elements": [header, {"type": "any_text"}]}
        return {"type": "or", "elements": [*tags, answer]}  # free text has no special tokens: all are named


def _header(reader: Reader) -> Parsing[str | None]:
    """Read the header of a message. Returns None if the text has none."""
    found = yield from reader.literal(START, CHANNEL, "assistant", " to=")
    header = found or ""
    while found not in (None, MESSAGE):
        text = yield from reader.while_in(_IN_HEADER, MAX_HEADER)
        found = None if text is None else (yield from reader.literal(MESSAGE, CHANNEL, CONSTRAIN))
        header += f"{text}{found}"
        if len(header) > MAX_HEADER:
            return None
    return header if found == MESSAGE else None


def _word_after(marker: str, header: str) -> str:
    return header.partition(marker)[2].partition("<")[0].partition(" ")[0]
