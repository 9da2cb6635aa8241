"""SamplingParams: all parameters of one request, and the pipeline they stand for.

Most fields are not listed here: they are the parameters of every stage, and of ``presets``.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from nucleate.jit.native_library import warn_once
from nucleate.parameters.keywords import unknown_keyword, with_suggestions
from nucleate.parameters.parameter import Parameter, ParameterError, declared, param, read_json, unknown
from nucleate.sampling.pipeline import RequestParams
from nucleate.sampling.pipeline_format import (
    DECISIVE,
    MAX_CACHED_SIZE,
    check_given,
    conflicts,
    given_stages,
    is_cacheable,
    pipeline_to_json,
    replaced_fields,
)
from nucleate.sampling.presets import ORDER_PARAMETERS, PIPELINE_PARAMETERS, build, with_mask
from nucleate.sampling.stage import Combine, Draw, Pipeline, Stage, TextEncoder
from nucleate.sampling.stages import STAGES
from nucleate.sampling.stages.selection import Logprobs
from nucleate.structured_output.spec import StructuredOutputs

if TYPE_CHECKING:
    from nucleate._sampling_params_fields import Fields  # derived too, see docs/build.py
else:
    Fields = object

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
    "max_reasoning_tokens": "force the tokens that close the section yourself, with a mask",
}
"""Fields that a ``Sampler`` alone cannot apply, and what its caller can do instead."""


class _RequestParameters:
    """When outputs end, their number and format, and the stages if they are given as such."""

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
    structured_outputs: StructuredOutputs | None = param(
        "Constrain the output: a JSON schema, any JSON object, a regular expression, a list of choices, a grammar "
        "or a structural tag",
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
    max_reasoning_tokens: int | None = param(
        "Maximum tokens of the reasoning section of a chat, after which it is closed; none: no limit",
        default=None,
        low=0,
    )
    skip_special_tokens: bool = param("Leave special tokens out of the text", default=True)
    pipeline: Pipeline | None = param(
        "Stages to run, in this order, instead of those of the sampling parameters", default=None
    )


REQUEST_PARAMETERS: Mapping[str, Parameter] = declared(_RequestParameters)
"""The parameters above by name."""


def _fields() -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    for kind in STAGES.values():
        for parameter in kind.parameters.values():
            if not parameter.public:
                continue
            if found.setdefault(parameter.name, parameter) != parameter:  # the draws share one seed
                raise TypeError(f"two stages mean different things by {parameter.name}; one is {kind.name}")
    return {**found, **ORDER_PARAMETERS, **REQUEST_PARAMETERS}


FIELDS: dict[str, Parameter] = {}
"""Every field of SamplingParams by name: those of the stages in their order, the order itself, the request's."""


def update_fields() -> None:
    """Derive the fields from the stages."""
    found = _fields()
    FIELDS.clear()
    FIELDS.update(found)


update_fields()


