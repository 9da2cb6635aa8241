"""The tokenizer of a model: its own, or one that the caller gives."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from nucleate.jit.kernel_cache import warn_once
from nucleate.models.gguf.gguf_file import find_gguf
from nucleate.models.loader import resolve_tokenizer
from nucleate.models.model_source import ModelSource
from nucleate.models.protocol import Model, ModelError
from nucleate.models.transformers.tokenizer_conversion import convert_tokenizer, save_tokenizer
from nucleate.parameters.parameter import ParameterError
from nucleate.tokenization.tokenizer import Tokenizer
from nucleate.tokenization.tokenizer_sources import VocabularyTokenizer, fit_to_model, make_tokenizer

if TYPE_CHECKING:
    from nucleate.models.gguf.gguf_source import GgufSource


def model_tokenizer(given: Any, source: ModelSource | GgufSource, model: Model) -> Tokenizer:
    """The tokenizer of a model, see ``LLM``. Raises ModelError, ParameterError."""
    if given is not None:
        tokenizer = given_tokenizer(given)
    elif (vocabulary := getattr(model, "vocabulary", None)) is not None:
        tokenizer = VocabularyTokenizer(vocabulary, getattr(model, "chat_template", None), model)
    else:
        tokenizer = given_tokenizer(source.folder)
    try:
        unknown = fit_to_model(tokenizer, model.vocab_size, None if given is None else source.eos_token_ids())
    except ValueError as error:
        raise ModelError(f"the tokenizer does not fit the model: {error}") from None
    if unknown:
        warn_once(f"the tokenizer has {len(unknown)} added tokens that the model does not have, such as {unknown[0]}")
    return tokenizer


def given_tokenizer(given: Any) -> Tokenizer:
    """A tokenizer in any form that ``LLM`` takes. Raises ModelError, ParameterError."""
    if isinstance(given, str | os.PathLike):
        if (path := find_gguf(given)) is not None:
            from nucleate.models.gguf.gguf_model import GgufModel

            model = GgufModel(path, vocab_only=True)
            return VocabularyTokenizer(model.vocabulary, model.chat_template, model)
        given = resolve_tokenizer(given)
    try:
        return make_tokenizer(given, convert=convert_tokenizer, save=save_tokenizer)
    except ParameterError:
        raise
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the tokenizer: {error}") from error
