"""Results of generation: chunks while a request runs, completions when it has finished, and an engine's counters.

Values only, with their JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class Finish(NamedTuple):
    """Why a sequence finished.

    ``detail`` becomes ``stop_reason``: the stop string, token id or pattern that matched, or an error message; None
    for EOS and for a reached length.
    """

    reason: FinishReason
    detail: str | int | None = None


class Validation(NamedTuple):
    """Result of validating an output against a JSON schema that could not be enforced completely."""

    #: the keywords that were not enforced, and unknown words that look like keywords, with their places in the schema
    ignored: tuple[str, ...]
    errors: tuple[str, ...]  #: the validation errors that the package jsonschema reports; () for a valid output
    unchecked: tuple[str, ...] = ()  #: string formats that were neither enforced nor validated


class TokenLogprob(NamedTuple):
    """Log-probability of one token (natural logarithm), and its rank, from 1.

    A masked token has the logprob -inf and the rank None.
    """

    token_id: int
    logprob: float
    rank: int | None


class StepLogprobs(NamedTuple):
    """Logprobs of one step: of the sampled token, of the most likely ones, and of ``logprob_token_ids``."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    requested: tuple[TokenLogprob, ...]


PromptLogprobs = tuple[StepLogprobs | None, ...]
"""Raw logprobs of each prompt token; None for the first one, and after logits with a NaN."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the model. arguments_json: the arguments as the model wrote them, a JSON object.

    complete: False if the output ended within the call, or if its arguments are not JSON; ``arguments_json`` is then
    what there is of them.
    """

    id: str
    name: str
    arguments_json: str
    complete: bool = True

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name. Raises ValueError if the call is incomplete."""
        if not self.complete:
            raise ValueError(f"the call of {self.name} is incomplete; its arguments so far: {self.arguments_json!r}")
        values: dict[str, Any] = json.loads(self.arguments_json)
        return values


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What a chunk adds to a tool call. The first delta of a call has its id and name, later ones parts of arguments.

    incomplete: the call ends here, within its arguments or before them (see ``ToolCall.complete``).
    """

    index: int  #: of the call in the output
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    incomplete: bool = False


@dataclass(slots=True)  # not frozen: that takes five times as long, for every token
class CompletionChunk:
    """What one step adds to an output: usually one token. Text may be held back and come with a later chunk."""

    text: str
    token_ids: tuple[int, ...]
    index: int  #: of the output among the n of the request
    seed: int  #: of this output: the same seed reproduces it
    finish_reason: FinishReason | None = None  #: set on the last chunk of an output
    stop_reason: str | int | None = None  #: see ``Finish.detail``
    logprobs: tuple[StepLogprobs, ...] | None = None  #: one per token, if requested
    prompt_logprobs: PromptLogprobs | None = None  #: on the first chunk of the first output, if requested
    validation: Validation | None = None  #: on the last chunk, if a schema could not be enforced completely
    reasoning: str = ""  #: of a chat, what it adds to the reasoning, which ``text`` does not have
    tool_calls: tuple[ToolCallDelta, ...] = ()  #: of a chat with tools
    reasoning_tokens: int = 0  #: of its tokens, those of the reasoning section


@dataclass(frozen=True)
class CompletionOutput:
    """One finished output of a request. ``token_ids`` includes the stop token; ``text`` only if requested.

    In a chat, ``text`` has neither the reasoning nor the tool calls.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int
    logprobs: tuple[StepLogprobs, ...] | None = None  #: one per token, if requested
    validation: Validation | None = None  #: if a schema could not be enforced completely
    reasoning: str | None = None  #: the text of the reasoning section, if there is one
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning_tokens: int = 0  #: the number of tokens in the reasoning section

    @classmethod
    def from_chunks(cls, chunks: Sequence[CompletionChunk]) -> CompletionOutput:
        """Join the chunks of one output."""
        last = chunks[-1]
        token_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
        text = "".join(chunk.text for chunk in chunks)
        steps = tuple(step for chunk in chunks for step in chunk.logprobs or ())
        logprobs = steps if len(steps) == len(token_ids) > 0 else None
        return cls(
            last.index,
            text,
            token_ids,
            last.finish_reason or "abort",
            last.stop_reason,
            last.seed,
            logprobs,
            last.validation,
            "".join(chunk.reasoning for chunk in chunks) or None,
            _tool_calls([delta for chunk in chunks for delta in chunk.tool_calls]),
            sum(chunk.reasoning_tokens for chunk in chunks),
        )

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the logprobs of the sampled tokens, if requested."""
        return None if self.logprobs is None else math.fsum(step.chosen.logprob for step in self.logprobs)


