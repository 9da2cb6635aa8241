"""The vocabulary of a model as llguidance knows it: bytes for every id, and which ids end a text. Knows no grammar."""

from __future__ import annotations

from functools import cached_property
from typing import Any, final

import numpy as np

from nucleate.text.structured.library import LONGEST_TOKEN, library, raise_unless_panic
from nucleate.text.tokenizer import Tokenizer


@final
class Vocabulary:
    """What each id adds to a text is what the detokenizer says, so that the text shown is the text that was checked.

    Special tokens and EOS ids are no text: a grammar reaches them by name or as its end. ``ends_W`` is the mask of the
    EOS ids, 32 tokens a word.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        pieces = tokenizer.pieces
        if pieces.family not in ("utf8", "text"):
            raise ValueError("structured output needs a tokenizer whose tokens stand for bytes of their own")
        self.ends = frozenset(token for token in tokenizer.eos_token_ids if token < size)
        if not self.ends:
            raise ValueError("structured output needs a tokenizer with an EOS token")
        table = pieces.table
        tokens = [pieces.as_bytes(token) if token in table else b"" for token in range(size)]
        self.left_out = tuple(token for token, data in enumerate(tokens) if len(data) > LONGEST_TOKEN)
        for token in self.left_out:
            tokens[token] = b""
        special = sorted(token for token in tokenizer.special_ids | self.ends if token < size)
        words = _Words(tokenizer, tokens, special, min(self.ends))
        self._tokenizer = _made(words, sorted(self.ends))
        bits = np.zeros(-(-size // 32) * 32, np.uint8)
        bits[list(self.ends)] = 1
        self.ends_W = np.packbits(bits, bitorder="little").view(np.int32)
        self.ends_W.flags.writeable = False

    def matcher(self, source: str, limits: Any) -> Any:
        """An LLMatcher; it may be in error."""
        return library().LLMatcher(self._tokenizer, source, log_level=0, limits=limits)


@final
class _Words:
    """What the library asks of a tokenizer: attributes by these names, and a call that encodes."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special: list[int], end: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end
        self._encode = tokenizer.encode
        self._special = frozenset(special)

    def __call__(self, text: str) -> list[int]:
        """How a text is usually written: the masks of forced text allow these tokens only.

        They must be ordinary tokens of the model and say this text and no more, not even a space before it. Where the
        tokenizer itself does otherwise, the longest tokens are taken from the left.
        """
        data = text.encode()
        try:
            written = self._encode(text, add_special_tokens=False)
        except ValueError:  # the tokenizer cannot split it
            return self._longest(data)
        ordinary = all(token < len(self.tokens) and token not in self._special for token in written)
        said = b"".join(self.tokens[token] for token in written) if ordinary else None
        return written if said == data else self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
        """As far as there are tokens for it."""
        written, place = [], 0
        while place < len(data):
            ends = range(min(len(data), place + LONGEST_TOKEN), place, -1)
            end = next((end for end in ends if data[place:end] in self._ordinary), None)
            if end is None:
                break
            written.append(self._ordinary[data[place:end]])
            place = end
        return written

    @cached_property
    def _ordinary(self) -> dict[bytes, int]:
        return {data: token for token, data in enumerate(self.tokens) if data and token not in self._special}


def _made(words: _Words, ends: list[int]) -> Any:
    try:
        return library().LLTokenizer(words, n_vocab=len(words.tokens), eos_token=ends)
    except BaseException as error:  # noqa: BLE001 - a panic is no Exception
        raise_unless_panic(error)
        raise ValueError("the grammar engine cannot hold the tokens of this tokenizer") from None
