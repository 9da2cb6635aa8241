"""Presets: the order of the stages in nucleate and in other engines, as data.

A preset lists the stages in order. It may give a stage other default values than its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from nucleate.parameters.parameter import Parameter, ParameterError, declared, param, unknown
from nucleate.sampling.companion import field_of
from nucleate.sampling.stage import Ceiling, Combine, Draw, Floor, Pipeline, Prefix, Shift, Stage, Tap
from nucleate.sampling.stages import STAGES, Mask, Mirostat, MirostatV1

Preset = tuple[str | tuple[str, Mapping[str, Any]], ...]
"""Names of stages, each alone or with {attribute: default value}."""

REQUESTABLE: list[str] = []
"""The stages that a request can enable through its parameters and order. ``update_presets`` fills it."""

COMBINES: list[str] = []
"""The Combine stages that a request can enable; it can enable one, which comes first. ``update_presets`` fills it."""

BANS = ("bad_words", "min_tokens", "suppress", "allowed")

_WINDOW = {"last_n": 64}

PRESETS: dict[str, Preset] = {
    "canonical": (),  # all stages by rank, see ``update_presets``
    "vllm": (*BANS, "logit_bias", "repetition", "frequency", "presence", "temperature", "min_p", "top_k", "top_p"),
    "hf": (
        *("logit_bias", "repetition", "no_repeat_ngram", *BANS, "temperature", "top_h"),
        *(("top_k", {"with_ties": True}), "top_p", "min_p", "typical", "epsilon", "eta"),
    ),
    "llama.cpp": (
        *(*BANS, "logit_bias", ("repetition", _WINDOW), ("frequency", _WINDOW), ("presence", _WINDOW), "dry"),
        *("top_n_sigma", "top_k", "typical", "top_p", "min_p", "xtc"),
        *("temperature", "dynamic_temperature", "mirostat", "mirostat_v1", "adaptive_p"),
    ),
    "akunu": (*BANS, "repetition", "temperature", ("top_k", {"k": 256}), "min_p", ("top_p", {"of_full_mass": True})),
}
"""vLLM 0.33, Transformers 5.23, llama.cpp 0c1e57098, akunu. Bans that an engine lacks are included in its preset."""


class OrderParameters:
    """The order of the stages, and the draw."""

    order: str | tuple[str, ...] = param(
        "Order of the stages: a preset or a list of stage names", default="canonical", choices=tuple(PRESETS)
    )
    draw: str = param(
        "How the token is selected: gumbel (Gumbel-max), categorical (inverse CDF) or greedy",
        default="gumbel",
        choices=("gumbel",),  # and all others, see ``update_presets``
    )


ORDER_PARAMETERS: dict[str, Parameter] = declared(OrderParameters)
"""The parameters above by name."""

PIPELINE_PARAMETERS: list[str] = []
"""The names of all parameters that ``build`` reads. ``update_presets`` fills it."""


def update_presets() -> None:
    """Derive the lists and choices above from ``STAGES``."""
    enabled = [name for name, kind in STAGES.items() if any(p.public for p in kind.parameters.values())]
    COMBINES[:] = [name for name in enabled if issubclass(STAGES[name], Combine)]
    REQUESTABLE[:] = [name for name in enabled if not issubclass(STAGES[name], Combine | Draw | Tap)]
    PRESETS["canonical"] = tuple(REQUESTABLE)
    draws = tuple(
        name
        for name, kind in STAGES.items()
        if issubclass(kind, Draw) and all(p.public for p in kind.parameters.values())
    )
    ORDER_PARAMETERS["draw"] = dataclasses.replace(ORDER_PARAMETERS["draw"], choices=draws)
    own = [p.name for name in (*COMBINES, *REQUESTABLE) for p in STAGES[name].parameters.values() if p.public]
    PIPELINE_PARAMETERS[:] = [*ORDER_PARAMETERS, *own]


update_presets()


def check_order(order: str | tuple[str, ...]) -> None:
    """Raise ParameterError for an unknown or repeated name, and for a stage whose position is fixed."""
    for position, name in enumerate(() if isinstance(order, str) else order):
        if name not in STAGES:
            raise ParameterError("order", str(unknown(name, REQUESTABLE, "stage in order")))
        if name not in REQUESTABLE:
            why = "the draw is last, logprobs_mode places logprobs, and a mask comes with each step"
            why = "it is always first" if name in COMBINES else why
            raise ParameterError("order", f"order does not name {name}: {why}")
        if name in order[:position]:
            raise ParameterError("order", f"order has {name} twice")


@lru_cache(maxsize=1024)
def build(chosen: tuple[Any, ...], ends: tuple[int, ...] = ()) -> Pipeline:
    """The stages that parameters stand for, in order, without logprobs and the draw.

    chosen: the values of PIPELINE_PARAMETERS, in that order. ends: the token ids that end the output. A greedy request
    gets no other truncation stages. Raises ParameterError for an invalid order, one that
    lacks a stage that the request enables, and contradicting values. Cached: servers receive the same values often.
    """
    values = dict(zip(PIPELINE_PARAMETERS, chosen, strict=True))
    order = values["order"]
    check_order(order)
    defaults = _defaults(order)
    for name in REQUESTABLE:
        if name not in defaults and not _stage(name, values, {}).neutral:
            raise ParameterError("order", f"order {order!r} does not include {name}, which this request enables")
    stages = [_stage(name, values, {"ends": ends, **given}) for name, given in defaults.items()]
    stages = [*_combines(values), *(stage for stage in stages if not stage.neutral)]
    mirostats = [stage for stage in stages if isinstance(stage, Mirostat | MirostatV1)]
    if len(mirostats) > 1:
        raise ParameterError("mirostat_v1_tau", "mirostat_v1_tau cannot be set with mirostat_tau: use one version")
    greedy = next((stage for stage in (*stages, STAGES[values["draw"]]()) if stage.greedy), None)
    if greedy is not None:
        for stage in mirostats:
            field = stage.parameters["tau"].name
            both = f"{field}={stage.tau:g} needs random sampling, but {greedy!r} is greedy"
            raise ParameterError(field, f"{both}: set only one of them")
        stages = [stage for stage in stages if stage.greedy or not isinstance(stage, Floor | Prefix | Ceiling)]
    return tuple(stages)


def _combines(values: Mapping[str, Any]) -> list[Stage]:
    """The Combine stage that the request enables, if any. Raises ParameterError for more than one."""
    found = [stage for name in COMBINES if not (stage := _stage(name, values, {})).neutral]
    if len(found) > 1:
        one, other = (field_of(stage) for stage in found[:2])  # type: ignore[arg-type]
        raise ParameterError(other, f"{other} cannot be set with {one}: only one of them can combine logits")
    return found


def stages_in(order: str | tuple[str, ...]) -> tuple[str, ...]:
    """The names of the stages in an order. Raises ParameterError as ``check_order``."""
    check_order(order)
    return tuple(_defaults(order))


def _defaults(order: str | tuple[str, ...]) -> dict[str, Mapping[str, Any]]:
    """The default values that an order gives to each of its stages."""
    entries: Preset = PRESETS[order] if isinstance(order, str) else order
    given = dict((entry, {}) if isinstance(entry, str) else entry for entry in entries)
    return {name: values for name, values in given.items() if name in REQUESTABLE}


def _stage(name: str, values: Mapping[str, Any], given: Mapping[str, Any]) -> Stage:
    """A stage with the values of the request, then those given, then its own defaults."""
    made = {}
    for attribute, parameter in STAGES[name].parameters.items():
        value = values[parameter.name] if parameter.public else parameter.default
        is_set = value != parameter.default and value not in parameter.off
        made[attribute] = value if is_set else given.get(attribute, value)
    return STAGES[name](**made)


def with_mask(stages: Pipeline) -> Pipeline:
    """The pipeline with a Mask stage, placed before the first stage that reads the whole row."""
    if any(isinstance(stage, Mask) for stage in stages):
        return stages
    first = next(i for i, stage in enumerate(stages) if not isinstance(stage, Combine | Shift | Tap))
    return (*stages[:first], Mask(), *stages[first:])


def without_mask(stages: Pipeline) -> Pipeline:
    """The inverse of ``with_mask``."""
    return tuple(stage for stage in stages if not isinstance(stage, Mask))
