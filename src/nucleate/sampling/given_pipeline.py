"""A pipeline given in SamplingParams: what it replaces, its stages without the draw, and its seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nucleate.parameters.converters import TokenTable, shown
from nucleate.parameters.parameter import Parameter, ParameterError
from nucleate.sampling.presets import PIPELINE_PARAMETERS
from nucleate.sampling.stage import Combine, Draw, Pipeline, Stage, Tap
from nucleate.sampling.stages.constraints.min_tokens import MinTokens

MAX_CACHED_SIZE = 1024
"""Token ids and characters in parameters that caches keep: a client must not be able to fill the memory."""


def is_cacheable(values: Mapping[str, Any]) -> bool:
    """Whether caches may keep the fields of SamplingParams: they are small, and have no grammar."""
    large = list(values.values())
    for stage in values["pipeline"] or ():
        large += [getattr(stage, attribute) for attribute in stage.parameters]
    sizes = [_size(value) for value in large if value.__class__ in (tuple, TokenTable, str) and value]
    return values["structured_outputs"] is None and sum(sizes) <= MAX_CACHED_SIZE


def _size(values: tuple[Any, ...] | Mapping[int, float] | str) -> int:
    """The number of token ids and characters."""
    return len(values) + sum([len(value) for value in values if isinstance(value, str | tuple)])


def replaced_fields() -> list[str]:
    """The fields of SamplingParams that a pipeline replaces."""
    return [name for name in PIPELINE_PARAMETERS if name != "min_tokens"]


def check_given(values: dict[str, Any], fields: Mapping[str, Parameter]) -> None:
    """Check that no other field sets a stage, and move the seed of the draw to its field. Raises ParameterError."""
    for name in replaced_fields():
        if values[name] != fields[name].default:
            message = f"{name} cannot be set with pipeline, which replaces it: add the stage to the pipeline"
            raise ParameterError(name, f"{message}, got {shown(values[name])}")
    has_logprobs = values["logprobs"] is not None or values["logprob_token_ids"]
    if has_logprobs and any(isinstance(stage, Tap) for stage in values["pipeline"]):
        raise ParameterError("logprobs", "logprobs is set, and the pipeline has a logprobs stage: set only one")
    values["pipeline"], seed = _without_seed(values["pipeline"])
    if seed is not None and values["seed"] not in (None, seed):
        raise ParameterError("seed", f"seed is {values['seed']}, but the pipeline has {seed}: set only one")
    values["seed"] = values["seed"] if seed is None else seed


def given_stages(pipeline: Pipeline, min_tokens: int, end_ids: tuple[int, ...]) -> Pipeline:
    """Return the stages of a pipeline without its draw, after a ban of the ends until ``min_tokens``."""
    stages = pipeline[:-1] if isinstance(pipeline[-1], Draw) else pipeline
    start = int(bool(stages) and isinstance(stages[0], Combine))
    stages = (*stages[:start], MinTokens(min_tokens), *stages[start:])
    return tuple([_with_ends(stage, end_ids) for stage in stages if isinstance(stage, Tap) or not stage.neutral])


def _with_ends(stage: Stage, end_ids: tuple[int, ...]) -> Stage:
    """Return a stage with the ids that end the output, if it has an unset parameter for them."""
    return _changed(stage, ends=end_ids) if getattr(stage, "ends", None) == () else stage


def _without_seed(pipeline: Pipeline) -> tuple[Pipeline, int | None]:
    """Return a pipeline whose draw has no seed, and that seed."""
    *before, draw = pipeline
    seed: int | None = getattr(draw, "seed", None) if isinstance(draw, Draw) else None
    return (pipeline, None) if seed is None else ((*before, _changed(draw, seed=None)), seed)


def _changed(stage: Stage, **changes: object) -> Stage:
    changed: Stage = replace(stage, **changes)  # type: ignore[type-var]
    return changed
