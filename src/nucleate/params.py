"""SamplingParams: everything one request may say, and the pipeline it means.

Its fields are not listed here: they are the parameters of every stage, of ``presets``, and of ``core.request``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nucleate.core.parameter import Parameter, ParameterError, read_json, unknown
from nucleate.core.request import REQUEST_PARAMETERS
from nucleate.core.stage import Pipeline, Speller
from nucleate.core.structured import Structured
from nucleate.presets import ORDER_PARAMETERS, build, check_order, with_mask
from nucleate.stages import STAGES
from nucleate.stages.logprobs import Logprobs

if TYPE_CHECKING:
    from nucleate.fields import Fields  # derived too, see docs/build.py
else:
    Fields = object


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


class SamplingParams(Fields):
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

    def pipeline(self, end_ids: tuple[int, ...] = (), speller: Speller | None = None) -> Pipeline:
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
    if isinstance(value, Structured):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


SamplingParams.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=f.default) for n, f in FIELDS.items()]
)
