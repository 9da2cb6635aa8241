"""The kinds of watermarks: reads one from text, and adds it to the pipeline of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from nucleate.parameters.parameter import ParameterError, invalid_value, unknown
from nucleate.sampling.pipeline_format import parse_calls
from nucleate.sampling.stage import Combine, Pipeline, Stage, Tap
from nucleate.sampling.stages.selection import Categorical, Gumbel
from nucleate.sampling.stages.watermarks.gumbel_watermark import GumbelWatermark
from nucleate.sampling.stages.watermarks.kgw import Kgw
from nucleate.sampling.stages.watermarks.synthid import SynthId
from nucleate.sampling.watermark_key import WatermarkKey

FIELD = "watermark"

KINDS: Mapping[str, type[Stage]] = MappingProxyType({"kgw": Kgw, "gumbel": GumbelWatermark, "synthid": SynthId})
"""The stage of each kind."""


def read_watermark(text: str, key: WatermarkKey) -> Stage:
    """The stage of a watermark given as text: ``kgw``, or with parameters ``kgw(delta=3, context=4)``.

    key: its secret key. Raises ParameterError.
    """
    calls = [*parse_calls(text, FIELD)] if isinstance(text, str) else []
    if len(calls) != 1:
        raise invalid_value(FIELD, f"one of {', '.join(KINDS)}", text)
    [(name, positional, named)] = calls
    if name not in KINDS:
        raise ParameterError(FIELD, str(unknown(name, KINDS, FIELD)))
    allowed = [attribute for attribute in KINDS[name].parameters if attribute not in ("seed", "key")]
    if positional:
        raise ParameterError(FIELD, f"watermark: name the parameters of {name}: {', '.join(allowed)}")
    for parameter in named:
        if parameter not in allowed:
            raise ParameterError(FIELD, str(unknown(parameter, allowed, f"parameter of {name}")))
    try:
        made: Stage = KINDS[name](**{**named, "key": key})
    except ParameterError as error:
        raise ParameterError(FIELD, f"watermark: {name}: {error}") from None
    return made


def check_watermark(watermark: Stage | None) -> Stage | None:
    """Return a watermark. Raises ParameterError for another value than one of its stages or None."""
    if watermark is not None and not isinstance(watermark, tuple(KINDS.values())):
        kinds = ", ".join(kind.__name__ for kind in KINDS.values())
        raise invalid_value(FIELD, f"a stage of {kinds}", watermark)
    return watermark


def with_watermark(stages: Pipeline, watermark: Stage | None) -> Pipeline:
    """The stages of a pipeline with a watermark, whatever the request.

    KGW comes first (after guidance), SynthID before the draw, and the Gumbel watermark instead of a Gumbel or
    categorical draw. A greedy draw has no noise that could carry it. Watermarks of the request are removed.
    """
    if watermark is None:
        return stages
    stages = tuple(_ordinary(stage) for stage in stages if not isinstance(stage, Kgw | SynthId))
    match watermark:
        case GumbelWatermark():
            if isinstance(stages[-1], Gumbel | Categorical):
                return (*stages[:-1], dataclasses.replace(watermark, seed=stages[-1].seed))
            return stages
        case Kgw():
            place = next(i for i, stage in enumerate(stages) if not isinstance(stage, Combine | Tap))
        case _:
            place = len(stages) - 1
            while isinstance(stages[place - 1], Tap) and place > 1:  # logprobs of the processed distribution
                place -= 1
    return (*stages[:place], watermark, *stages[place:])


def _ordinary(stage: Stage) -> Stage:
    return Gumbel(stage.seed) if isinstance(stage, GumbelWatermark) else stage
