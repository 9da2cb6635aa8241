"""llguidance as this package uses it: imported on first use, with its panics and errors, and a vocabulary for it.

A ``Vocabulary`` has the bytes of every token of a model, and the EOS tokens; ``SpecialTokens`` finds special tokens in
a text. A ``DigitLimit`` limits the consecutive digits of numbers in JSON, so that a model cannot repeat digits without
end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from nucleate.parameters.converters import install_extra, shown
from nucleate.structured_output.structural_tag import Token, reject
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

    @cached_property
    def ordinary(self) -> dict[bytes, int]:
        """The tokens that are not special, by their bytes."""
        special = frozenset(self.special_ids)
        return {data: token for token, data in enumerate(self.tokens) if data and token not in special}


def mask_of(tokens: Iterable[int] | NDArray[np.intp], size: int) -> NDArray[np.int32]:
    """Return the bitmask of some token ids, 32 per word."""
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    mask_W = np.packbits(bits, bitorder="little").view(np.int32)
    mask_W.flags.writeable = False
    return mask_W


class FoundToken(NamedTuple):
    """A special token in a text: where it begins and ends, and its id."""

    start: int
    end: int
    token_id: int


@final
class SpecialTokens:
    """The special tokens of a vocabulary by their text. The longest one counts where several begin."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        names = vocabulary.tokenizer.pieces.tokens
        special = [token for token in vocabulary.special_ids if token in vocabulary.allowed_ids]
        self._ids = {names[token]: token for token in reversed(special) if names[token]}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def find(self, text: str, start: int = 0) -> FoundToken | None:
        """Return the first special token in a text, from a position on."""
        found = self._any.search(text, start)
        return None if found is None else FoundToken(found.start(), found.end(), self._ids[found[0]])

    def can_spell(self, text: str) -> bool:
        """Return whether other tokens can write the special tokens in a text, as characters."""
        return all(self._spelled(found[0].encode()) for found in self._any.finditer(text))

    @lru_cache(1024)  # noqa: B019  # one per model
    def _spelled(self, data: bytes) -> bool:
        reached = {0}
        for end in range(1, len(data) + 1):
            if any(data[start:end] in self._vocabulary.ordinary for start in reached):
                reached.add(end)
        return len(data) in reached

    def text(self, token_id: int) -> str:
        return self._vocabulary.tokenizer.pieces.tokens[token_id]

    def is_token(self, reference: str, token_id: int) -> bool:
        """Return whether a reference of a grammar, ``<[id]>`` or ``<name>``, is a token."""
        return reference in (f"<[{token_id}]>", self.text(token_id))

    def resolve(self, token: Token) -> int | str:
        """Return the id of a special token, or the text of another token. Raises ParameterError for an unknown one."""
        vocabulary, given = self._vocabulary, token.token
        token_id = vocabulary.tokenizer.find_token(given) if isinstance(given, str) else given
        if token_id not in vocabulary.allowed_ids:
            reject(token.at, f"{shown(given)} is not a token of this model")
        if token_id in vocabulary.special_ids:
            return token_id
        try:
            return vocabulary.tokens[token_id].decode()
        except UnicodeDecodeError:
            reject(token.at, f"{shown(given)} must be a special token, or one with a text")


def guidance_tokenizer(vocabulary: Vocabulary) -> Any:
    """Return an LLTokenizer. Raises ValueError for unsupported tokens."""
    wrapper = _TokenizerWrapper(vocabulary)
    try:
        kind, eos = library().LLTokenizer, sorted(vocabulary.eos_ids)
        # in two calls, as each keeps all other threads from running: for a second, with 262,144 tokens
        return kind(wrapper, n_vocab=len(wrapper.tokens), eos_token=eos, slices=[]).with_slices(kind.general_slices())
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
        self._vocabulary = vocabulary
        self._special = frozenset(vocabulary.special_ids)

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text in its usual way: masks of determined text allow only these tokens.

        If the tokenizer adds special tokens or its tokens do not decode to this text (for example because of an added
        space), this uses greedy longest match instead.
        """
        data = text.encode()
        try:
            encoded = self._vocabulary.tokenizer.encode(text, add_special_tokens=False)
        except ValueError:  # the tokenizer does not support this text
            return self._longest_match(data)
        ordinary = all(token < len(self.tokens) and token not in self._special for token in encoded)
        decoded = b"".join(self.tokens[token] for token in encoded) if ordinary else None
        return encoded if decoded == data else self._longest_match(data)

    def _longest_match(self, data: bytes) -> list[int]:
        """Tokenize by greedy longest match; stops where no token matches."""
        encoded, position, ordinary = [], 0, self._vocabulary.ordinary
        while position < len(data):
            ends = range(min(len(data), position + MAX_TOKEN_BYTES), position, -1)
            end = next((end for end in ends if data[position:end] in ordinary), None)
            if end is None:
                break
            encoded.append(ordinary[data[position:end]])
            position = end
        return encoded


_DIGITS = frozenset(b"0123456789")
_LEADING = re.compile(rb"[0-9]*")


class JsonPosition(NamedTuple):
    """The position in a JSON text: in a string, after its backslash, or after ``digits`` digits of a number."""

    in_string: bool = False
    escaped: bool = False
    digits: int = 0

    def after(self, data: bytes) -> JsonPosition:
        in_string, escaped, digits = self
        for byte in data:
            if in_string:
                in_string, escaped = escaped or byte != 0x22, not escaped and byte == 0x5C
            elif byte in _DIGITS:
                digits += 1
            else:
                in_string, digits = byte == 0x22, 0
        return JsonPosition(in_string, escaped, digits)


@final
class TokenDigits:
    """The number of digits with which each token of a vocabulary begins."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        leading = [_LEADING.match(data) for data in tokens]
        self._leading_V = np.array([0 if found is None else found.end() for found in leading], np.int32)
        self.longest = int(self._leading_V.max(initial=0))
        self.allowed = lru_cache(32)(self._allowed)

    def _allowed(self, digits: int) -> NDArray[np.int32]:
        """Return the bitmask of the tokens that begin with at most so many digits."""
        return mask_of(np.flatnonzero(self._leading_V <= digits), len(self.tokens))


@final
class DigitLimit:
    """The limit of one constraint."""

    def __init__(self, digits: TokenDigits, maximum: int) -> None:
        self.tokens, self._digits, self._maximum = digits.tokens, digits, maximum

    def applies(self, position: JsonPosition) -> bool:
        """Whether some token would exceed the limit."""
        return position.digits > 0 and position.digits + self._digits.longest > self._maximum

    def apply(self, position: JsonPosition, mask_W: NDArray[np.int32]) -> None:
        """Remove the tokens that exceed the limit from a bitmask, unless no other token is left."""
        allowed_W = mask_W & self._digits.allowed(max(0, self._maximum - position.digits))
        if allowed_W.any():
            mask_W[:] = allowed_W
