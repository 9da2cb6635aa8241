"""llguidance as this package uses it: imported on first use, with its panics and errors, and a vocabulary for it.

A ``Vocabulary`` has the bytes of every token of a model, and the EOS tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache, cached_property
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from nucleate.parameters.converters import install_extra
from nucleate.tokenization.tokenizer import Tokenizer

FAILED: Final = "the grammar engine failed"

_POSITION = re.compile(r"^(?:at )?\d+\(\d+\): ")


@cache
def library() -> Any:
    """Return the module llguidance. Raises ModuleNotFoundError, which names the package to install."""
    try:
        import llguidance
    except ModuleNotFoundError as error:
        if error.name != "llguidance":
            raise
        message = f"structured output needs the package llguidance: {install_extra('structured')}"
        raise ModuleNotFoundError(message) from None
    return llguidance


@cache
def parser_limits() -> Any:
    """Return llguidance's limits for the Earley parser and the lexer.

    Items per row: enough for a thousand optional properties. Items per step: llguidance's default, because a mask over
    a large vocabulary needs thousands even for simple patterns. ``TimeBudget`` limits ambiguous grammars. Verbose
    errors would quote the grammar.
    """
    return library().LLParserLimits(
        max_items_in_row=5_000, step_max_items=50_000, max_lexer_states=50_000, verbose_errors=False
    )


def raise_unless_panic(error: BaseException) -> None:
    """Re-raise an error unless it is a Rust panic of llguidance, which is a BaseException of a private class."""
    if type(error).__name__ != "PanicException" or type(error).__module__ != "pyo3_runtime":
        raise error


def short_message(message: str, keep_position: bool = False) -> str:
    """Shorten an error message of llguidance to one line of 200 characters. keep_position: keep line and column."""
    lines = message.partition("<non-verbose/>")[0].splitlines() or ["it cannot be used"]
    line = lines[0]
    found = _POSITION.match(line)
    reasons = [text for text in lines if text.startswith("error: ")]
    if reasons:
        line = f"{found[0] if found else ''}{reasons[-1].removeprefix('error: ')}"
    if not keep_position:
        line = _POSITION.sub("", line)
    line = " ".join(line.split())
    return line if len(line) <= 200 else line[:197] + "..."


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
