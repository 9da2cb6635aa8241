"""Orders of the stages: our own, those of other engines, a request's own. An order is data.

Refuses to know what a stage does: a preset says where each one stands, and what it is given where the request says
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.parameters.parameter import Parameter, ParameterError, declared, param, unknown
from nucleate.sampling.stage import Ceiling, Draw, Floor, Pipeline, Prefix, Shift, Stage, Tap
from nucleate.sampling.stages import STAGES
from nucleate.sampling.stages.constraints.mask import Mask
from nucleate.sampling.stages.truncation.mirostat import Mirostat

Preset = tuple[str | tuple[str, Mapping[str, Any]], ...]
"""Names of stages, each alone or with {attribute: value}: the value it takes where the request leaves its default."""

WANTED = tuple(
    name
    for name, kind in STAGES.items()
    if not issubclass(kind, Draw | Tap) and any(p.public for p in kind.parameters.values())
)
"""The stages that a request can ask for by its parameters; a mask comes with each step instead."""

BANS = ("bad_words", "min_tokens", "suppress", "allowed")

_WINDOW = {"last_n": 64}

PRESETS: Mapping[str, Preset] = {
    "canonical": WANTED,
    "vllm": (*BANS, "logit_bias", "repetition", "frequency", "presence", "temperature", "min_p", "top_k", "top_p"),
    "hf": (
        *("logit_bias", "repetition", "no_repeat_ngram", *BANS, "temperature", "top_h"),
        *(("top_k", {"with_ties": True}), "top_p", "min_p", "typical", "epsilon", "eta"),
    ),
    "llama.cpp": (
        *(*BANS, "logit_bias", ("repetition", _WINDOW), ("frequency", _WINDOW), ("presence", _WINDOW), "dry"),
        *("top_n_sigma", "top_k", "typical", "top_p", "min_p", "xtc"),
        *("temperature", "dynamic_temperature", "mirostat", "adaptive_p"),
    ),
    "akunu": (*BANS, "repetition", "temperature", ("top_k", {"k": 256}), "min_p", ("top_p", {"of_whole": True})),
}
"""vLLM 0.33, Transformers 5.23, llama.cpp 0c1e57098, akunu. Each has our bans, of which its own has none or some."""


class Choosing:
    """In which order the stages run, and which draw is the last of them."""

    order: str | tuple[str, ...] = param("order of the stages", default="canonical", choices=tuple(PRESETS))
    draw: str = param(
        "how the token is drawn", default="gumbel", choices=tuple(n for n, k in STAGES.items() if issubclass(k, Draw))
    )


ORDER_PARAMETERS: Mapping[str, Parameter] = declared(Choosing)
"""The parameters above by name."""


def check_order(order: str | tuple[str, ...]) -> None:
    """Raise ParameterError for a name that is no stage, that stands twice, or that has its place anyway."""
    for place, name in enumerate(() if isinstance(order, str) else order):
        if name not in STAGES:
            raise ParameterError("order", str(unknown(name, WANTED, "stage in order")))
        if name not in WANTED:
            why = "the draw is last, logprobs_mode places logprobs, and a mask comes with each step"
            raise ParameterError("order", f"order does not name {name}: {why}")
        if name in order[:place]:
            raise ParameterError("order", f"order has {name} twice")


def build(values: Mapping[str, Any], ends: tuple[int, ...] = ()) -> list[Stage]:
    """The stages that some parameters mean, in their order, without Tap and draw.

    values: by the public names of the parameters. ends: the ids that end the request. A greedy request has no
    truncation: none could change its token. Raises ParameterError for a stage that the order has no place for, and for
    values that contradict each other.
    """
    order = values["order"]
    places = {entry if isinstance(entry, str) else entry[0]: entry for entry in _entries(order)}
    for name in WANTED:
        if name not in places and not _stage(name, values, {}).neutral:
            raise ParameterError("order", f"order {order!r} has no place for {name}, which this request asks for")
    own = {"ends": ends}
    stages = [_stage(name, values, own if isinstance(entry, str) else entry[1]) for name, entry in places.items()]
    stages = [stage for stage in stages if not stage.neutral]
    greedy = next((stage for stage in (*stages, STAGES[values["draw"]]()) if stage.greedy), None)
    if greedy is not None:
        if any(isinstance(stage, Mirostat) for stage in stages):
            tau = values["mirostat_tau"]
            told = f"mirostat_tau={tau:g} needs tokens that are drawn, but {greedy!r} is greedy: set one of them only"
            raise ParameterError("mirostat_tau", told)
        stages = [stage for stage in stages if stage.greedy or not isinstance(stage, Floor | Prefix | Ceiling)]
    return stages


def _entries(order: str | tuple[str, ...]) -> Preset:
    entries: Preset = PRESETS[order] if isinstance(order, str) else order
    return tuple(entry for entry in entries if (entry if isinstance(entry, str) else entry[0]) in WANTED)


def _stage(name: str, values: Mapping[str, Any], given: Mapping[str, Any]) -> Stage:
    """A stage with what the request says; where it says nothing, what is given; else the stage's own default."""
    made = {}
    for attribute, parameter in STAGES[name].parameters.items():
        value = values[parameter.name] if parameter.public else parameter.default
        unsaid = value == parameter.default or value in parameter.off
        made[attribute] = given.get(attribute, value) if unsaid else value
    return STAGES[name](**made)


def with_mask(stages: Pipeline) -> Pipeline:
    """The same pipeline with a place for the bitmask of a step: before anything that looks at the row as a whole."""
    if any(isinstance(stage, Mask) for stage in stages):
        return stages
    first = next(i for i, stage in enumerate(stages) if not isinstance(stage, Shift | Tap))
    return (*stages[:first], Mask(), *stages[first:])


def without_mask(stages: Pipeline) -> Pipeline:
    """The inverse of ``with_mask``."""
    return tuple(stage for stage in stages if not isinstance(stage, Mask))
