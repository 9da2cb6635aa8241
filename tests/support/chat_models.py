"""The bundled model with other chat templates, and what the parsers of chats find in texts in parts."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import nucleate as nc
from nucleate.chat.chat_format import TOOL_FORMATS
from nucleate.chat.output_parser import OutputParser
from nucleate.chat.reader import Content, Reasoning
from nucleate.chat.reasoning import ReasoningFormat
from nucleate.models.loader import ModelSource

OPENED = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|><think>\n"
)
"""A template that opens the reasoning section."""
OPTIONAL = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
"""A template that may close the reasoning section, as that of Qwen3."""


def folder(path: Path, template: str) -> Path:
    """Copy the bundled model with another chat template."""
    source = ModelSource.find(None, device="auto", dtype="auto", runtime="auto", revision=None).folder
    shutil.copytree(source, path, dirs_exist_ok=True)
    config = json.loads((path / "tokenizer_config.json").read_text("utf-8"))
    config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return path


def model(path: Path, template: str, **options: Any) -> nc.LLM:
    return nc.LLM(folder(path, template), **options)


def run(llm: nc.LLM, request: nc.Request) -> list[nc.CompletionChunk]:
    """Run a request on a new engine."""
    engine = llm.new_engine()
    engine.add(request)
    chunks = []
    while len(engine):
        chunks += [output.chunk for output in engine.step()]
    return chunks


NAMES = ("f", "get_weather")
"""The tools that may be called."""


class Found:
    """What a parser found: texts, and calls as [name, arguments, whether it is incomplete]."""

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: list[list[Any]] = []
        self.order: list[tuple[str, Any]] = []  #: of all events, with consecutive texts joined

    def add(self, event: Any) -> None:
        if isinstance(event, Content | Reasoning):
            kind = type(event).__name__
            assert event.text
            if isinstance(event, Content):
                self.content += event.text
            else:
                self.reasoning += event.text
            self._note(kind, event.text)
            return
        if event.name is not None:
            assert event.index == len(self.calls)
            assert (event.arguments, event.incomplete) == ("", False)
            assert event.id
            self.calls.append([event.name, "", False])
            self.order.append(("call", event.name))
            return
        call = self.calls[event.index]
        assert event.index == len(self.calls) - 1
        assert event.id is None
        assert not call[2]
        call[1] += event.arguments
        call[2] = event.incomplete
        if event.arguments:
            self._note("arguments", event.arguments)
        if event.incomplete:
            self.order.append(("incomplete", event.index))

    def _note(self, kind: str, text: str) -> None:
        if self.order and self.order[-1][0] == kind:
            text = self.order.pop()[1] + text
        self.order.append((kind, text))

    @property
    def complete_calls(self) -> list[tuple[str, str]]:
        return [(name, arguments) for name, arguments, is_incomplete in self.calls if not is_incomplete]


def parse(
    parts: Iterable[str],
    name: str | None,
    *,
    reasoning: ReasoningFormat | None = None,
    opened: bool = False,
    names: Sequence[str] = NAMES,
    cut: bool = False,
) -> Found:
    """Parse a text in parts. name: of the tool format; None: without one. cut: the model has not ended the text."""
    numbers, found = itertools.count(), Found()
    tool_format = None if name is None else TOOL_FORMATS[name]
    parser = OutputParser(reasoning, tool_format, names, opened=opened, new_id=lambda: f"id{next(numbers)}")
    for part in parts:
        for event in parser.push(part):
            found.add(event)
    for event in parser.finish(cut=cut):
        found.add(event)
    assert parser.finish(cut=cut) == []
    return found
