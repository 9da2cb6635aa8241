"""The vocabulary of a model as grammar engines know it: bytes for every id, and which end a text. Knows no grammar."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from nucleate.tokenization.tokenizer import Tokenizer

LONGEST_TOKEN: Final = 1024
"""Bytes of a token; llguidance's table of tokens cannot hold more."""


@final
class Vocabulary:
    """What each id adds to a text is what the detokenizer says, so that the text shown is the text that was checked.

    Special tokens and EOS ids are no text: a grammar reaches them by name or as its end. ``ends_W`` is the mask of the
    EOS ids, 32 tokens a word. ``known``: the ids that may be allowed.

    Raises ValueError for a tokenizer without EOS, or whose tokens have no bytes of their own.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        pieces = tokenizer.pieces
        if pieces.family not in ("utf8", "text"):
            raise ValueError("structured output needs a tokenizer whose tokens stand for bytes of their own")
        self.ends = frozenset(token for token in tokenizer.eos_token_ids if token < size)
        if not self.ends:
            raise ValueError("structured output needs a tokenizer with an EOS token")
        table = pieces.table
        self.tokenizer = tokenizer
        self.tokens = [pieces.as_bytes(token) if token in table else b"" for token in range(size)]
        self.left_out = tuple(token for token, data in enumerate(self.tokens) if len(data) > LONGEST_TOKEN)
        for token in self.left_out:
            self.tokens[token] = b""
        self.special = sorted(token for token in tokenizer.special_ids | self.ends if token < size)
        self.known = frozenset(token for token in table if token < size) - frozenset(self.left_out)
        self.ends_W = mask_of(self.ends, size)


def mask_of(tokens: Iterable[int], size: int) -> NDArray[np.int32]:
    """Some ids of so many as a mask."""
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    mask_W = np.packbits(bits, bitorder="little").view(np.int32)
    mask_W.flags.writeable = False
    return mask_W
