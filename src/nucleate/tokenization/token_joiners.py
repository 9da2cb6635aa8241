"""Joins the bytes of consecutive tokens to text: one state machine per family of tokenizers.

Each has ``push(piece) -> str`` (the text that became certain, possibly empty), ``settle()`` (everything pushed so far
belongs to the prompt), ``close() -> str`` and ``idle`` (nothing is held back).
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable
from typing import Protocol

REPLACEMENT = "\ufffd"


class Joiner(Protocol):
    """What the detokenizer asks of each family."""

    idle: bool

    def push(self, piece: str | bytes) -> str: ...

    def settle(self) -> None: ...

    def close(self) -> str: ...


def _hopeless(partial: bytes) -> bool:
    """Whether an incomplete sequence can never be completed though Python still waits: the lead of a surrogate."""
    return len(partial) > 1 and partial[0] == 0xED and partial[1] >= 0xA0


class Utf8:
    """Bytes in a row; each maximal part that cannot belong to a character becomes one U+FFFD."""

    def __init__(self) -> None:
        self.idle = True
        self._partial = b""

    def push(self, piece: str | bytes) -> str:
        if isinstance(piece, str):
            # Text begins with the start of a character, so bytes that wait for a continuation wait in vain.
            piece = piece.encode()
        data = self._partial + piece
        text, used, *_ = utf_8_decode(data, "replace", False)
        partial = data[used:]
        if _hopeless(partial):
            text, partial = text + REPLACEMENT * len(partial), b""
        self._partial = partial
        self.idle = not partial
        return text

    def settle(self) -> None:
        """The incomplete tail is not shown yet, so it belongs to the output."""

    def close(self) -> str:
        partial, self._partial = self._partial, b""
        return partial.decode(errors="replace")


class ByteRuns:
    """Text, and runs of single bytes that are valid as a whole or not at all; see ``detokenize`` for what is held."""

    def __init__(self, strip: str, strip_count: int, hold_bytes: int | None) -> None:
        self._strip = strip
        self._strip_count = strip_count
        self._hold_bytes = hold_bytes
        self.idle = not strip_count
        self._clear()

    def _clear(self) -> None:
        self._length = 0  # bytes in the run
        self._shown = 0  # characters of the run that are out
        self._ready: list[str] = []  # complete characters, held because the run may still turn invalid
        self._partial = b""
        self._invalid = False

    def push(self, piece: str | bytes) -> str:
        if isinstance(piece, bytes):
            self.idle = False
            return self._push_byte(piece)
        text = self._end_run() + self._stripped(piece)
        self.idle = not self._strip_count
        return text

    def _push_byte(self, byte: bytes) -> str:
        self._length += 1
        if self._invalid:
            return REPLACEMENT
        data = self._partial + byte
        try:
            text, used, *_ = utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            return self._spoil()
        self._partial = data[used:]
        if _hopeless(self._partial):
            return self._spoil()
        if text:
            self._ready.append(text)
        if self._hold_bytes is not None and self._length > self._hold_bytes:
            return self._show_ready()
        return ""

    def _spoil(self) -> str:
        self._invalid = True
        self._ready.clear()
        self._partial = b""
        self._strip_count = 0  # the text starts with U+FFFD at the latest here
        return REPLACEMENT * (self._length - self._shown)

    def _show_ready(self) -> str:
        text = self._stripped("".join(self._ready))
        self._ready.clear()
        self._shown += len(text)
        return text

    def _end_run(self) -> str:
        if not self._length:
            return ""
        text = "" if self._invalid else self._spoil() if self._partial else self._show_ready()
        self._clear()
        return text

    def _stripped(self, text: str) -> str:
        if not self._strip_count or not text:
            return text
        rest = text.lstrip(self._strip)
        cut = min(self._strip_count, len(text) - len(rest))
        self._strip_count = 0 if rest else self._strip_count - cut
        return text[cut:]

    def settle(self) -> None:
        self._show_ready()

    def close(self) -> str:
        return self._end_run()


class Suffixes:
    """Text with a marker that is a space, except in the last token, where it is nothing."""

    def __init__(self, suffix: str) -> None:
        self.idle = False
        self._suffix = suffix
        self._held = ""  # the last token from its first marker on
        self._shown = 0  # characters of what is held that the prompt has shown already

    def push(self, piece: str | bytes) -> str:
        token = str(piece)  # this family has no pieces of bytes
        before = self._release(" ")
        first = token.find(self._suffix)
        self._held = token[first:] if first >= 0 else ""
        return before + token.removesuffix(self._held)

    def _release(self, marker: str) -> str:
        text = self._held.replace(self._suffix, marker)[self._shown :]
        self._held, self._shown = "", 0
        return text

    def settle(self) -> None:
        self._shown = len(self._held.replace(self._suffix, ""))

    def close(self) -> str:
        return self._release("")


class Whole:
    """A decoder of unknown kind: every token may change all of the text, so all of it waits for the last one."""

    def __init__(self, decode: Callable[[list[str]], str]) -> None:
        self.idle = False
        self._decode = decode
        self._tokens: list[str] = []
        self._shown = 0

    def push(self, piece: str | bytes) -> str:
        self._tokens.append(str(piece))  # this family has no pieces of bytes
        return ""

    def settle(self) -> None:
        self._shown = len(self._decode(self._tokens))

    def close(self) -> str:
        text = self._decode(self._tokens)[self._shown :]
        self._tokens = []
        return text
