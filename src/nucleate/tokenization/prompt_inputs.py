"""Checks the prompts and messages that Python callers pass."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.tokenization.tokenizer import Tokenizer


def check_prompts(prompts: Any) -> list[Any]:
    """Return prompts as a list; each prompt is checked when it is encoded. Raises ParameterError."""
    given = [prompts] if isinstance(prompts, str) else as_list(prompts)
    if given is None:
        allowed = "a string, or a list of strings or of lists of token ids"
        raise ParameterError("prompts", f"prompts must be {allowed}, got {shown(prompts)}")
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
    raise ParameterError(
        "messages", f"messages must be a list of messages, such as {example}, or of such lists, got {shown(messages)}"
    )
