"""What a beam search is asked for, and what comes out of it: values only. Knows no engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self, final

from nucleate.engine.request import Request
from nucleate.outputs import CompletionChunk, FinishReason, StepLogprobs, Usage, Validation
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import Parameter, ParameterError, param, unknown, with_parameters
from nucleate.structured_output.spec import StructuredOutputs


@final
@with_parameters
class BeamParams:
    """How to search for the likeliest answers to a prompt. docs/semantics.md says what all of it means.

    early_stopping says when ``width`` finished answers are enough: True, at once; False, when the best open one, had it
    ended here, would not beat the worst of them; "never", when it would not even at the best length it can still have.
    Raises ParameterError, which names the field.
    """

    PARAMETERS: ClassVar[dict[str, Parameter]]

    width: int = param("beams that are followed at a time", default=4, low=1)
    max_tokens: int | None = param("most tokens of an answer; none: as many as the context holds", default=None, low=1)
    length_penalty: float = param(
        "exponent of the length by which a logprob is divided; above 0 favours long answers", default=1.0
    )
    early_stopping: bool | Literal["never"] = False
    returned: int | None = param("how many of the best answers to return; none: width", default=None, low=1)
    groups: int = param("groups that share the width, each a search of its own", default=1, low=1)
    diversity_penalty: float = param(
        "what a token loses for each beam of an earlier group that goes on with it", default=0.0, low=0.0, high=1e6
    )
    structured_outputs: StructuredOutputs | None = param(
        "constrain the output to a JSON schema, a JSON object, a regex, a list of choices or a grammar", default=None
    )
    stop_token_ids: tuple[int, ...] = param("token ids that end an answer, as EOS does", default=(), low=0)
    ignore_eos: bool = param("go on after the end-of-sequence token", default=False)
    logprobs: int | None = param(
        "how many of the likeliest tokens to report per step, beside the chosen one", default=None, low=0
    )
    skip_special_tokens: bool = param("leave special tokens out of the text", default=True)

    def __post_init__(self) -> None:
        for name, parameter in self.PARAMETERS.items():
            object.__setattr__(self, name, parameter.check(getattr(self, name)))
        self.check(1 if self.max_tokens is None else self.max_tokens)

    def check(self, max_tokens: int) -> None:
        """Raise ParameterError for values that do not go together where answers may have so many tokens."""
        early: Any = self.early_stopping
        penalty, returned = self.length_penalty, self.returned
        if not isinstance(early, bool) and not (isinstance(early, str) and early == "never"):
            message = f"early_stopping must be true, false or 'never', got {shown(early)}"
            raise ParameterError("early_stopping", message)
        if abs(penalty) * math.log(max_tokens) > 700:  # else the power would not be a number, or zero
            allowed = "within e**-700..e**700"
            message = f"length_penalty must leave max_tokens ** length_penalty {allowed}, got {shown(penalty)}"
            raise ParameterError("length_penalty", message)
        if returned is not None and returned > self.width:
            raise ParameterError("returned", f"returned must be at most width ({self.width}), got {returned}")
        if self.width % self.groups:
            raise ParameterError("groups", f"groups must divide width ({self.width}), got {self.groups}")

    @property
    def n(self) -> int:
        """How many answers are asked for."""
        return self.width if self.returned is None else self.returned


@final
@dataclass(frozen=True)
class BeamRequest:
    """A prompt whose likeliest answers are looked for. id and priority: as in ``Request``.

    Nothing is told before the search is over, as no token is certain before that. Then there is an event for each
    answer, the best first, whose ``BeamPiece`` is all of it, ``index`` its rank; the last one has the usage, in which
    the tokens of these answers count. Of a search that failed or was aborted there is one event, without a token.
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
@dataclass(frozen=True)
class BeamPiece(CompletionChunk):
    """A whole answer of a search. ``seed`` is 0: there is no chance in it."""

    score: float = float("-inf")  #: logprob / number of tokens ** length_penalty
    logprob: float = float("-inf")  #: natural logarithm of the probability of all tokens, whatever was allowed


@final
@dataclass(frozen=True)
class BeamOutput:
    """One answer. ``token_ids`` has the token that ended it, ``text`` has not. See ``BeamPiece`` and ``Output``."""

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
    """The likeliest answers to one prompt, the best first.

    If the search failed there is one, without tokens, whose finish_reason is "error", and stop_reason the message.
    """

    prompt_token_ids: tuple[int, ...]
    beams: tuple[BeamOutput, ...]
    usage: Usage

    @classmethod
    def of(cls, prompt_token_ids: Iterable[int], pieces: Iterable[CompletionChunk]) -> Self:
        """What the pieces of a ``BeamRequest`` make up."""
        beams = tuple(_output(piece) for piece in sorted(pieces, key=lambda piece: piece.index))
        prompt = tuple(prompt_token_ids)
        return cls(prompt, beams, Usage(len(prompt), sum(len(beam.token_ids) for beam in beams)))

    @property
    def text(self) -> str:
        """The text of the best answer."""
        return self.beams[0].text


def _output(piece: CompletionChunk) -> BeamOutput:
    score, logprob = (piece.score, piece.logprob) if isinstance(piece, BeamPiece) else (float("-inf"),) * 2
    return BeamOutput(
        piece.text,
        piece.token_ids,
        score,
        logprob,
        piece.finish_reason or "abort",
        piece.stop_reason,
        piece.logprobs,
        piece.validation,
    )


def beam_params(params: BeamParams | None, values: dict[str, Any]) -> BeamParams:
    """The parameters of a call that takes them as a value, or one by one. Raises ParameterError."""
    if params is None:
        known = [field.name for field in fields(BeamParams)]
        for name in values:
            if name not in known:
                raise unknown(name, known)
        return BeamParams(**values)
    if not isinstance(params, BeamParams):
        raise ParameterError("params", f"params must be a BeamParams, got {params!r:.60}")
    if values:
        raise ParameterError(next(iter(values)), f"give params or {', '.join(values)}, not both")
    return params
