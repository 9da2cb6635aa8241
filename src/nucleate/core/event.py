"""What comes out: pieces of text while a request runs, completions when it has ended. Values only; knows no machine."""

from __future__ import annotations

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


@dataclass(frozen=True)
class Piece:
    """What one step adds to an answer: usually one token. Its text may be held back, and come with a later piece."""

    text: str
    token_ids: tuple[int, ...]
    index: int  #: which of the n answers
    seed: int  #: the seed of this answer: the same seed gives the same answer again
    finish_reason: FinishReason | None = None  #: set on the last piece of an answer
    stop_reason: str | int | None = None  #: see ``Finish.detail``


@dataclass(frozen=True)
class Output:
    """One finished answer. ``token_ids`` has the token that ended it, ``text`` has not (unless asked for)."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int


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

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text