def _tool_calls(deltas: Sequence[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Join the deltas of an output."""
    parts: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        parts.setdefault(delta.index, []).append(delta)
    return tuple(
        ToolCall(
            own[0].id or "",
            own[0].name or "",
            "".join(part.arguments for part in own),
            not any(part.incomplete for part in own),
        )
        for own in parts.values()
    )


@dataclass(frozen=True)
class Usage:
    """Token counts over all outputs of a request. ``cached_tokens`` depends on other requests: equality ignores it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = field(default=0, compare=False)  #: prompt tokens that the prefix cache served
    reasoning_tokens: int = 0  #: of the completion tokens, those of reasoning sections

    @property
    def total_tokens(self) -> int:
        """The tokens of the prompt and of all outputs."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Completion:
    """The outputs for one prompt."""

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None  #: if requested
    prompt: str | None = None  #: its text; None for a prompt of token ids

    @classmethod
    def from_chunks(
        cls,
        prompt_token_ids: Iterable[int],
        chunks: Iterable[CompletionChunk],
        prompt: str | None = None,
        cached_tokens: int = 0,
    ) -> Completion:
        """Join the chunks of a request.

        prompt_token_ids, prompt: the prompt as tokens and as text. chunks: those of each output in order, the outputs
        interleaved in any way. cached_tokens: the number of prompt tokens that came from the prefix cache.
        """
        by_index: dict[int, list[CompletionChunk]] = {}
        for chunk in chunks:
            by_index.setdefault(chunk.index, []).append(chunk)
        outputs = tuple(CompletionOutput.from_chunks(by_index[index]) for index in sorted(by_index))
        of_prompt = (chunk.prompt_logprobs for own in by_index.values() for chunk in own if chunk.prompt_logprobs)
        ids = tuple(prompt_token_ids)
        usage = Usage(
            len(ids),
            sum(len(output.token_ids) for output in outputs),
            cached_tokens,
            sum(output.reasoning_tokens for output in outputs),
        )
        return cls(ids, outputs, usage, next(of_prompt, None), prompt)

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first output."""
        return self.outputs[0].token_ids

    @property
    def reasoning(self) -> str | None:
        """The reasoning of the first output."""
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the first output."""
        return self.outputs[0].tool_calls


class EngineOutput(NamedTuple):
    """What an engine step adds to one output of a request."""

    request_id: str
    chunk: CompletionChunk
    usage: Usage | None = None  #: on the last one of a request

    @property
    def finished(self) -> bool:
        """Whether the request has finished: all its outputs have."""
        return self.usage is not None


class SpeculativeStats(NamedTuple):
    """Counters of speculative decoding since the engine started."""

    num_verification_steps: int = 0  #: per sequence: one for each forward pass that gave it new tokens, drafted or not
    draft_tokens: int = 0  #: draft tokens verified by the model
    accepted_tokens: int = 0  #: draft tokens accepted
    verified_tokens_per_position: tuple[int, ...] = ()
    """How often the draft token at each position (in a tree: depth) was verified, after all before it were accepted."""
    accepted_tokens_per_position: tuple[int, ...] = ()  #: how often it was accepted
    draft_seconds: float = 0.0  #: time spent in the draft method

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / draft tokens; 0 if there were none."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Mean number of sampled tokens per verification step; 1 without drafts. Jump-forward tokens do not count."""
        return 1 + self.accepted_tokens / self.num_verification_steps if self.num_verification_steps else 1.0


class EngineStats(NamedTuple):
    """State of an engine now, and (from ``num_steps`` on) counters since it started."""

    num_running_seqs: int
    num_waiting_seqs: int  #: sequences that have not started, or were preempted
    num_kv_blocks: int  #: blocks of the paged KV cache
    num_used_kv_blocks: int
    num_steps: int  #: engine steps, with one forward pass each
    computed_tokens: int  #: tokens processed by the model: prompt, generated and draft tokens
    prefix_cache_queries: int  #: prompt tokens of all sequences that have finished
    prefix_cache_hits: int  #: those of them that came from the prefix cache
    sampled_tokens: int
    num_preemptions: int
    forward_seconds: float
    sampling_seconds: float
    grammar_mask_seconds: float  #: time to compute the token masks of structured output
    jump_forward_tokens: int  #: generated tokens that were not sampled because the grammar allowed only one
    speculative: SpeculativeStats = SpeculativeStats()
    batch_invariant: bool = False  #: whether a seed gives the same text whatever else runs, see ``LLM``

    @property
    def generation_tokens(self) -> int:
        """All generated tokens."""
        return self.sampled_tokens + self.jump_forward_tokens

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the prompt tokens that came from the prefix cache, 0 to 1."""
        return self.prefix_cache_hits / self.prefix_cache_queries if self.prefix_cache_queries else 0.0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV cache blocks in use, 0 to 1."""
        return self.num_used_kv_blocks / self.num_kv_blocks if self.num_kv_blocks else 0.0


_RARE: Mapping[str, Any] = {"validation": None, "reasoning": None, "tool_calls": [], "reasoning_tokens": 0}
"""Fields that are left out where they have these values."""


def to_json(value: Any) -> Any:
    """Convert a completion, or a part of it, to JSON values; numbers that are not finite become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "_asdict"):
        return {name: to_json(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        names += ["cumulative_logprob"] if isinstance(value, CompletionOutput) else []
        found = {name: to_json(getattr(value, name)) for name in names}
        for name, default in _RARE.items():
            if name in found and found[name] == default:
                del found[name]
        return found
    return value


def validation_text(validation: Validation) -> str:
    """Describe in one line whether an output conforms to a schema with unsupported keywords."""
    result = f"the output is invalid: {'; '.join(validation.errors)}" if validation.errors else "the output is valid"
    if validation.unchecked:
        result += f", except that nothing checks {', '.join(validation.unchecked)}"
    return " ".join(f"ignored schema keywords: {', '.join(validation.ignored)}; {result}".split())
