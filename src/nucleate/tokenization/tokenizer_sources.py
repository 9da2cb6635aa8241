"""Makes a ``Tokenizer`` from what a caller has: a folder, a tokenizer in memory, or the vocabulary of a model file.

Such a file is a GGUF file, for example; its tokens are bytes.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.token_bytes import Joining, Piece, Pieces, text_or_bytes
from nucleate.tokenization.tokenizer import Tokenizer

ALLOWED = "a folder, a Hugging Face id, a tokenizers.Tokenizer, a tokenizer of Transformers or a nucleate Tokenizer"

T = TypeVar("T")
Write = Callable[[Any, Path], None]


def make_tokenizer(source: Any, *, convert: Write, save: Write) -> Tokenizer:
    """Make a tokenizer. One in memory is copied.

    convert: writes the tokenizer of a folder without tokenizer.json to another folder; save: writes a tokenizer of
    Transformers to a folder. Raises FileNotFoundError, ValueError, ParameterError, and the errors of convert and save.
    """
    if isinstance(source, str | os.PathLike):
        folder = Path(source)
        return Tokenizer(folder) if (folder / "tokenizer.json").is_file() else _written(convert, folder)
    if isinstance(source, Tokenizer):
        return copy.copy(source)
    if hasattr(source, "save_pretrained") and hasattr(source, "convert_ids_to_tokens"):
        return _written(save, source)
    import tokenizers

    if isinstance(source, tokenizers.Tokenizer):
        backend = tokenizers.Tokenizer.from_str(source.to_str())
        backend.no_truncation()
        backend.no_padding()
        return Tokenizer(backend)
    raise ParameterError("tokenizer", f"tokenizer must be {ALLOWED}, got {shown(source)}")


def fit_to_model(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int] | None) -> list[int]:
    """Add the length of the model's logits. Returns the added tokens for which the model has no logits.

    eos_token_ids: of the model, for a tokenizer from elsewhere; None for one that has read them. Raises ValueError for
    a tokenizer from elsewhere if the model has no logits for a token of its vocabulary.
    """
    tokenizer.padded_size = max(tokenizer.padded_size, vocab_size)
    if eos_token_ids is None:
        return []
    tokenizer.eos_token_ids |= eos_token_ids
    size = tokenizer.base_vocab_size
    if size > vocab_size:
        raise ValueError(f"it has {size} tokens, but the model has {vocab_size} logits: it belongs to another model")
    return [token for token in tokenizer.added_ids if token >= vocab_size]


def _written(write: Write, source: Any) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write(source, Path(folder))
        return Tokenizer(folder)


class Vocabulary(Protocol):
    """A vocabulary with its own tokenizer.

    text: the string of a token. piece: the bytes that a token adds to a text. special_ids: the tokens that are left out
    of texts. added_ids: other tokens that are found as a whole in a text. strips_first_space: whether the space before
    the first word of a text is removed.
    """

    @property
    def size(self) -> int: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def added_ids(self) -> Sequence[int]: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def special_tokens(self) -> Mapping[str, str]: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def strips_first_space(self) -> bool: ...
    def text(self, token: int) -> str: ...
    def piece(self, token: int) -> bytes: ...
    def tokenize(self, text: str, *, add_special: bool) -> list[int]: ...


class OnDemand(Mapping[int, T]):
    """A value for each id below ``size``, computed at its first use: a model file may have 262,144 tokens."""

    def __init__(self, size: int, compute: Callable[[int], T]) -> None:
        self._size, self._compute, self._found = size, compute, dict[int, T]()

    def __getitem__(self, token_id: int) -> T:
        try:
            return self._found[token_id]
        except KeyError:
            if token_id not in self:
                raise
            found = self._found[token_id] = self._compute(int(token_id))
            return found

    def __contains__(self, token_id: object) -> bool:
        return isinstance(token_id, int | np.integer) and 0 <= int(token_id) < self._size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._size))

    def __len__(self) -> int:
        return self._size


@dataclass(frozen=True)
class BytePieces(Pieces):
    """Pieces that are given, and not read from a decoder."""

    strips_first_space: bool = False

    def first(self, token_id: int) -> Piece:
        piece = self.table[token_id]
        return piece[1:] if self.strips_first_space and isinstance(piece, str) and piece[:1] == " " else piece


class VocabularyTokenizer(Tokenizer):
    """A tokenizer over a vocabulary.

    chat_template: the Jinja source in the file. owner: the model that the vocabulary needs to exist.
    """

    def __init__(self, vocabulary: Vocabulary, chat_template: str | None = None, owner: object = None) -> None:
        self._vocabulary, self._owner = vocabulary, owner
        self.padded_size, self._containing = 0, {}
        self.vocab_size = self.base_vocab_size = vocabulary.size
        self.special_tokens, self.config = vocabulary.special_tokens, {}
        self.chat_template = chat_template
        self.bos_token_id, self.eos_token_ids = vocabulary.bos_token_id, vocabulary.eos_token_ids

    @cached_property
    def pieces(self) -> Pieces:
        own = self._vocabulary
        texts = OnDemand(own.size, own.text)
        table = OnDemand(own.size, lambda token: text_or_bytes(own.piece(token)))
        return BytePieces(Joining("utf8"), texts, table, "".join, own.strips_first_space)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return self._vocabulary.special_ids

    @cached_property
    def added_ids(self) -> Sequence[int]:
        return self._vocabulary.added_ids

    @cached_property
    def _ids(self) -> Mapping[str, int]:
        return {token: token_id for token_id, token in self.pieces.tokens.items()}

    def find_token(self, token: str) -> int | None:
        return self._ids.get(token)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._vocabulary.tokenize(text, add_special=add_special_tokens)

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        detokenizer = Detokenizer(self, (), skip_special_tokens)
        return "".join([*map(detokenizer.push, ids), detokenizer.close()])

    def _decode_each(self, ids: list[int]) -> list[str]:
        return [self._decode([token], skip_special_tokens=False) for token in ids]
