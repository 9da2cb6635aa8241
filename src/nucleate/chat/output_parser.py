"""``OutputParser``: splits the text of an output into reasoning, tool calls and the answer, as it comes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import final

from nucleate.chat.emitter import Emitter, call_id
from nucleate.chat.events import Event
from nucleate.chat.reader import Parsing, Reader
from nucleate.chat.reasoning import ReasoningFormat
from nucleate.chat.tool_formats.tool_format import ToolFormat


@final
class OutputParser:
    """reasoning: how the output begins; None: without a section. opened: the prompt has opened it.

    tool_format: None: no calls. names: the tools that may be called; a call of another one is text.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        tool_format: ToolFormat | None = None,
        names: Collection[str] = (),
        *,
        opened: bool = False,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._reader = Reader()
        new_id = new_id or (call_id if tool_format is None else tool_format.new_id)
        self._out = Emitter(names, new_id)
        self._parsing = self._parse(reasoning, tool_format, opened=opened)
        self._ended = False

    def push(self, text: str) -> list[Event]:
        """Add text. Returns what is final now."""
        self._reader.push(text)
        self._advance()
        return self._out.events()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """End the text. Returns the rest.

        cut: the model has not ended it. A call that has not named its tool, and a part of a marker, are then dropped;
        otherwise they are text.
        """
        self._reader.closed, self._reader.cut = True, cut
        self._advance()
        self._out.close()
        return self._out.events()

    def _advance(self) -> None:
        if not self._ended:
            self._ended = next(self._parsing, _END) is _END

    def _parse(
        self, reasoning: ReasoningFormat | None, tool_format: ToolFormat | None, *, opened: bool
    ) -> Parsing[None]:
        reader, out = self._reader, self._out
        if reasoning is not None and not reasoning.in_messages:
            yield from reasoning.parse(reader, out, opened=opened)
        if tool_format is not None:
            yield from tool_format.parse(reader, out)
        yield from reader.until((), out.content)


_END = object()
