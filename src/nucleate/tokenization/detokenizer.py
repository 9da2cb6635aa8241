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

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from nucleate.tokenization.token_joiners import ByteRuns, Joiner, Suffixes, Utf8, Whole

if TYPE_CHECKING:
    from nucleate.tokenization.token_bytes import Pieces
    from nucleate.tokenization.tokenizer import Tokenizer

HOLD_BYTES: Final = 128  # 42 Chinese characters or 32 emoji in a row, none of them in the vocabulary


class Detokenizer:
    """A push machine from the token ids of one sequence to its text.

    ``prompt_ids`` come before the output; their text is not emitted, but it decides spaces and split characters.
    ``skip_special_tokens`` leaves special tokens out, as in ``Tokenizer.decode``. Raises ValueError for an id that is
    not in the vocabulary, in the prompt or pushed; the machine stays usable.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Iterable[int] = (),
        skip_special_tokens: bool = True,
        *,
        hold_bytes: int | None = HOLD_BYTES,
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces
        self._table = tokenizer.pieces.table
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._joiner = _joiner(self._pieces, hold_bytes)
        self._started = False
        self._plain = False  # started, and nothing held: a piece of text can go out as it is
        for token_id in prompt_ids:
            self.push(token_id)
        self._joiner.settle()

    def push(self, token_id: int) -> tuple[str, ...]:
        """The text that became certain with this token: nothing, or one non-empty string."""
        try:
            piece = self._table[token_id]
        except KeyError:
            if self._table and self._tokenizer.is_padding(token_id):
                return ()
            raise self._unknown(token_id) from None
        if token_id in self._skipped:
            return ()
        if self._plain and piece.__class__ is str:
            return (piece,) if piece else ()
        if not self._started:
            self._started = True
            piece = self._pieces.first(token_id)
        text = self._joiner.push(piece)
        self._plain = self._joiner.idle
        return (text,) if text else ()

    def close(self) -> tuple[str, ...]:
        """The rest of the text; an unfinished character becomes U+FFFD. Closing again gives nothing."""
        self._table = {}
        text = self._joiner.close()
        return (text,) if text else ()

    def _unknown(self, token_id: int) -> ValueError:
        if token_id in self._pieces.table:
            return ValueError(f"token {token_id} was pushed after the detokenizer was closed")
        return self._tokenizer.unknown_id(token_id)


def _joiner(pieces: Pieces, hold_bytes: int | None) -> Joiner:
    joining = pieces.joining
    if joining.family == "utf8":
        return Utf8()
    if joining.family == "text":
        return ByteRuns(*joining.strip, hold_bytes)
    if joining.family == "suffix":
        return Suffixes(joining.suffix)
    return Whole(pieces.decode_tokens)
