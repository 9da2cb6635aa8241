"""What a parser finds in the text of an output, in order: its events, and ``Emitter``, which collects them.

White space around the answer and the reasoning is dropped where a marker is next to it. At the end of a text it is held
back until more text follows. Parts of the answer with a call between them are separated by the white space before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, NamedTuple, final
from uuid import uuid4

from nucleate.outputs import ToolCallDelta


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Text of the reasoning section."""

    text: str


Event = Content | Reasoning | ToolCallDelta


MAX_HELD_SPACES: Final = 64
"""Maximum length of the white space that is held back."""


def call_id() -> str:
    """Return a new id of a tool call, in OpenAI's form."""
    return f"call_{uuid4().hex[:24]}"


@final
class Emitter:
    """names: the tools that can be called. new_id: makes the ids of calls. trims: whether white space is dropped."""

    def __init__(self, names: Collection[str] = (), new_id: Callable[[], str] = call_id, *, trims: bool = True) -> None:
        self.names = names
        self._new_id, self._trims = new_id, trims
        self._events: list[Event] = []
        self._skips_spaces = False  # at the start of a text after a marker
        self._spaces = ""  # held back at the end of a text
        self._gap = ""  # dropped after a text
        self._joins = False  # whether the next text follows a marker
        self._seen: set[type] = set()  # kinds of text so far
        self._num_calls = 0
        self.in_call = False  #: whether a call has started
        self.has_arguments = False  #: whether its arguments are complete

    def events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def content(self, text: str) -> None:
        """Add text of the answer."""
        if text := self._trimmed(text):
            self._events.append(Content(self._joined(Content, text)))

    def reasoning(self, text: str) -> None:
        """Add text of the reasoning."""
        if text := self._trimmed(text):
            self._events.append(Reasoning(self._joined(Reasoning, text)))

    def marker(self) -> None:
        """Drop the white space at the end of the text so far, and at the start of the text that follows."""
        self._gap, self._spaces = self._spaces or self._gap, ""
        self._skips_spaces = self._joins = self._trims

    def start_call(self, name: str) -> bool:
        """Start a call. Returns False if there is no such tool."""
        if name not in self.names:
            return False
        self.marker()
        self._events.append(ToolCallDelta(self._num_calls, self._new_id(), name))
        self._num_calls += 1
        self.in_call, self.has_arguments = True, False
        return True

    def arguments(self, text: str) -> None:
        """Add text to the arguments of the call."""
        self._events.append(ToolCallDelta(self._num_calls - 1, arguments=text))

    def end_arguments(self) -> None:
        """Say that the arguments of the call are complete."""
        self.has_arguments = True

    def end_call(self) -> None:
        """End the call. It is incomplete if its arguments are."""
        if not self.has_arguments:
            self._events.append(ToolCallDelta(self._num_calls - 1, incomplete=True))
        self.marker()
        self.in_call = False

    def not_a_call(self, raw: str) -> None:
        """Add the text of an attempt to read a call: it is text of the answer."""
        self._skips_spaces = False
        self.content(raw)

    def close(self, *, reasoning: bool = False) -> None:
        """End the text. Its white space at the end is part of it."""
        if self._spaces and not self._skips_spaces:
            self._events.append(Reasoning(self._spaces) if reasoning else Content(self._spaces))
        self._spaces = ""

    def _joined(self, kind: type, text: str) -> str:
        if self._joins and kind in self._seen:
            text = (self._gap or "\n") + text
        self._seen.add(kind)
        self._gap, self._joins = "", False
        return text

    def _trimmed(self, text: str) -> str:
        if not self._trims:
            return text
        if self._skips_spaces:
            text = text.lstrip()
            self._skips_spaces = not text
        text = self._spaces + text
        kept = text.rstrip()
        start = max(len(kept), len(text) - MAX_HELD_SPACES)
        self._spaces = text[start:]
        return text[:start]
