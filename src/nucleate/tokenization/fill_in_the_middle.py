"""Prompts for models that fill in the middle (FIM): the output goes between a prefix and a suffix.

The format of a model follows from the special tokens in its vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from nucleate.parameters.parameter import ParameterError
from nucleate.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class FillFormat:
    """The tokens before the prefix, before the suffix and before the output.

    middle: "" if the output follows the second text directly. suffix_first: the suffix comes before the prefix.
    ends: further tokens that end the output, as far as they are in the vocabulary.
    """

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False
    ends: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.prefix, self.suffix, self.middle)))


_QWEN_ENDS = ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>")
_STARCODER_ENDS = ("<|endoftext|>", "<fim_pad>", "<repo_name>", "<file_sep>")
FORMATS = (
    FillFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ends=_QWEN_ENDS),  # Qwen, CodeGemma, Granite 4
    FillFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=_STARCODER_ENDS),  # StarCoder, Granite, Refact
    FillFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<|endoftext|>", "<fim-pad>")),  # SantaCoder
    FillFormat("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),  # Code Llama
    FillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder  # noqa: RUF001
    FillFormat("[PREFIX]", "[SUFFIX]", "", suffix_first=True, ends=("[MIDDLE]",)),  # Codestral, Mistral
)
"""The formats, in the order in which they are looked up."""


def find_format(tokenizer: Tokenizer) -> FillFormat | None:
    """Return the format of a model, or None if its vocabulary lacks the tokens."""
    find = tokenizer.find_token
    return next((one for one in FORMATS if all(find(token) is not None for token in one.tokens)), None)


def encode_fill(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Return the token ids of a prompt whose output goes between two texts. Raises ParameterError."""
    found = _format(tokenizer)
    before = [_id(tokenizer, found.prefix), *tokenizer.encode(prefix, add_special_tokens=False)]
    after = [_id(tokenizer, found.suffix), *_encode_suffix(tokenizer, suffix)]
    middle = [_id(tokenizer, found.middle)] if found.middle else []
    texts = [*after, *before] if found.suffix_first else [*before, *after]
    return [*_start(tokenizer), *texts, *middle]


def fill_stop_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids that end an output in the middle, besides EOS. Raises ParameterError."""
    found = _format(tokenizer)
    ids = map(tokenizer.find_token, (*found.tokens, *found.ends))
    return tuple(token_id for token_id in ids if token_id is not None and token_id not in tokenizer.eos_token_ids)


def _format(tokenizer: Tokenizer) -> FillFormat:
    found = find_format(tokenizer)
    if found is None:
        raise ParameterError("suffix", "suffix needs a model with fill-in-the-middle tokens, such as <|fim_prefix|>")
    return found


def _id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.find_token(token)
    assert token_id is not None  # noqa: S101  # the format was found by its tokens
    return token_id


def _start(tokenizer: Tokenizer) -> list[int]:
    """Return the BOS token, if the tokenizer adds one to a text."""
    first = tokenizer.encode("a")[:1]
    return first if first == [tokenizer.bos_token_id] else []


def _encode_suffix(tokenizer: Tokenizer, suffix: str) -> list[int]:
    try:
        return tokenizer.encode_continuations([suffix])[0]
    except ParameterError as error:
        raise ParameterError("suffix", f"suffix: {error}") from None
