"""Adapts a vocabulary to llguidance's tokenizer interface."""

from __future__ import annotations

from functools import cached_property
from typing import Any, final

from nucleate.structured_output.llguidance_loader import library, raise_unless_panic
from nucleate.structured_output.vocabulary import MAX_TOKEN_BYTES, Vocabulary


def guidance_tokenizer(vocabulary: Vocabulary) -> Any:
    """Return an LLTokenizer. Raises ValueError for unsupported tokens."""
    wrapper = _TokenizerWrapper(vocabulary)
    try:
        return library().LLTokenizer(wrapper, n_vocab=len(wrapper.tokens), eos_token=sorted(vocabulary.eos_ids))
    except BaseException as error:  # noqa: BLE001 - a panic is no Exception
        raise_unless_panic(error)
        raise ValueError("the grammar engine does not support the tokens of this tokenizer") from None


@final
class _TokenizerWrapper:
    """The interface that LLTokenizer expects of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = min(vocabulary.eos_ids)
        self._encode = vocabulary.tokenizer.encode
        self._special = frozenset(vocabulary.special_ids)

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text in its usual way: masks of determined text allow only these tokens.

        If the tokenizer adds special tokens or its tokens do not decode to this text (for example because of an added
        space), this uses greedy longest match instead.
        """
        data = text.encode()
        try:
            encoded = self._encode(text, add_special_tokens=False)
        except ValueError:  # the tokenizer does not support this text
            return self._longest_match(data)
        ordinary = all(token < len(self.tokens) and token not in self._special for token in encoded)
        decoded = b"".join(self.tokens[token] for token in encoded) if ordinary else None
        return encoded if decoded == data else self._longest_match(data)

    def _longest_match(self, data: bytes) -> list[int]:
        """Tokenize by greedy longest match; stops where no token matches."""
        encoded, position = [], 0
        while position < len(data):
            eos_ids = range(min(len(data), position + MAX_TOKEN_BYTES), position, -1)
            end = next((end for end in eos_ids if data[position:end] in self._ordinary), None)
            if end is None:
                break
            encoded.append(self._ordinary[data[position:end]])
            position = end
        return encoded

    @cached_property
    def _ordinary(self) -> dict[bytes, int]:
        return {data: token for token, data in enumerate(self.tokens) if data and token not in self._special}
