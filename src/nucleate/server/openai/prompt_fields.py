"""Fields that change the prompt or its place in the response: ``suffix``, truncation, and ``echo`` in a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nucleate.parameters.parameter import ParameterError
from nucleate.server.openai.beam_search import USE_BEAM_SEARCH
from nucleate.server.openai.fields import invalid_value, read_int

TRUNCATE, SIDE = "truncate_prompt_tokens", "truncation_side"


@dataclass(frozen=True)
class Truncation:
    """How many tokens of a prompt to keep: the first or the last ones. count: -1 for as many as fit the context."""

    count: int
    keeps_end: bool = True

    def apply(self, prompt_ids: list[int], max_prompt_tokens: int) -> list[int]:
        """Return the tokens that are kept. max_prompt_tokens: those that fit the context before the output."""
        count = max(1, max_prompt_tokens) if self.count == -1 else self.count
        return prompt_ids[-count:] if self.keeps_end else prompt_ids[:count]


def read_truncation(given: Mapping[str, Any], *, echo: bool, suffix: str | None) -> Truncation | None:
    """Read ``truncate_prompt_tokens`` and ``truncation_side``. echo: of a completion. Raises ParameterError."""
    side = given.get(SIDE, "left")
    if side not in ("left", "right"):
        raise invalid_value(SIDE, "left or right", side)
    if TRUNCATE not in given:
        return None
    count = read_int(given, TRUNCATE, -1)
    if not count:
        raise invalid_value(TRUNCATE, "-1 or an integer >= 1", count)
    for other, is_set in (("echo", echo), ("suffix", suffix is not None)):
        if is_set:
            raise ParameterError(TRUNCATE, f"{TRUNCATE} cannot be combined with {other}")
    return Truncation(count, keeps_end=side == "left")  # the side on which tokens are removed


def read_suffix(given: Mapping[str, Any], prompts: Sequence[str | tuple[int, ...]], *, echo: bool) -> str | None:
    """Read the text after the output; None for an empty one. Raises ParameterError."""
    suffix = given.get("suffix", "")
    if not isinstance(suffix, str):
        raise invalid_value("suffix", "a string", suffix)
    if not suffix:
        return None
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ParameterError("suffix", "suffix needs prompts of text, not of token ids")
    for name, is_set in (("echo", echo), (USE_BEAM_SEARCH, given.get(USE_BEAM_SEARCH))):
        if is_set:
            raise ParameterError("suffix", f"suffix cannot be combined with {name}")
    return suffix


def final_answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the final message if it is the assistant's: with ``echo``, answers begin with it."""
    last = messages[-1]
    return last["content"] or "" if last["role"] == "assistant" else ""
