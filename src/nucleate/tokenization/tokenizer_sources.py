"""Makes a ``Tokenizer`` from what a caller has: a folder, or a tokenizer in memory."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.tokenization.tokenizer import Tokenizer

ALLOWED = "a folder, a Hugging Face id, a tokenizers.Tokenizer, a tokenizer of Transformers or a nucleate Tokenizer"

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