@with_suggestions
class SamplingParams(RequestParams, Fields):
    """Sampling parameters of one request: immutable, hashable, validated.

    All arguments are keyword arguments. The defaults sample from the model's distribution until EOS. ``LLM`` replaces
    the default of a field that was not given by the value that the model recommends. Two are equal if all their values
    are. Raises ParameterError, a ValueError that names the field, its value and what is allowed.
    """

    __slots__ = ("_cacheable", "_hash", "_values", "fields_set")
    fields_set: frozenset[str]  #: the names of the fields that were given, also those given with their default
    _values: dict[str, Any]
    _hash: int
    _cacheable: bool

    if not TYPE_CHECKING:  # they see the fields themselves

        def __init__(self, /, **values: Any) -> None:
            for name in values:
                if name not in FIELDS:
                    raise unknown_keyword(name, FIELDS)
            checked = {name: f.check(values[name]) if name in values else f.default for name, f in FIELDS.items()}
            object.__setattr__(self, "_values", checked)
            if checked["pipeline"] is not None:
                check_given(checked, FIELDS)
                values |= {"seed": checked["seed"]} if checked["seed"] is not None else {}
            object.__setattr__(self, "fields_set", frozenset(values))
            changed = [value for name, value in checked.items() if value != FIELDS[name].default]
            object.__setattr__(self, "_hash", hash(tuple(changed)))  # the same if a stage is registered later
            if checked["max_tokens"] is not None and checked["min_tokens"] > checked["max_tokens"]:
                least, most = checked["min_tokens"], checked["max_tokens"]
                raise ParameterError("min_tokens", f"min_tokens must be at most max_tokens ({most}), got {least}")
            object.__setattr__(self, "_cacheable", is_cacheable(checked))
            self._stages()  # raises for values that contradict each other

        def __getattr__(self, name: str) -> Any:
            try:
                return self._values[name]
            except KeyError:
                if name in FIELDS:  # of a stage that was registered later
                    return FIELDS[name].default
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
        if not isinstance(other, SamplingParams):
            return False
        if self._values.keys() != other._values.keys():  # a stage was registered in between
            return all(getattr(self, name) == getattr(other, name) for name in FIELDS)
        return self._values == other._values

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self._given().items())})"

    @property
    def cacheable(self) -> bool:
        """See ``RequestParams``."""
        return self._cacheable

    def _stages(self, end_ids: tuple[int, ...] = ()) -> Pipeline:
        """The stages without logprobs and the draw."""
        if self.pipeline is not None:
            return given_stages(self.pipeline, self.min_tokens, end_ids)
        values = self._values
        chosen = tuple([values[name] if name in values else FIELDS[name].default for name in PIPELINE_PARAMETERS])
        return (build if self.cacheable else build.__wrapped__)(chosen, end_ids)

    def _given(self) -> dict[str, Any]:
        """The fields that were given."""
        return {name: value for name, value in self._values.items() if name in self.fields_set}

    def _set(self) -> dict[str, Any]:
        """The fields that differ from their default."""
        return {name: value for name, value in self._values.items() if value != FIELDS[name].default}

    def replace(self, /, **changes: Any) -> SamplingParams:
        """The same parameters with some changed."""
        return SamplingParams(**{**self._given(), **changes})

    def override(self, /, **values: Any) -> SamplingParams:
        """These parameters as defaults, with the values of a request.

        A default that contradicts the request is dropped, and the log says so once: for example, truncation and
        temperature 0 give way to a requested mirostat, which controls truncation alone as in llama.cpp.
        """
        if not self.cacheable or not all(map(_is_plain, values.values())):
            return self._override(values)
        given = tuple([(name, value.__class__, value) for name, value in values.items()])  # 1, 1.0 and True are equal
        return _cached_override(self, self.fields_set, given)

    def _override(self, values: Mapping[str, Any]) -> SamplingParams:
        names = DECISIVE if self.pipeline is None else (*DECISIVE, *replaced_fields())
        decisive = {name: FIELDS[name].check(values[name]) for name in names if name in values}
        found = conflicts(self._values, decisive) if decisive else {}
        dropped = {name: value for name, value in self._set().items() if name in found and name not in values}
        for winner in dict.fromkeys(found[name] for name in dropped if found[name] != "pipeline"):
            listed = [f"{name}={value!r}" for name, value in sorted(dropped.items()) if found[name] == winner]
            warn_once(f"{winner} replaces the default {', '.join(listed)}")
        return self.replace(**{name: FIELDS[name].default for name in dropped}, **values)

    def with_defaults(self, defaults: SamplingParams) -> SamplingParams:
        """These parameters, with the values of ``defaults`` for fields that were not given (see ``override``)."""
        return defaults.override(**self._given()) if defaults.fields_set else self

    def check_for_sampler(self, end_ids: tuple[int, ...] = ()) -> None:
        """Raise ParameterError for a field that needs an engine, or for min_tokens without end-of-sequence ids."""
        values = self._set()
        for name, value in values.items():
            if name not in ENGINE_ONLY or (name == "stop_token_ids" and values.get("min_tokens")):
                continue
            message = f"{name} is for LLM and Engine, but a Sampler only samples tokens: {ENGINE_ONLY[name]}"
            raise ParameterError(name, f"{message}; params.build_pipeline() leaves it out; got {value!r:.60}")
        if values.get("min_tokens") and not (end_ids or self.ignore_eos or self.stop_token_ids):
            message = (
                "min_tokens needs the ids that end the output, which it bans: give eos_token_ids or stop_token_ids"
            )
            raise ParameterError("min_tokens", f"{message}; got min_tokens={values['min_tokens']}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values of the fields that were given."""
        return {name: plain(value) for name, value in self._given().items()}

    def to_json(self) -> str:
        """Return the fields that were set as a JSON object; ``from_json`` reads it."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> SamplingParams:
        """The inverse of to_json. Raises ParameterError if the text is no JSON object of known fields."""
        values = read_json(text, "params")
        if not isinstance(values, dict):
            raise ParameterError("params", f"params must be a JSON object, got {text[:60]!r}")
        return cls(**values)

    def _draw(self) -> Stage:
        last, seed, kind = self.pipeline[-1] if self.pipeline else None, {"seed": self.seed}, STAGES[self.draw]
        if isinstance(last, Draw):
            return dataclasses.replace(last, **(seed if "seed" in last.parameters else {}))
        return kind(*(self._values[p.name] for p in kind.parameters.values()))

    def build_pipeline(self, end_ids: tuple[int, ...] = (), tokenizer: TextEncoder | None = None) -> Pipeline:
        """The stages that these parameters describe, in order; the last one is a Draw.

        end_ids: the model's EOS ids, which ``min_tokens`` bans along with ``stop_token_ids``. tokenizer: needed
        for parameters that contain text.
        """
        ends = tuple(sorted({*(() if self.ignore_eos else end_ids), *self.stop_token_ids}))
        stages = self._stages(ends)
        if tokenizer is not None:
            stages = tuple([stage.encode_text(tokenizer) for stage in stages])
        pipeline = (*stages, self._draw())
        tap = Logprobs(self.logprobs, self.logprob_token_ids)
        if tap.neutral:
            return pipeline
        if self.logprobs_mode == "raw":
            start = int(isinstance(pipeline[0], Combine))
            return (*pipeline[:start], tap, *pipeline[start:])
        *before, draw = with_mask(pipeline)  # now, because later it could not be told from a raw one
        return (*before, tap, draw)


def _is_plain(value: Any) -> bool:
    """Whether a value is small and hashable."""
    plain = value.__class__ in (int, float, bool, str, type(None))
    return plain and (value.__class__ is not str or len(value) <= MAX_CACHED_SIZE)


@lru_cache(maxsize=256)
def _cached_override(
    params: SamplingParams, _fields_set: frozenset[str], given: tuple[tuple[str, type, Any], ...]
) -> SamplingParams:
    """Callers often pass the same values."""
    return params._override({name: value for name, _, value in given})  # noqa: SLF001  # its cache


def plain(value: Any) -> Any:
    """A value of a field in JSON types."""
    if isinstance(value, StructuredOutputs):
        return value.to_dict()
    if value.__class__ is tuple and value and isinstance(value[0], Stage):
        return pipeline_to_json(value)
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


_LINES = "\n".join(f"        {name}: {field.described}" for name, field in FIELDS.items())
SamplingParams.__doc__ = f"{str(SamplingParams.__doc__).rstrip()}\n\n    Fields:\n{_LINES}\n"
SamplingParams.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=f.default) for n, f in FIELDS.items()]
)
