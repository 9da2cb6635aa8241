"""Splits the text of an output into reasoning, tool calls and the answer, as it comes.

``OutputParser`` takes text, ``ChunkParser`` the chunks of all outputs of a chat.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import final

from nucleate.chat.reader import Content, Emitter, Event, Parsing, Reader, Reasoning, call_id
from nucleate.chat.reasoning import ReasoningFormat, ReasoningTracker
from nucleate.chat.tool_formats.tool_format import ToolFormat
from nucleate.outputs import CompletionChunk, ToolCallDelta


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

        cut: the model has not ended it. A call without a name, and a part of a marker, are then dropped, else text.
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


@final
class ChunkParser:
    """Parses the chunks of all outputs of a chat. new_parser, new_tracker: make the state of an output."""

    def __init__(
        self, new_parser: Callable[[], OutputParser], new_tracker: Callable[[], ReasoningTracker | None]
    ) -> None:
        self._new_parser, self._new_tracker = new_parser, new_tracker
        self._outputs: dict[int, _Output] = {}
        self.reasoning_tokens = 0  #: in all outputs so far

    def parse(self, chunk: CompletionChunk) -> CompletionChunk:
        """Return a chunk with reasoning and tool calls apart from its text.

        ``finish_reason`` is "tool_calls" at the end of an output with calls that ended by itself, if all are complete.
        """
        output = self._outputs.get(chunk.index)
        if output is None:
            output = self._outputs[chunk.index] = _Output(self._new_parser(), self._new_tracker())
        parsed = output.parse(chunk)
        self.reasoning_tokens += parsed.reasoning_tokens
        return parsed


class _Output:
    def __init__(self, parser: OutputParser, tracker: ReasoningTracker | None) -> None:
        self._parser, self._tracker = parser, tracker
        self._has_calls, self._all_complete = False, True

    def parse(self, chunk: CompletionChunk) -> CompletionChunk:
        events = self._parser.push(chunk.text) if chunk.text else []
        reason = chunk.finish_reason
        if reason is not None:
            events += self._parser.finish(cut=reason != "stop" or isinstance(chunk.stop_reason, str))
        tracker = self._tracker
        reasoning_tokens = 0 if tracker is None or tracker.closed else sum(map(tracker.push, chunk.token_ids))
        calls = tuple(merged(event for event in events if isinstance(event, ToolCallDelta)))
        if calls:
            self._has_calls = True
            self._all_complete &= not any(call.incomplete for call in calls)
        return replace(
            chunk,
            text=_text(Content, events),
            reasoning=_text(Reasoning, events),
            tool_calls=calls,
            reasoning_tokens=reasoning_tokens,
            finish_reason="tool_calls" if reason == "stop" and self._has_calls and self._all_complete else reason,
        )


def _text(kind: type[Content | Reasoning], events: Iterable[Event]) -> str:
    return "".join([event.text for event in events if isinstance(event, kind)])


def merged(deltas: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Join consecutive parts of the arguments of a call."""
    made: list[ToolCallDelta] = []
    for delta in deltas:
        last = made[-1] if made else None
        if last is None or last.name or delta.name or last.index != delta.index:
            made.append(delta)
        else:
            made[-1] = replace(last, arguments=last.arguments + delta.arguments, incomplete=delta.incomplete)
    return made
