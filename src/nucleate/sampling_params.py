"""SamplingParams: everything one request may say, and the pipeline it means.

Most fields are not listed here: they are the parameters of every stage, and of ``presets``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from nucleate.jit.kernel_cache import say
from nucleate.parameters.parameter import Parameter, ParameterError, declared, param, read_json, unknown
from nucleate.sampling.pipeline import RequestParams
from nucleate.sampling.presets import ORDER_PARAMETERS, build, check_order, with_mask
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
    """When a request ends, and what of its end is shown."""

    max_tokens: int | None = param("most tokens of output; none: as many as the context holds", default=None, low=1)
    stop: tuple[str, ...] = param("strings that end the output, cut before them", default=())
    stop_token_ids: tuple[int, ...] = param("token ids that end the output", default=(), low=0)
    stop_regex: tuple[str, ...] = param("regular expressions that end the output, cut before their match", default=())
    stop_json: bool = param("end the output after the first complete JSON object or array", default=False)
    include_stop_str_in_output: bool = param("keep what ended the output in the text", default=False)
    ignore_eos: bool = param("go on after the end-of-sequence token", default=False)


class OutputParameters:
    """How many answers, of what form, and how their text is made."""

    structured_outputs: StructuredOutputs | None = param(
        "constrain the output to a JSON schema, a JSON object, a regex, a list of choices or a grammar",
        default=None,
    )
    n: int = param("how many answers; answer i uses seed + i", default=1, low=1, high=128)
    prompt_logprobs: int | None = param(
        "how many of the likeliest tokens to report at each place of the prompt, beside the one there",
        default=None,
        low=0,
    )
    logprobs_mode: Literal["raw", "processed"] = param(
        "whether logprobs are those of the logits as given, or those after the last stage", default="raw"
    )
    skip_special_tokens: bool = param("leave special tokens out of the text", default=True)


REQUEST_PARAMETERS: Mapping[str, Parameter] = {**declared(StopParameters), **declared(OutputParameters)}
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
"""Fields that only an engine can honour, and what a caller of ``Sampler`` can do instead."""


TRUNCATIONS = {
    parameter.name
    for kind in STAGES.values()
    if issubclass(kind, Floor | Prefix) and kind is not Mirostat
    for parameter in kind.parameters.values()
    if parameter.public
}
"""The fields of all truncations but mirostat."""

GREEDY: Mapping[str, Any] = {"temperature": 0, "top_k": 1, "draw": "greedy"}
"""Values that make a request greedy."""


class SamplingParams(RequestParams, Fields):
    """How to turn the logits of one request into text: frozen, hashable, validated.

    Keyword arguments only; ``FIELDS`` (or ``nucleate stages``) lists them with their ranges and defaults. The defaults
    change nothing: they sample from the model's own distribution until EOS. Raises ParameterError, a ValueError that
    names the field, its value and what is allowed.
    """

    __slots__ = ("_values",)
    _values: dict[str, Any]

    if not TYPE_CHECKING:  # they see the fields themselves

        def __init__(self, /, **values: Any) -> None:
            for name in values:
                if name not in FIELDS:
                    raise unknown(name, FIELDS)
            checked = {name: f.check(values[name]) if name in values else f.default for name, f in FIELDS.items()}
            object.__setattr__(self, "_values", checked)
            if checked["max_tokens"] is not None and checked["min_tokens"] > checked["max_tokens"]:
                least, most = checked["min_tokens"], checked["max_tokens"]
                raise ParameterError("min_tokens", f"min_tokens must be at most max_tokens ({most}), got {least}")
            check_order(checked["order"])
            build(checked)  # it refuses values that contradict each other

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
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self._set())})"

    def _set(self) -> Iterator[tuple[str, Any]]:
        """The fields that differ from their default."""
        return ((name, value) for name, value in self._values.items() if value != FIELDS[name].default)

    def replace(self, /, **changes: Any) -> SamplingParams:
        """The same parameters with some changed."""
        return SamplingParams(**{**self._values, **changes})

    def override(self, /, **values: Any) -> SamplingParams:
        """These parameters as the defaults of a request that says some itself.

        A default never contradicts what the request says, it gives way: other truncations and temperature 0 to the
        request's mirostat, which controls the truncation alone, as in llama.cpp; mirostat to a greedy request. The
        log says so, once.
        """
        if values.get("mirostat_tau"):
            winner = "mirostat_tau"
            losers = {*TRUNCATIONS, *(name for name, value in GREEDY.items() if self._values[name] == value)}
        else:
            winner = "greedy sampling"
            losers = {"mirostat_tau"} if any(values.get(name) == value for name, value in GREEDY.items()) else set()
        gone = {name for name, value in self._set() if name in losers and name not in values}
        if gone:
            say(f"{winner} replaces the default {', '.join(f'{n}={self._values[n]!r}' for n in sorted(gone))}")
        return self.replace(**{name: FIELDS[name].default for name in gone}, **values)

    def check_for_sampler(self, end_ids: tuple[int, ...] = ()) -> None:
        """Raise ParameterError for a field that only an engine can honour, or for min_tokens without ids that end."""
        for name, value in self._set():
            if name not in ENGINE_ONLY or (name == "stop_token_ids" and self.min_tokens):
                continue
            told = f"{name} is for LLM and Engine, but a Sampler only samples tokens: {ENGINE_ONLY[name]}"
            raise ParameterError(name, f"{told}; params.pipeline() leaves it out; got {value!r:.60}")
        if self.min_tokens and not (end_ids or self.ignore_eos or self.stop_token_ids):
            told = "min_tokens needs the ids that end the output, which it bans: give eos_token_ids or stop_token_ids"
            raise ParameterError("min_tokens", f"{told}; got min_tokens={self.min_tokens}")

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

    def pipeline(self, end_ids: tuple[int, ...] = (), speller: TextEncoder | None = None) -> Pipeline:
        """The stages these parameters mean, in their order, ending with a draw.

        end_ids: the model's EOS ids, which ``min_tokens`` bans along with ``stop_token_ids``. speller: the tokenizer,
        for parameters that hold text.
        """
        ends = tuple(sorted({*(() if self.ignore_eos else end_ids), *self.stop_token_ids}))
        stages = build(self._values, ends)
        if speller is not None:
            stages = [stage.spell(speller) for stage in stages]
        kind = STAGES[self.draw]
        pipeline = (*stages, kind(*(self._values[p.name] for p in kind.parameters.values())))
        tap = Logprobs(self.logprobs, self.logprob_token_ids)
        if tap.neutral:
            return pipeline
        if self.logprobs_mode == "raw":
            return (tap, *pipeline)
        *before, draw = with_mask(pipeline)  # now, because later it could not be told from a raw one
        return (*before, tap, draw)


def _plain(value: Any) -> Any:
    if isinstance(value, StructuredOutputs):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


SamplingParams.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=f.default) for n, f in FIELDS.items()]
)
