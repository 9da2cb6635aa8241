"""Wraps a vocabulary as llguidance's tokenizer."""

from __future__ import annotations

from functools import cached_property
from typing import Any, final

from nucleate.structured_output.llguidance_loader import library, raise_unless_panic
from nucleate.structured_output.vocabulary import MAX_TOKEN_BYTES, Vocabulary


def guidance_tokenizer(vocabulary: Vocabulary) -> Any:
    """Return an LLTokenizer. Raises ValueError for unsupported tokens."""
    words = _Words(vocabulary)
    try:
        return library().LLTokenizer(words, n_vocab=len(words.tokens), eos_token=sorted(vocabulary.ends))
    except BaseException as error:  # noqa: BLE001 - a panic is no Exception
        raise_unless_panic(error)
        raise ValueError("the grammar engine does not support the tokens of this tokenizer") from None


@final
class _Words:
    """The tokenizer interface of llguidance."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special
        self.eos_token_id = min(vocabulary.ends)
        self._encode = vocabulary.tokenizer.encode
        self._special = frozenset(vocabulary.special)

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text as the model usually does: masks of determined text allow only these tokens.

        The tokens must be ordinary ones and decode to exactly this text. If the tokenizer's result does not, for
        example with an added space, this takes the longest tokens from the left.
        """
        data = text.encode()
        try:
            encoded = self._encode(text, add_special_tokens=False)
        except ValueError:  # the tokenizer does not support this text
            return self._longest(data)
        ordinary = all(token < len(self.tokens) and token not in self._special for token in encoded)
        decoded = b"".join(self.tokens[token] for token in encoded) if ordinary else None
        return encoded if decoded == data else self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
        """Return the longest tokens from the left, as far as there are any."""
        encoded, place = [], 0
        while place < len(data):
            ends = range(min(len(data), place + MAX_TOKEN_BYTES), place, -1)
            end = next((end for end in ends if data[place:end] in self._ordinary), None)
            if end is None:
                break
            encoded.append(self._ordinary[data[place:end]])
            place = end
        return encoded

    @cached_property
    def _ordinary(self) -> dict[bytes, int]:
        return {data: token for token, data in enumerate(self.tokens) if data and token not in self._special}
