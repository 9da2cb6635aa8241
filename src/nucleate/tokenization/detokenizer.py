"""Incremental detokenization: token ids in, text out, at constant cost per token.

Invariant: the joined results of ``push`` and ``close`` equal ``tokenizer.decode(prompt + output)`` without the prompt's
text. Text is returned as soon as no later token can change it. With a prompt:

- The prompt's text is ``decode(prompt)`` without incomplete bytes at its end, which may still become a character. That
  text is never returned again.
- A character that starts in the prompt and is completed by the output belongs to the output.

Tokenizers with byte fallback decode an uninterrupted run of byte tokens as a whole: one invalid byte turns every
character of the run into U+FFFD, one per byte. Complete characters of a run are therefore held back until the run ends
or exceeds ``hold_bytes`` bytes; after that they are returned as they complete. If such a long run (or one that started
in the prompt) turns out invalid, returned characters stay, each in place of one U+FFFD, and the output continues with
``decode(...)`` from the length returned so far. ``hold_bytes=None`` holds every run to its end.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Protocol

from nucleate.parameters.converters import changed_copy

if TYPE_CHECKING:
    from nucleate.tokenization.token_bytes import Pieces
    from nucleate.tokenization.tokenizer import Tokenizer

HOLD_BYTES: Final = 128  # 42 Chinese characters or 32 emoji in a row, none of them in the vocabulary
REPLACEMENT: Final = "\ufffd"


class Detokenizer:
    """Converts the token ids of one sequence to text, one token at a time.

    ``prompt_ids`` precede the output; their text is not returned, but it affects spaces and split characters.
    ``skip_special_tokens`` leaves special tokens out, as in ``Tokenizer.decode``, except ``kept_ids``.

    Raises ValueError for an id that is not in the vocabulary, in the prompt or pushed; the detokenizer remains usable.
    """

    __slots__ = ("_joiner", "_pieces", "_plain", "_skipped", "_started", "_table", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Iterable[int] = (),
        skip_special_tokens: bool = True,
        *,
        hold_bytes: int | None = HOLD_BYTES,
        kept_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces
        self._table = tokenizer.pieces.table
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        if kept_ids:
            self._skipped -= kept_ids
        self._joiner = _joiner(self._pieces, hold_bytes)
        self._started = False
        self._plain = False  # started, and no text is held back: a piece that is text is returned as it is
        for token_id in prompt_ids:
            self.push(token_id)
        self._joiner.settle()

    def fork(self) -> Detokenizer:
        """A copy that continues on its own."""
        lists = {name: value.copy() for name, value in vars(self._joiner).items() if isinstance(value, list)}
        return changed_copy(self, _joiner=changed_copy(self._joiner, **lists))

    def push(self, token_id: int) -> str:
        """Add a token. Returns the text that is now final, possibly empty."""
        try:
            piece = self._table[token_id]
        except KeyError:
            if self._table and self._tokenizer.is_padding(token_id):
                return ""
            raise self._unknown(token_id) from None
        if token_id in self._skipped:
            return ""
        if self._plain and piece.__class__ is str:
            return piece
        if not self._started:
            self._started = True
            piece = self._pieces.first(token_id)
        text = self._joiner.push(piece)
        self._plain = self._joiner.idle
        return text

    def close(self) -> str:
        """The rest of the text; an incomplete character becomes U+FFFD. Closing again returns an empty string."""
        self._table = {}
        return self._joiner.close()

    def _unknown(self, token_id: int) -> ValueError:
        if token_id in self._pieces.table:
            return ValueError(f"token {token_id} was pushed after the detokenizer was closed")
        return self._tokenizer.unknown_id(token_id)


def _joiner(pieces: Pieces, hold_bytes: int | None) -> Joiner:
    joining = pieces.joining
    if joining.family == "utf8":
        return Utf8Joiner()
    if joining.family == "text":
        return ByteFallbackJoiner(*joining.strip, hold_bytes)
    if joining.family == "suffix":
        return SuffixJoiner(joining.suffix)
    return BufferingJoiner(pieces.decode_tokens)


class Joiner(Protocol):
    """Joins the pieces of consecutive tokens to text: a state machine per family of tokenizers, see ``token_bytes``."""

    idle: bool  #: whether no text is held back

    def push(self, piece: str | bytes) -> str:
        """Add a piece. Returns the text that is now final, possibly empty."""

    def settle(self) -> None:
        """Mark everything pushed so far as the prompt."""

    def close(self) -> str:
        """The rest of the text."""


def _is_surrogate_lead(partial: bytes) -> bool:
    """Whether an incomplete sequence is the beginning of a surrogate, which is invalid but not yet to Python."""
    return len(partial) > 1 and partial[0] == 0xED and partial[1] >= 0xA0


class Utf8Joiner:
    """The bytes of all tokens are UTF-8; each maximal invalid part becomes one U+FFFD."""

    def __init__(self) -> None:
        self.idle = True
        self._partial = b""

    def push(self, piece: str | bytes) -> str:
        if isinstance(piece, str):
            piece = piece.encode()  # it starts with a character, so that incomplete bytes before it are invalid
        data = self._partial + piece
        text, used, *_ = utf_8_decode(data, "replace", False)
        partial = data[used:]
        if _is_surrogate_lead(partial):
            text, partial = text + REPLACEMENT * len(partial), b""
        self._partial = partial
        self.idle = not partial
        return text

    def settle(self) -> None:
        """Nothing to do: incomplete bytes at the end belong to the output."""

    def close(self) -> str:
        partial, self._partial = self._partial, b""
        return partial.decode(errors="replace")


class ByteFallbackJoiner:
    """Text, and runs of byte tokens, each valid or invalid as a whole; see the module docstring for what is held."""

    def __init__(self, strip: str, strip_count: int, hold_bytes: int | None) -> None:
        self._strip = strip
        self._strip_left = strip_count
        self._hold_bytes = hold_bytes
        self.idle = not strip_count
        self._clear()

    def _clear(self) -> None:
        self._length = 0  # bytes in the run
        self._returned = 0  # characters of the run that have been returned
        self._ready: list[str] = []  # complete characters, held because the run may still become invalid
        self._partial = b""
        self._invalid = False

    def push(self, piece: str | bytes) -> str:
        if isinstance(piece, bytes):
            self.idle = False
            return self._push_byte(piece)
        text = self._end_run() + self._strip_start(piece)
        self.idle = not self._strip_left
        return text

    def _push_byte(self, byte: bytes) -> str:
        self._length += 1
        if self._invalid:
            return REPLACEMENT
        data = self._partial + byte
        try:
            text, used, *_ = utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            return self._invalidate()
        self._partial = data[used:]
        if _is_surrogate_lead(self._partial):
            return self._invalidate()
        if text:
            self._ready.append(text)
        if self._hold_bytes is not None and self._length > self._hold_bytes:
            return self._release()
        return ""

    def _invalidate(self) -> str:
        self._invalid = True
        self._ready.clear()
        self._partial = b""
        self._strip_left = 0  # nothing to strip before U+FFFD
        return REPLACEMENT * (self._length - self._returned)

    def _release(self) -> str:
        text = self._strip_start("".join(self._ready))
        self._ready.clear()
        self._returned += len(text)
        return text

    def _end_run(self) -> str:
        if not self._length:
            return ""
        text = "" if self._invalid else self._invalidate() if self._partial else self._release()
        self._clear()
        return text

    def _strip_start(self, text: str) -> str:
        if not self._strip_left or not text:
            return text
        rest = text.lstrip(self._strip)
        cut = min(self._strip_left, len(text) - len(rest))
        self._strip_left = 0 if rest else self._strip_left - cut
        return text[cut:]

    def settle(self) -> None:
        self._release()

    def close(self) -> str:
        return self._end_run()


class SuffixJoiner:
    """Text with a marker that stands for a space, except in the last token, where it is removed."""

    def __init__(self, suffix: str) -> None:
        self.idle = False
        self._suffix = suffix
        self._held = ""  # the last token from its first marker on
        self._returned = 0  # characters of the held text that belong to the prompt

    def push(self, piece: str | bytes) -> str:
        token = str(piece)  # never bytes in this family
        before = self._release(" ")
        first = token.find(self._suffix)
        self._held = token[first:] if first >= 0 else ""
        return before + token.removesuffix(self._held)

    def _release(self, marker: str) -> str:
        text = self._held.replace(self._suffix, marker)[self._returned :]
        self._held, self._returned = "", 0
        return text

    def settle(self) -> None:
        self._returned = len(self._held.replace(self._suffix, ""))

    def close(self) -> str:
        return self._release("")


class BufferingJoiner:
    """A decoder that is not understood: any token may change all of the text, so all of it is held until the end."""

    def __init__(self, decode: Callable[[list[str]], str]) -> None:
        self.idle = False
        self._decode = decode
        self._tokens: list[str] = []
        self._returned = 0

    def push(self, piece: str | bytes) -> str:
        self._tokens.append(str(piece))  # never bytes in this family
        return ""

    def settle(self) -> None:
        self._returned = len(self._decode(self._tokens))

    def close(self) -> str:
        text = self._decode(self._tokens)[self._returned :]
        self._tokens = []
        return text
