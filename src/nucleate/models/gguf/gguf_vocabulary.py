"""The vocabulary of a GGUF model: texts and bytes of the tokens, and llama.cpp's tokenizer."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from nucleate.models.protocol import ModelError

UNKNOWN, CONTROL, USER_DEFINED = 1 << 0, 1 << 3, 1 << 4
"""Attributes of tokens."""
ROLES = ("bos", "eos", "sep", "pad", "mask")
"""Special tokens that llama.cpp knows by role."""


class GgufVocabulary:
    """A vocabulary. Valid while its model is."""

    def __init__(self, lib: Any, pointer: Any) -> None:
        self._lib, self._pointer = lib, pointer
        self.size: int = lib.llama_vocab_n_tokens(pointer)
        self.has_tokenizer: bool = lib.llama_vocab_type(pointer) != lib.LLAMA_VOCAB_TYPE_NONE

    @cached_property
    def texts(self) -> list[str]:
        """The token strings, as they are in the file."""
        get = self._lib.llama_vocab_get_text
        return [(get(self._pointer, token) or b"").decode(errors="replace") for token in range(self.size)]

    @cached_property
    def pieces(self) -> list[bytes]:
        """The bytes that tokens add to a text, special tokens too."""
        function, pointer, buffer = self._lib.llama_token_to_piece, self._pointer, ctypes.create_string_buffer(64)
        pieces = []
        for token in range(self.size):
            length = function(pointer, token, buffer, len(buffer), 0, True)
            if length < 0:
                buffer = ctypes.create_string_buffer(-length)
                length = function(pointer, token, buffer, len(buffer), 0, True)
            pieces.append(buffer.raw[: max(length, 0)])
        return pieces

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The control tokens and the unknown token: llama.cpp leaves them out of texts."""
        get = self._lib.llama_vocab_get_attr
        return frozenset(token for token in range(self.size) if get(self._pointer, token) & (UNKNOWN | CONTROL))

    @cached_property
    def added_ids(self) -> Sequence[int]:
        """The tokens that llama.cpp finds as a whole in a text, but does not leave out of texts."""
        get = self._lib.llama_vocab_get_attr
        return [token for token in range(self.size) if get(self._pointer, token) & USER_DEFINED]

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an output: EOS, end of turn and others."""
        is_end = self._lib.llama_vocab_is_eog
        return frozenset(token for token in range(self.size) if is_end(self._pointer, token))

    @cached_property
    def special_tokens(self) -> Mapping[str, str]:
        """By role: ``{"bos_token": "<s>", ...}``."""
        found = {}
        for role in ROLES:
            token = getattr(self._lib, f"llama_vocab_{role}")(self._pointer)
            if 0 <= token < self.size:
                found[f"{role}_token"] = self.texts[token]
        return found

    @cached_property
    def bos_token_id(self) -> int | None:
        """The token before a text."""
        token: int = self._lib.llama_vocab_bos(self._pointer)
        return token if 0 <= token < self.size else None

    @cached_property
    def strips_first_space(self) -> bool:
        """Whether llama.cpp removes the space before the first word: it adds one before each text."""
        if not self.has_tokenizer:
            return False
        words = [token for token in self.tokenize(" a", add_special=False) if token not in self.special_ids]
        return bool(words) and self.detokenize(words) != b"".join(self.pieces[token] for token in words)

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        """The ids of a text; special tokens in it are found. add_special: add those around a text, such as BOS.

        Raises ModelError if the file has no tokenizer, ValueError for a text that is too long.
        """
        if not self.has_tokenizer:
            raise ModelError("the GGUF file has no tokenizer; give one with --tokenizer")
        data = text.encode()
        room = len(data) + 8
        for _ in range(2):
            tokens = (self._lib.llama_token * room)()
            count = self._lib.llama_tokenize(self._pointer, data, len(data), tokens, room, add_special, True)
            if count >= 0:
                return list(tokens[:count])
            room = -count
        raise ValueError(f"llama.cpp cannot tokenize {len(data)} bytes")

    def detokenize(self, ids: list[int]) -> bytes:
        """llama.cpp's own text of some tokens, without special ones."""
        room = sum(len(self.pieces[token]) for token in ids) + 8
        buffer = ctypes.create_string_buffer(room)
        tokens = (self._lib.llama_token * len(ids))(*ids)
        length = self._lib.llama_detokenize(self._pointer, tokens, len(ids), buffer, room, True, False)
        return buffer.raw[: max(length, 0)]
