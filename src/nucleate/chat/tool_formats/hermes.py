"""Calls of Hermes and Qwen models: a JSON object between ``<tool_call>`` and ``</tool_call>``.

Models whose chat template has no tools get this format described in a system message, by ``with_tools_as_text``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, final

from nucleate.chat.reader import Emitter, Parsing, Reader
from nucleate.chat.tool_formats.tool_format import Structure, ToolFormat, calls, end_call, read_call, tag
from nucleate.chat.tools import Tool

START, END = "<tool_call>", "</tool_call>"


@final
class Hermes(ToolFormat):
    """in_template: whether the chat template describes the tools."""

    special_tokens = (START, END)

    def __init__(self, *, in_template: bool = True) -> None:
        self.in_template = in_template

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


def with_tools_as_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return messages of the roles system, user and assistant: tools, calls and results become text."""
    names: dict[str, str] = {}
    made: list[dict[str, Any]] = []
    for message in messages:
        message = dict(message)
        text = message.get("content") or ""
        if message["role"] == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id", ""), "the tool")
            result = f"Result of {name}:\n{text}"
            if made and made[-1].pop("is_result", False):
                made[-1]["content"] += f"\n\n{result}"
            else:
                made.append({"role": "user", "content": result})
            made[-1]["is_result"] = True
            continue
        calls = message.pop("tool_calls", None) or ()
        for call in calls:
            function = call["function"]
            names[call.get("id") or ""] = function["name"]
            body = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
            text += f"{chr(10) if text else ''}{START}\n{body}\n{END}"
        made.append({**message, "content": text} if calls or message.get("content") is None else message)
    for message in made:
        message.pop("is_result", None)
    if tools:
        first = made[0] if made[0]["role"] == "system" else None
        text = _described(tools)
        if first is None:
            return [{"role": "system", "content": text}, *made]
        made[0] = {**first, "content": f"{first['content']}\n\n{text}"}
    return made


def _described(tools: Sequence[Tool]) -> str:
    lines = "\n".join(json.dumps(tool.to_dict()["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call these tools, described by JSON schemas:\n{lines}\n\n"
        f'To call a tool, write:\n{START}\n{{"name": NAME, "arguments": OBJECT}}\n{END}'
    )
