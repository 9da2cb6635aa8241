"""A vocabulary as the tokenizer that llguidance asks for. Knows no grammar."""

from __future__ import annotations

from functools import cached_property
from typing import Any, final

from nucleate.structured_output.llguidance_loader import library, raise_unless_panic
from nucleate.structured_output.vocabulary import LONGEST_TOKEN, Vocabulary


def guidance_tokenizer(vocabulary: Vocabulary) -> Any:
    """An LLTokenizer. Raises ValueError for tokens that it cannot hold."""
    words = _Words(vocabulary)
    try:
        return library().LLTokenizer(words, n_vocab=len(words.tokens), eos_token=sorted(vocabulary.ends))
    except BaseException as error:  # noqa: BLE001 - a panic is no Exception
        raise_unless_panic(error)
        raise ValueError("the grammar engine cannot hold the tokens of this tokenizer") from None


@final
class _Words:
    """What the library asks of a tokenizer: attributes by these names, and a call that encodes."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special
        self.eos_token_id = min(vocabulary.ends)
        self._encode = vocabulary.tokenizer.encode
        self._special = frozenset(vocabulary.special)

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
