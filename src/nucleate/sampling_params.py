"""SamplingParams: all parameters of one request, and the pipeline they stand for.

Most fields are not listed here: they are the parameters of every stage, and of ``presets``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from nucleate.jit.kernel_cache import warn_once
from nucleate.parameters.converters import TokenTable
from nucleate.parameters.parameter import Parameter, ParameterError, declared, param, read_json, unknown
from nucleate.sampling.pipeline import RequestParams
from nucleate.sampling.presets import ORDER_PARAMETERS, PIPELINE_PARAMETERS, build, with_mask
from nucleate.sampling.stage import Floor, Pipeline, Prefix, TextEncoder
from nucleate.sampling.stages import STAGES
from nucleate.sampling.stages.selection.logprobs import Logprobs
from nucleate.sampling.stages.truncation.mirostat import Mirostat
from nucleate.structured_output.spec import StructuredOutputs

if TYPE_CHECKING:
    from nucleate._sampling_params_fields import Fields  # derived too, see docs/build.py
else:
    Fields = object


class StopParameters:
    """When an output ends, and how much of its end is kept."""

    max_tokens: int | None = param(
        "Maximum number of output tokens; none: all that fit the context", default=None, low=1
    )
    stop: tuple[str, ...] = param("Strings that end the output; the text is cut before them", default=())
    stop_token_ids: tuple[int, ...] = param("Token ids that end the output, in addition to EOS", default=(), low=0)
    stop_regex: tuple[str, ...] = param(
        "Regular expressions that end the output; the text is cut before the match", default=()
    )
    stop_json: bool = param("End the output after the first complete JSON object or array", default=False)
    include_stop_str_in_output: bool = param("Keep the stop string or stop token in the text", default=False)
    ignore_eos: bool = param("Continue after the end-of-sequence token", default=False)


class OutputParameters:
    """How many outputs a request has, their format, and how tokens become text."""

    structured_outputs: StructuredOutputs | None = param(
        "Constrain the output: a JSON schema, any JSON object, a regular expression, a list of choices or a grammar",
        default=None,
    )
    n: int = param("Number of outputs per prompt; output i uses seed + i", default=1, low=1, high=128)
    prompt_logprobs: int | None = param(
        "Number of most likely tokens to report at each position of the prompt, in addition to the prompt token",
        default=None,
        low=0,
    )
    logprobs_mode: Literal["raw", "processed"] = param(
        "Whether logprobs are of the model's logits (raw) or of the distribution after all stages (processed)",
        default="raw",
    )
    skip_special_tokens: bool = param("Leave special tokens out of the text", default=True)


REQUEST_PARAMETERS: Mapping[str, Parameter] = {**declared(StopParameters), **declared(OutputParameters)}
"""The parameters above by name."""

SYNONYMS: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "best_of": "n",
    "temp": "temperature",
    "do_sample": "temperature",
    "greedy": "temperature",
    "repeat_penalty": "repetition_penalty",
    "penalty_repeat": "repetition_penalty",
    "no_repeat_ngram": "no_repeat_ngram_size",
    "stop_strings": "stop",
    "stop_words": "stop",
    "eos_token_id": "stop_token_ids",
    "eos_token_ids": "stop_token_ids",
    "bad_words_ids": "bad_words",
    "top_logprobs": "logprobs",
    "random_seed": "seed",
    **dict.fromkeys(
        ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), "structured_outputs"
    ),
}
"""Names that other projects use for a field, for error messages."""


def _fields() -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    for kind in STAGES.values():
        for parameter in kind.parameters.values():
            if not parameter.public:
                continue
            if found.setdefault(parameter.name, parameter) != parameter:  # the draws share one seed
                raise TypeError(f"two stages mean different things by {parameter.name}; one is {kind.name}")
    return {**found, **ORDER_PARAMETERS, **REQUEST_PARAMETERS}


FIELDS: Mapping[str, Parameter] = _fields()
"""Every field of SamplingParams by name: those of the stages in their order, the order itself, the request's."""


ENGINE_ONLY: Mapping[str, str] = {
    "max_tokens": "stop after that many tokens yourself",
    "stop": "look for the strings in the text yourself",
    "stop_regex": "look for the patterns in the text yourself",
    "stop_json": "look for the end of the JSON yourself",
    "stop_token_ids": "compare the sampled tokens with them yourself",
    "include_stop_str_in_output": "the caller makes the text",
    "skip_special_tokens": "the caller makes the text",
    "structured_outputs": "pass the allowed tokens of each step as mask",
    "n": "add one row per output, with index from 0 to n - 1",
    "prompt_logprobs": "there are no logits of the prompt",
}
"""Fields that a ``Sampler`` alone cannot apply, and what its caller can do instead."""


TRUNCATIONS = {
    parameter.name
    for kind in STAGES.values()
    if issubclass(kind, Floor | Prefix) and kind is not Mirostat
    for parameter in kind.parameters.values()
    if parameter.public
}
"""The fields of all truncation stages except mirostat."""

MAX_CACHED_SIZE = 1024
"""Token ids and characters in parameters that caches keep: a client must not be able to fill the memory."""

GREEDY: Mapping[str, Any] = {"temperature": 0, "top_k": 1, "draw": "greedy"}
"""Values that make a request greedy."""


