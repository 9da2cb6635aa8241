"""Prompts that no chat template renders: those that Python callers pass, and those for fill-in-the-middle (FIM).

With fill-in-the-middle, the output goes between a prefix and a suffix. The special tokens of a model show its format.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from nucleate.parameters.parameter import ParameterError, invalid_value
from nucleate.tokenization.tokenizer import Tokenizer


def check_prompts(prompts: Any) -> list[Any]:
    """Return prompts as a list; each prompt is checked when it is encoded. Raises ParameterError."""
    given = [prompts] if isinstance(prompts, str) else as_list(prompts)
    if given is None:
        raise invalid_value("prompts", "a string, or a list of strings or of lists of token ids", prompts)
    if given and isinstance(given[0], numbers.Integral):
        raise ParameterError("prompts", f"prompts must be a string or a list of prompts, such as [{given!r:.40}]")
    return given


def encode_prompt(tokenizer: Tokenizer, prompt: Any) -> list[int]:
    """Return the token ids of a text, with the model's special tokens, or checked ids. Raises ParameterError.

    An empty text is the BOS token alone, also for a tokenizer that adds no BOS by itself, such as GPT-2's.
    """
    if isinstance(prompt, str):
        if ids := tokenizer.encode(prompt):
            return ids
        bos = tokenizer.bos_token_id
        if bos is None:
            why = "the prompt is empty, and this tokenizer has no BOS token, from which an empty prompt would begin"
            raise ParameterError("prompt", why)
        return [bos]
    tokens = as_list(prompt)
    try:
        if tokens is None or any(isinstance(token, bool) for token in tokens):
            raise TypeError
        return [operator.index(token) for token in tokens]
    except TypeError:
        raise ParameterError("prompt", f"a prompt is a string or a list of token ids, got {prompt!r:.60}") from None


def as_list(value: Any) -> list[Any] | None:
    """Return a sequence or iterator as a list; None for strings, bytes, mappings, sets and what is not iterable."""
    if isinstance(value, str | bytes | Mapping | AbstractSet) or not isinstance(value, Iterable):
        return None
    return list(value)


def is_conversation(messages: Any) -> bool:
    """Whether messages are one conversation, and not a list of conversations. Raises ParameterError for neither."""
    if isinstance(messages, list | tuple):
        if not messages or any(isinstance(one, Mapping) for one in messages):
            return True
        if all(isinstance(one, list | tuple) for one in messages):
            return False
    example = "[{'role': 'user', 'content': 'Hello'}]"
    raise invalid_value("messages", f"a list of messages, such as {example}, or of such lists", messages)


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
    marks: Any = map(tokenizer.find_token, found.tokens)  # the format was found by its tokens
    first, second, *middle = marks
    before = [first, *tokenizer.encode(prefix, add_special_tokens=False)]
    try:
        after = [second, *tokenizer.encode_continuations([suffix])[0]]
    except ParameterError as error:
        raise ParameterError("suffix", f"suffix: {error}") from None
    start = tokenizer.encode("a")[:1]
    bos = start if start == [tokenizer.bos_token_id] else []  # if the tokenizer adds it to a text
    return [*bos, *after, *before, *middle] if found.suffix_first else [*bos, *before, *after, *middle]


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
