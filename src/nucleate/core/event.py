"""What comes out: pieces of text while a request runs, completions when it has ended. Values only; knows no machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


class Finish(NamedTuple):
    """Why a sequence ended.

    ``detail`` is the public ``stop_reason``: the stop string, token id or pattern that matched; the message of an
    error; None for EOS and for a length that was reached.
    """

    reason: FinishReason
    detail: str | int | None = None


class TokenLogprob(NamedTuple):
    """How likely one token was: the natural logarithm, and 1 + the number of tokens before it in the order.

    A token that was not in has the logprob -inf, and no rank.
    """

    token_id: int
    logprob: float
    rank: int | None


class StepLogprobs(NamedTuple):
    """What the distribution of a step was: of the token chosen, of the likeliest ones, of those asked for."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    asked: tuple[TokenLogprob, ...]


PromptLogprobs = tuple[StepLogprobs | None, ...]
"""One per token of the prompt, raw; None for the first, before which there is nothing, and after logits with a NaN."""


@dataclass(frozen=True)
class Piece:
    """What one step adds to an answer: usually one token. Its text may be held back, and come with a later piece."""

    text: str
    token_ids: tuple[int, ...]
    index: int  #: which of the n answers
    seed: int  #: the seed of this answer: the same seed gives the same answer again
    finish_reason: FinishReason | None = None  #: set on the last piece of an answer
    stop_reason: str | int | None = None  #: see ``Finish.detail``
    logprobs: tuple[StepLogprobs, ...] | None = None  #: one per token, if they were asked for
    prompt_logprobs: PromptLogprobs | None = None  #: on the first piece of the first answer, if they were asked for


@dataclass(frozen=True)
class Output:
    """One finished answer. ``token_ids`` has the token that ended it, ``text`` has not (unless asked for)."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int
    logprobs: tuple[StepLogprobs, ...] | None = None  #: one per token, if they were asked for

    @property
    def cumulative_logprob(self) -> float | None:
        """The logprob of the whole answer, the sum of those of its tokens, if they were asked for."""
        return None if self.logprobs is None else math.fsum(step.chosen.logprob for step in self.logprobs)


@dataclass(frozen=True)
class Usage:
    """Tokens read and written, over all answers of a request."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Completion:
    """The answers to one prompt."""

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Output, ...]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None  #: if they were asked for

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text
