"""Finds the reasoning section in the tokens of an output, and ends it after a number of tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, final

from nucleate.chat.reasoning import ReasoningFormat
from nucleate.tokenization.tokenizer import Tokenizer

DRAFT_ROOM: Final = 128
"""So many tokens before the limit, tokens are not drafted any more: drafts have no end marker."""
_SPACES: Final = b" \t\n\r"


@dataclass(frozen=True)
class ReasoningSection:
    """The reasoning section of a chat. opened: the prompt has opened it. closing_ids: the tokens that close it."""

    format: ReasoningFormat
    opened: bool
    closing_ids: tuple[int, ...]


@final
class ReasoningTracker:
    """The section in one output. limit: its maximum number of tokens, without the markers; None: unlimited.

    After ``limit`` tokens, ``forced_token`` is the next token of the end marker, until it was pushed.
    """

    def __init__(self, section: ReasoningSection, tokenizer: Tokenizer, limit: int | None) -> None:
        self._pieces = tokenizer.pieces
        self._start, self._end = section.format.start.encode(), section.format.end.encode()
        self._repeats, self._closing_ids, self._limit = section.format.in_messages, section.closing_ids, limit
        self._forced: deque[int] = deque()
        self._tail = b""  # the end of the text, as long as the markers
        self.count = 0  #: tokens in the section so far
        self.closed = False  #: whether no section follows
        self._open = False
        if section.opened:
            self._open_section(b"")

    @property
    def forced_token(self) -> int | None:
        """The token that must be next, or None."""
        return self._forced[0] if self._forced else None

    @property
    def allows_draft(self) -> bool:
        """Whether several tokens may be sampled without a look at ``forced_token``."""
        return self.closed or self._limit is None or self._limit - self.count > DRAFT_ROOM

    def push(self, token: int) -> bool:
        """Add a token. Returns whether it is in the section."""
        if self.closed:
            return False
        if self._forced:
            self._forced.popleft()
            self.closed = not self._forced
            return False
        text = self._tail + (self._pieces.as_bytes(token) if token in self._pieces.table else b"")
        if not self._open:
            self._look_for_start(text)
            return False
        if self._end in text:
            self._open, self.closed, self._tail = False, not self._repeats, b""
            return False
        self._tail = text[-len(self._end) :]
        self.count += 1
        self._check_limit()
        return True

    def _look_for_start(self, text: bytes) -> None:
        if self._repeats:
            before, found, rest = text.partition(self._start)
            self._tail = text[-len(self._start) :]
        else:
            text = text.lstrip(_SPACES)
            before, found, rest = text.partition(self._start)
            self._tail = text
            self.closed = bool(before) if found else not self._start.startswith(text)
        if found and not self.closed:
            self._open_section(rest)

    def _open_section(self, text: bytes) -> None:
        self._open, self._tail = True, text
        self._check_limit()

    def _check_limit(self) -> None:
        if self._limit is not None and self.count >= self._limit:
            self._forced.extend(self._closing_ids)
