"""The vocabulary of a model as a grammar engine needs it: the bytes of every token, and the EOS tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from nucleate.tokenization.tokenizer import Tokenizer

MAX_TOKEN_BYTES: Final = 1024
"""Maximum length of a token in llguidance, in bytes."""


@final
class Vocabulary:
    """The bytes of each token as the detokenizer writes them, so that the constrained text is the generated text.

    Special tokens and EOS have no text: a grammar can allow them by name, and EOS at its end. ``eos_mask_W`` is the
    bitmask of ``eos_ids``. ``allowed_ids``: the ids that a grammar may allow. ``excluded_ids``: tokens that are too
    long.

    Raises ValueError for a tokenizer without EOS or without a fixed byte sequence per token.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        pieces = tokenizer.pieces
        if pieces.family not in ("utf8", "text"):
            raise ValueError("structured output needs a tokenizer with a fixed byte sequence per token")
        self.eos_ids = frozenset(token for token in tokenizer.eos_token_ids if token < size)
        if not self.eos_ids:
            raise ValueError("structured output needs a tokenizer with an EOS token")
        table = pieces.table
        self.tokenizer = tokenizer
        self.tokens = [pieces.as_bytes(token) if token in table else b"" for token in range(size)]
        self.excluded_ids = tuple(token for token, data in enumerate(self.tokens) if len(data) > MAX_TOKEN_BYTES)
        for token in self.excluded_ids:
            self.tokens[token] = b""
        self.special_ids = sorted(token for token in tokenizer.special_ids | self.eos_ids if token < size)
        self.allowed_ids = frozenset(token for token in table if token < size) - frozenset(self.excluded_ids)
        self.eos_mask_W = mask_of(self.eos_ids, size)


def mask_of(tokens: Iterable[int], size: int) -> NDArray[np.int32]:
    """Return the bitmask of some token ids, 32 per word."""
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    mask_W = np.packbits(bits, bitorder="little").view(np.int32)
    mask_W.flags.writeable = False
    return mask_W