class SamplingParams(RequestParams, Fields):
    """Sampling parameters of one request: immutable, hashable, validated.

    All arguments are keyword arguments. The defaults sample from the model's distribution until EOS. Raises
    ParameterError, a ValueError that names the field, its value and what is allowed.
    """

    __slots__ = ("_hash", "_values")
    _values: dict[str, Any]
    _hash: int

    if not TYPE_CHECKING:  # they see the fields themselves

        def __init__(self, /, **values: Any) -> None:
            for name in values:
                if name not in FIELDS:
                    raise unknown(name, FIELDS, synonyms=SYNONYMS)
            checked = {name: f.check(values[name]) if name in values else f.default for name, f in FIELDS.items()}
            object.__setattr__(self, "_values", checked)
            object.__setattr__(self, "_hash", hash(tuple(checked.values())))
            if checked["max_tokens"] is not None and checked["min_tokens"] > checked["max_tokens"]:
                least, most = checked["min_tokens"], checked["max_tokens"]
                raise ParameterError("min_tokens", f"min_tokens must be at most max_tokens ({most}), got {least}")
            self._stages()  # raises for values that contradict each other

        def __getattr__(self, name: str) -> Any:
            try:
                return self._values[name]
            except KeyError:
                raise AttributeError(str(unknown(name, FIELDS, "field"))) from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"SamplingParams is frozen; use params.replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("SamplingParams is frozen")

    def __reduce__(self) -> tuple[Any, ...]:
        return SamplingParams.from_json, (self.to_json(),)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *FIELDS]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingParams) and self._values == other._values

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self._set())})"

    @property
    def cacheable(self) -> bool:
        """See ``RequestParams``."""
        values = self._values
        sizes = [_size(value) for value in values.values() if value.__class__ in (tuple, TokenTable) and value]
        return values["structured_outputs"] is None and sum(sizes) <= MAX_CACHED_SIZE

    def _stages(self, end_ids: tuple[int, ...] = ()) -> Pipeline:
        chosen = tuple([self._values[name] for name in PIPELINE_PARAMETERS])
        return (build if self.cacheable else build.__wrapped__)(chosen, end_ids)

    def _set(self) -> Iterator[tuple[str, Any]]:
        """The fields that differ from their default."""
        return ((name, value) for name, value in self._values.items() if value != FIELDS[name].default)

    def replace(self, /, **changes: Any) -> SamplingParams:
        """The same parameters with some changed."""
        return SamplingParams(**{**self._values, **changes})

    def override(self, /, **values: Any) -> SamplingParams:
        """These parameters as defaults, with the values of a request.

        A default that contradicts the request is dropped, and the log says so once: truncation and temperature 0 give
        way to a requested mirostat, which controls truncation alone as in llama.cpp; mirostat gives way to a greedy
        request.
        """
        if values.get("mirostat_tau"):
            winner = "mirostat_tau"
            losers = {*TRUNCATIONS, *(name for name, value in GREEDY.items() if self._values[name] == value)}
        else:
            winner = "greedy sampling"
            losers = {"mirostat_tau"} if any(values.get(name) == value for name, value in GREEDY.items()) else set()
        gone = {name for name, value in self._set() if name in losers and name not in values}
        if gone:
            warn_once(f"{winner} replaces the default {', '.join(f'{n}={self._values[n]!r}' for n in sorted(gone))}")
        return self.replace(**{name: FIELDS[name].default for name in gone}, **values)

    def check_for_sampler(self, end_ids: tuple[int, ...] = ()) -> None:
        """Raise ParameterError for a field that needs an engine, or for min_tokens without end-of-sequence ids."""
        for name, value in self._set():
            if name not in ENGINE_ONLY or (name == "stop_token_ids" and self.min_tokens):
                continue
            message = f"{name} is for LLM and Engine, but a Sampler only samples tokens: {ENGINE_ONLY[name]}"
            raise ParameterError(name, f"{message}; params.pipeline() leaves it out; got {value!r:.60}")
        if self.min_tokens and not (end_ids or self.ignore_eos or self.stop_token_ids):
            message = (
                "min_tokens needs the ids that end the output, which it bans: give eos_token_ids or stop_token_ids"
            )
            raise ParameterError("min_tokens", f"{message}; got min_tokens={self.min_tokens}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values of the fields that differ from their default."""
        return {name: _plain(value) for name, value in self._set()}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> SamplingParams:
        """The inverse of to_json. Raises ParameterError if the text is no JSON object of known fields."""
        values = read_json(text, "params")
        if not isinstance(values, dict):
            raise ParameterError("params", f"params must be a JSON object, got {text[:60]!r}")
        return cls(**values)

    def pipeline(self, end_ids: tuple[int, ...] = (), tokenizer: TextEncoder | None = None) -> Pipeline:
        """The stages that these parameters describe, in order; the last one is a Draw.

        end_ids: the model's EOS ids, which ``min_tokens`` bans along with ``stop_token_ids``. tokenizer: needed
        for parameters that contain text.
        """
        ends = tuple(sorted({*(() if self.ignore_eos else end_ids), *self.stop_token_ids}))
        stages = self._stages(ends)
        if tokenizer is not None:
            stages = tuple([stage.encode_text(tokenizer) for stage in stages])
        kind = STAGES[self.draw]
        pipeline = (*stages, kind(*(self._values[p.name] for p in kind.parameters.values())))
        tap = Logprobs(self.logprobs, self.logprob_token_ids)
        if tap.neutral:
            return pipeline
        if self.logprobs_mode == "raw":
            return (tap, *pipeline)
        *before, draw = with_mask(pipeline)  # now, because later it could not be told from a raw one
        return (*before, tap, draw)


def _size(values: tuple[Any, ...] | Mapping[int, float]) -> int:
    """The number of token ids and characters."""
    return len(values) + sum([len(value) for value in values if isinstance(value, str | tuple)])


def _plain(value: Any) -> Any:
    if isinstance(value, StructuredOutputs):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


_LINES = "\n".join(f"        {name}: {field.described}" for name, field in FIELDS.items())
SamplingParams.__doc__ = f"{str(SamplingParams.__doc__).rstrip()}\n\n    Fields:\n{_LINES}\n"
SamplingParams.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=f.default) for n, f in FIELDS.items()]
)
