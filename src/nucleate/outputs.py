"""What comes out: pieces of text while a request runs, completions when it has ended. Values only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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


class Validation(NamedTuple):
    """How far an answer fulfils a schema that could not be held in full."""

    ignored: tuple[str, ...]  #: the keywords that were not held, and where they are
    errors: tuple[str, ...]  #: what is wrong with the text, as the library jsonschema finds it; () if it is right


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
class CompletionChunk:
    """What one step adds to an answer: usually one token. Its text may be held back, and come with a later piece."""

    text: str
    token_ids: tuple[int, ...]
    index: int  #: which of the n answers
    seed: int  #: the seed of this answer: the same seed gives the same answer again
    finish_reason: FinishReason | None = None  #: set on the last piece of an answer
    stop_reason: str | int | None = None  #: see ``Finish.detail``
    logprobs: tuple[StepLogprobs, ...] | None = None  #: one per token, if they were asked for
    prompt_logprobs: PromptLogprobs | None = None  #: on the first piece of the first answer, if they were asked for
    validation: Validation | None = None  #: on the last piece, if a schema was asked for that is not held in full


@dataclass(frozen=True)
class CompletionOutput:
    """One finished answer. ``token_ids`` has the token that ended it, ``text`` has not (unless asked for)."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int
    logprobs: tuple[StepLogprobs, ...] | None = None  #: one per token, if they were asked for
    validation: Validation | None = None  #: if a schema was asked for that is not held in full

    @classmethod
    def of(cls, pieces: Sequence[CompletionChunk]) -> CompletionOutput:
        """The answer that its pieces make up."""
        last = pieces[-1]
        token_ids = tuple(token for piece in pieces for token in piece.token_ids)
        text = "".join(piece.text for piece in pieces)
        steps = tuple(step for piece in pieces for step in piece.logprobs or ())
        logprobs = steps if len(steps) == len(token_ids) > 0 else None
        reason = last.finish_reason or "abort"
        return cls(last.index, text, token_ids, reason, last.stop_reason, last.seed, logprobs, last.validation)

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
    outputs: tuple[CompletionOutput, ...]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None  #: if they were asked for

    @classmethod
    def of(cls, prompt_token_ids: Iterable[int], pieces: Iterable[CompletionChunk]) -> Completion:
        """The completion that pieces make up: those of an answer in their order, the answers in any."""
        answers: dict[int, list[CompletionChunk]] = {}
        for piece in pieces:
            answers.setdefault(piece.index, []).append(piece)
        outputs = tuple(CompletionOutput.of(answers[index]) for index in sorted(answers))
        of_prompt = (piece.prompt_logprobs for own in answers.values() for piece in own if piece.prompt_logprobs)
        prompt = tuple(prompt_token_ids)
        usage = Usage(len(prompt), sum(len(output.token_ids) for output in outputs))
        return cls(prompt, outputs, usage, next(of_prompt, None))

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text


@dataclass(frozen=True)
class EngineOutput:
    """What an engine tells of a request: what a step adds to one of its answers."""

    request_id: str
    piece: CompletionChunk
    usage: Usage | None = None  #: on the last event of a request

    @property
    def last(self) -> bool:
        """Whether the request has ended: all its answers have."""
        return self.usage is not None
