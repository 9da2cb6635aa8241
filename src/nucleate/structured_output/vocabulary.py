"""The vocabulary of a model for grammar engines: the bytes of every token, and the EOS tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from nucleate.tokenization.tokenizer import Tokenizer

MAX_TOKEN_BYTES: Final = 1024
"""Maximum length of a token in llguidance."""


@final
class Vocabulary:
    """The bytes of each token, as the detokenizer defines them, so that the checked text is the generated text.

    Special tokens and EOS have no text: a grammar reaches them by name or at its end. ``ends_W`` is the mask of the EOS
    ids, 32 tokens per word. ``known``: the ids that may be allowed.

    Raises ValueError for a tokenizer without EOS or without a fixed byte sequence per token.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        pieces = tokenizer.pieces
        if pieces.family not in ("utf8", "text"):
            raise ValueError("structured output needs a tokenizer with a fixed byte sequence per token")
        self.ends = frozenset(token for token in tokenizer.eos_token_ids if token < size)
        if not self.ends:
            raise ValueError("structured output needs a tokenizer with an EOS token")
        table = pieces.table
        self.tokenizer = tokenizer
        self.tokens = [pieces.as_bytes(token) if token in table else b"" for token in range(size)]
        self.left_out = tuple(token for token, data in enumerate(self.tokens) if len(data) > MAX_TOKEN_BYTES)
        for token in self.left_out:
            self.tokens[token] = b""
        self.special = sorted(token for token in tokenizer.special_ids | self.ends if token < size)
        self.known = frozenset(token for token in table if token < size) - frozenset(self.left_out)
        self.ends_W = mask_of(self.ends, size)


def mask_of(tokens: Iterable[int], size: int) -> NDArray[np.int32]:
    """Return the mask of some token ids."""
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    mask_W = np.packbits(bits, bitorder="little").view(np.int32)
    mask_W.flags.writeable = False
    return mask_W
