"""A pipeline given in SamplingParams: what it replaces, and its seed; and defaults that give way to a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from nucleate.parameters.converters import TokenTable, shown
from nucleate.parameters.parameter import Parameter, ParameterError
from nucleate.sampling.presets import PIPELINE_PARAMETERS, REQUESTABLE, stages_in
from nucleate.sampling.stage import Combine, Draw, Floor, Pipeline, Prefix, Stage, Tap
from nucleate.sampling.stages import STAGES
from nucleate.sampling.stages.constraints.min_tokens import MinTokens
from nucleate.sampling.stages.truncation.mirostat import Mirostat
from nucleate.sampling.stages.truncation.mirostat_v1 import MirostatV1

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


GREEDY: Mapping[str, Any] = MappingProxyType({"temperature": 0, "top_k": 1, "top_p": 0, "top_h": 0, "draw": "greedy"})
"""Values that make a request greedy: those of a truncation with ``min_keep`` only while that keeps one token."""

MIROSTATS = {"mirostat_tau": Mirostat, "mirostat_v1_tau": MirostatV1}
"""The stages that control truncation alone, by the field that enables them."""

COMBINING: Mapping[str, float] = MappingProxyType({"guidance_scale": 1.0, "contrastive_beta": 0.0})
"""The fields that enable a Combine stage, of which a request has at most one, with their neutral values."""

DECISIVE = (
    *COMBINING,
    *MIROSTATS,
    *(*GREEDY, "min_keep", "order", "min_tokens", "max_tokens", "pipeline"),
)
"""The fields of a request that defaults can contradict."""


def _truncations() -> set[str]:
    """The fields of all truncation stages except mirostat, and without the one that they share."""
    kinds = [kind for kind in STAGES.values() if issubclass(kind, Floor | Prefix) and kind not in MIROSTATS.values()]
    fields = {parameter.name for kind in kinds for parameter in kind.parameters.values() if parameter.public}
    return fields - {"min_keep"}


def _greedy_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries of GREEDY that make a request greedy. values: all fields of the request."""
    if values["min_keep"] <= 1:
        return GREEDY
    return {name: value for name, value in GREEDY.items() if name not in ("top_p", "top_h")}


def conflicts(defaults: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, str]:
    """The names of all defaults that contradict a request, each with what they contradict.

    defaults: all fields. request: the valid values of those fields of DECISIVE that the request sets.
    """
    if request.get("pipeline") is not None:
        return dict.fromkeys(replaced_fields(), "pipeline")
    found: dict[str, str] = {}
    if defaults["pipeline"] is not None and (replaced := request.keys() & {*replaced_fields()}):
        found["pipeline"] = ", ".join(sorted(replaced))
    if mirostat := next((name for name in MIROSTATS if request.get(name)), None):
        greedy = {name for name, value in GREEDY.items() if defaults[name] == value}
        found |= dict.fromkeys({*_truncations(), *greedy, *MIROSTATS} - {mirostat}, mirostat)
    elif any(request.get(name) == value for name, value in _greedy_values({**defaults, **request}).items()):
        found |= dict.fromkeys(MIROSTATS, "greedy sampling")
    for name, neutral in COMBINING.items():
        if request.get(name, neutral) != neutral:
            found |= dict.fromkeys(COMBINING.keys() - {name}, name)
    if "order" in request:
        missing = set(REQUESTABLE) - set(stages_in(request["order"]))
        fields = [parameter.name for name in missing for parameter in STAGES[name].parameters.values()]
        found |= dict.fromkeys(fields, f"order {request['order']!r}")
    least, most = request.get("min_tokens"), request.get("max_tokens")
    if most is not None and least is None and defaults["min_tokens"] > most:
        found["min_tokens"] = "max_tokens"
    if least is not None and "max_tokens" not in request and (defaults["max_tokens"] or least) < least:
        found["max_tokens"] = "min_tokens"
    return found
