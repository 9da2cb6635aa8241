"""What a parser finds in the text of an output, in order."""

from __future__ import annotations

from typing import NamedTuple

from nucleate.outputs import ToolCallDelta


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Text of the reasoning section."""

    text: str


Event = Content | Reasoning | ToolCallDelta
