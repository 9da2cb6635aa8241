"""Requests of an engine: what a caller passes in, its validation, and the recorder that receives their steps."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nucleate.chat.reasoning import ReasoningSection
from nucleate.engine.companions import Companion
from nucleate.models.protocol import ModelLimits
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.inputs import check_ids
from nucleate.sampling.pipeline import PreparedPipeline, prepared
from nucleate.sampling.pipeline_format import is_pipeline
from nucleate.sampling.stage import Pipeline, Stage
from nucleate.sampling_params import SamplingParams
from nucleate.stopping.stop_matcher import StopRules
from nucleate.structured_output import CompiledGrammar, Guide
from nucleate.tokenization.tokenizer import Tokenizer
from nucleate.watermark.kinds import check_watermark, with_watermark


class SamplingInputs(NamedTuple):
    """What a token was sampled from."""

    logits: NDArray[np.float32]  #: [V], after guidance, before all other stages; owned by the receiver
    stages: Pipeline  #: simplified, with the state of this step
    mask: NDArray[np.int32] | None  #: [W], the tokens that the grammar allowed


class RecordedStep(NamedTuple):
    """One token of an output.

    origin: "sampled"; "given", one of ``Request.output_ids``; or "forced", the only token that the grammar allowed.
    """

    output_index: int  #: of the output among the n of the request
    position: int  #: of the token in the output: the step of its noise
    token_id: int  #: -1 if no token could be sampled
    origin: Literal["sampled", "given", "forced"]
    inputs: SamplingInputs | None = None  #: None unless it was sampled


class StepRecorder(Protocol):
    """Receives the steps of a request, on the thread that runs the engine: methods must be fast and must not raise."""

    def record(self, step: RecordedStep) -> None:
        """A token was appended. Steps come in order, before the chunk with their token."""

    def record_draft(self, output_index: int, position: int, accepted: int, rejected: Sequence[int]) -> None:
        """A draft was verified: the tokens from ``position`` on that were accepted, then the rejected alternatives."""


def copied_row(logits_LV: Any, row: int) -> NDArray[np.float32]:
    """One row of the logits, NumPy or torch, as a copy."""
    found = logits_LV[row]
    return np.array(found.float().cpu().numpy() if hasattr(found, "detach") else found, np.float32)


MAX_N = 128
"""The highest value of ``n``."""


@with_suggestions
@dataclass(frozen=True)
class Request:
    """A prompt and its sampling parameters. prompt_ids: token ids, at least one. priority: lower runs first.

    params: a tuple of stages stands for ``SamplingParams(pipeline=stages)``.
    id: a string that no other running request has; without one, the engine assigns it.
    output_ids: tokens with which each output begins; they count as generated (penalties, stop criteria, ``max_tokens``,
    noise), and are returned. recorder: receives what each token was sampled from. kept_token_ids: special tokens that
    are in the text although ``skip_special_tokens`` is set, such as the markers of tool calls. reasoning: the reasoning
    section of the outputs, for ``max_reasoning_tokens``. turn_ends: texts that end an output as EOS does, those of the
    chat template. prompt_only: the output is one token, which the caller drops:
    then the prompt may fill the context.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    id: str | None = None
    priority: int = 0
    output_ids: Sequence[int] = ()
    recorder: StepRecorder | None = field(default=None, compare=False)
    kept_token_ids: frozenset[int] = frozenset()
    reasoning: ReasoningSection | None = None
    turn_ends: tuple[str, ...] = ()
    prompt_only: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", _token_ids(self.prompt_ids, "prompt", "prompt_ids"))
        if self.output_ids != ():
            object.__setattr__(self, "output_ids", _token_ids(self.output_ids, "output_ids", "output_ids"))
        if isinstance(self.params, tuple) and is_pipeline(self.params):
            object.__setattr__(self, "params", SamplingParams(pipeline=self.params))
        if not isinstance(self.params, SamplingParams):
            raise ParameterError(
                "params", f"params must be a SamplingParams or a tuple of stages, got {self.params!r:.60}"
            )
        if self.id is not None and not isinstance(self.id, str):
            raise ParameterError("id", f"id must be a string or None, got {self.id!r:.60}")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise ParameterError("priority", f"priority must be an integer, got {self.priority!r:.60}")


def _token_ids(given: Sequence[int], field_name: str, name: str) -> tuple[int, ...]:
    if isinstance(given, str | bytes):
        raise ParameterError(field_name, f"{name} are token ids, not text, got {given!r:.60}")
    try:
        if any(isinstance(token, bool) for token in given):
            raise TypeError
        return tuple(map(operator.index, given))
    except TypeError:
        raise ParameterError(field_name, f"{name} must be token ids, got {given!r:.60}") from None


def stages_of(params: SamplingParams, vocab_size: int, tokenizer: Tokenizer) -> Pipeline:
    """The sampling pipeline of some parameters, for a model and its tokenizer."""
    ends = tuple(token for token in tokenizer.eos_token_ids if token < vocab_size)  # others cannot be sampled
    stages = params.build_pipeline(ends, tokenizer)
    check_ids(stages, vocab_size)
    return stages


