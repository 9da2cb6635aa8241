"""Parameters, requests and results of a beam search (values only)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self, final

from nucleate.engine.request import Request
from nucleate.outputs import CompletionChunk, FinishReason, StepLogprobs, Usage, Validation
from nucleate.parameters.converters import shown
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import Parameter, ParameterError, param, with_parameters
from nucleate.structured_output.spec import StructuredOutputs

MAX_BEAMS = 1024
"""The highest number of beams: each holds a row of logits, and a step ranks all of them together."""


@with_suggestions
@final
@with_parameters
class BeamParams:
    """Parameters of a beam search: it returns the highest-scoring outputs for a prompt. See docs/semantics.md.

    early_stopping, as in Transformers: when to stop once ``num_beams`` beams have finished. True: at once. False: when
    the best unfinished beam, scored at its current length, cannot beat the worst finished one. "never": the same,
    scored at the best length it can still reach. Raises ParameterError, which names the field.
    """

    PARAMETERS: ClassVar[dict[str, Parameter]]

    num_beams: int = param("number of beams (beam width)", default=4, low=1, high=MAX_BEAMS)
    max_tokens: int | None = param(
        "maximum number of tokens to generate per beam; none: as many as fit the context", default=None, low=1
    )
    length_penalty: float = param(
        "a score is the logprob divided by length ** length_penalty; above 0 favours long outputs", default=1.0
    )
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int | None = param(
        "number of highest-scoring outputs to return; none: num_beams", default=None, low=1
    )
    num_beam_groups: int = param("groups that the beams are divided into (diverse beam search)", default=1, low=1)
    diversity_penalty: float = param(
        "subtracted from a token's score for each beam of an earlier group that chose it",
        default=0.0,
        low=0.0,
        high=1e6,
    )
    structured_outputs: StructuredOutputs | None = param("structured output, see SamplingParams", default=None)
    stop_token_ids: tuple[int, ...] = param("token ids that end an output, as EOS does", default=(), low=0)
    ignore_eos: bool = param("continue after the end-of-sequence token", default=False)
    logprobs: int | None = param(
        "number of most likely tokens to report per step, in addition to the chosen one", default=None, low=0
    )
    skip_special_tokens: bool = param("omit special tokens from the text", default=True)

    def __post_init__(self) -> None:
        for name, parameter in self.PARAMETERS.items():
            object.__setattr__(self, name, parameter.check(getattr(self, name)))
        self.check(1 if self.max_tokens is None else self.max_tokens)

    def check(self, max_tokens: int) -> None:
        """Raise ParameterError for values that contradict each other, given the longest possible output."""
        early: Any = self.early_stopping
        penalty, count, beams = self.length_penalty, self.num_return_sequences, self.num_beams
        if not isinstance(early, bool) and not (isinstance(early, str) and early == "never"):
            message = f"early_stopping must be true, false or 'never', got {shown(early)}"
            raise ParameterError("early_stopping", message)
        if abs(penalty) * math.log(max_tokens) > 700:  # else the power would not be a number, or zero
            allowed = "within e**-700..e**700"
            message = f"length_penalty must leave max_tokens ** length_penalty {allowed}, got {shown(penalty)}"
            raise ParameterError("length_penalty", message)
        if count is not None and count > beams:
            message = f"num_return_sequences must be at most num_beams ({beams}), got {count}"
            raise ParameterError("num_return_sequences", message)
        if beams % self.num_beam_groups:
            message = f"num_beam_groups must divide num_beams ({beams}), got {self.num_beam_groups}"
            raise ParameterError("num_beam_groups", message)

    @property
    def n(self) -> int:
        """The number of outputs to return."""
        return self.num_beams if self.num_return_sequences is None else self.num_return_sequences


@with_suggestions
@final
@dataclass(frozen=True)
class BeamRequest:
    """A request to search for the highest-scoring outputs of a prompt. id and priority: as in ``Request``.

    No token is final before the search ends, so all output comes at the end: one ``EngineOutput`` per returned
    sequence, best first, each with a complete ``BeamChunk`` whose ``index`` is its rank. The last one has the usage,
    which counts the tokens of the returned sequences. A search that fails or is aborted gives one output without
    tokens.
    """

    prompt_ids: Sequence[int]
    params: BeamParams = field(default_factory=BeamParams)
    id: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        checked = Request(self.prompt_ids, id=self.id, priority=self.priority)
        object.__setattr__(self, "prompt_ids", checked.prompt_ids)
        if not isinstance(self.params, BeamParams):
            raise ParameterError("params", f"params must be a BeamParams, got {self.params!r:.60}")


@final
@dataclass(slots=True)
class BeamChunk(CompletionChunk):
    """A complete output of a beam search. ``seed`` is always 0, as beam search is deterministic."""

    score: float = float("-inf")  #: logprob / number of tokens ** length_penalty
    logprob: float = float("-inf")  #: natural logarithm of the probability of all tokens, before any grammar mask


@final
@dataclass(frozen=True)
class BeamOutput:
    """One returned sequence. ``token_ids`` includes the token that ended it, ``text`` does not.

    See ``BeamChunk`` and ``CompletionOutput``.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float
    logprob: float
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[StepLogprobs, ...] | None = None
    validation: Validation | None = None


@final
@dataclass(frozen=True)
class BeamCompletion:
    """The highest-scoring outputs for one prompt, best first.

    If the search failed, there is one output without tokens, with finish_reason "error" and the message in stop_reason.
    """

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[BeamOutput, ...]
    usage: Usage

    @classmethod
    def from_chunks(cls, prompt_token_ids: Iterable[int], pieces: Iterable[BeamChunk]) -> Self:
        """Assemble the completion of a ``BeamRequest``. pieces: its chunks. prompt_token_ids: those of the request."""
        names = [one.name for one in fields(BeamOutput)]
        ranked = sorted(pieces, key=lambda piece: piece.index)
        outputs = tuple(BeamOutput(**{name: getattr(piece, name) for name in names}) for piece in ranked)
        prompt = tuple(prompt_token_ids)
        return cls(prompt, outputs, Usage(len(prompt), sum(len(output.token_ids) for output in outputs)))

    @property
    def text(self) -> str:
        """The text of the best output."""
        return self.outputs[0].text