class PipelineCache:
    """The prepared pipelines of parameters, for a model, its tokenizer and a watermark. Raises ParameterError."""

    def __init__(self, vocab_size: int, tokenizer: Tokenizer, watermark: Stage | None = None) -> None:
        self._vocab_size, self._tokenizer, self._watermark = vocab_size, tokenizer, check_watermark(watermark)
        self._cached = lru_cache(maxsize=256)(self._prepare)

    def get(self, params: SamplingParams) -> PreparedPipeline:
        """The pipeline of some parameters. Raises ParameterError."""
        return (self._cached if params.cacheable else self._prepare)(params)

    def _prepare(self, params: SamplingParams) -> PreparedPipeline:
        stages = stages_of(params, self._vocab_size, self._tokenizer)
        return prepared(stages if self._watermark is None else with_watermark(stages, self._watermark))


def admit(
    model: ModelLimits,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    regex_seconds: float = 0.5,
    *,
    prompt_only: bool = False,
    turn_ends: tuple[str, ...] = (),
) -> StopRules:
    """Validate a request against the model, and build its stop rules. Raises ParameterError.

    prompt_only: the output needs no room in the context; turn_ends: texts that end it, see ``Request``.
    """
    size, room = model.vocab_size, model.context_length - len(prompt_ids) + prompt_only
    if not len(prompt_ids):
        raise ParameterError("prompt", "the prompt is empty; it must have at least one token")
    if not all(0 <= token < size for token in prompt_ids):
        raise ParameterError("prompt", f"the prompt holds token ids outside the vocabulary (0..{size - 1})")
    if room < 1:
        raise ParameterError(
            "prompt",
            f"the prompt has {len(prompt_ids)} tokens, but the context holds {model.context_length}, output included",
        )
    if params.min_tokens > room:
        message = f"min_tokens is {params.min_tokens}, but the context has room for {room} tokens after the prompt"
        raise ParameterError("min_tokens", message)
    for token in params.stop_token_ids:
        if token >= size:
            raise ParameterError(
                "stop_token_ids", f"stop_token_ids names token {token}, but the vocabulary ends at {size - 1}"
            )
    max_tokens = 1 if prompt_only else room if params.max_tokens is None else min(params.max_tokens, room)
    ends = frozenset(tokenizer.eos_token_ids)
    if turn_ends and not params.ignore_eos:
        special = tokenizer.special_texts
        ends = ends.union(special[text] for text in turn_ends if special.get(text, size) < size)
        turn_ends = tuple(text for text in turn_ends if text not in special)
    return stop_rules(params, ends, max_tokens, regex_seconds, tokenizer, turn_ends)


def stop_rules(
    params: SamplingParams,
    eos_token_ids: frozenset[int],
    max_tokens: int | None,
    regex_seconds: float = 0.5,
    tokenizer: Tokenizer | None = None,
    turn_ends: tuple[str, ...] = (),
) -> StopRules:
    """The stop rules of some parameters. max_tokens: None for no limit. turn_ends: texts without special tokens.

    Raises ParameterError.
    """
    special = tokenizer.special_texts if tokenizer is not None and params.stop and params.skip_special_tokens else {}
    return StopRules(
        stop=params.stop,
        stop_special=tuple((special[text], text) for text in params.stop if text in special),
        stop_token_ids=frozenset(params.stop_token_ids),
        eos_token_ids=eos_token_ids,
        turn_ends=() if params.ignore_eos else turn_ends,
        stop_regex=params.stop_regex,
        stop_json=params.stop_json,
        include_stop_str_in_output=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        regex_seconds=regex_seconds,
    )


def check_output_ids(
    request: Request, rules: StopRules, vocab_size: int, grammar: CompiledGrammar | None = None
) -> None:
    """Check the tokens with which the outputs of a request begin. Raises ParameterError."""
    given, most = request.output_ids, rules.max_tokens
    if not given:
        return
    if not all(0 <= token < vocab_size for token in given):
        message = f"output_ids holds token ids outside the vocabulary (0..{vocab_size - 1})"
        raise ParameterError("output_ids", message)
    if most is not None and len(given) >= most:
        room = f"the output has room for {most} tokens (max_tokens, or the context)"
        raise ParameterError("output_ids", f"output_ids has {len(given)} tokens, but {room}")
    if grammar is not None:
        guide = Guide(grammar, ignore_eos=request.params.ignore_eos)
        for place, token in enumerate(given):
            if guide.accept_token(token) or guide.error is not None:
                where = f"token {place} of output_ids ({token})"
                what = "does not match it" if guide.error is not None else "ends the output"
                raise ParameterError("output_ids", f"{where}: the structured_outputs of the request {what}")


class ValidatedRequest(NamedTuple):
    """A request that was checked against the model, with its pipeline, stop rules, grammar and companion."""

    request: Request
    pipeline: PreparedPipeline
    rules: StopRules
    grammar: CompiledGrammar | None
    companion: Companion | None = None
