"""A pipeline as JSON, and back: the stages by their names, with the values of their parameters. Runs nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nucleate.core.parameter import ParameterError, read_json, unknown
from nucleate.core.stage import Pipeline, Stage
from nucleate.stages import STAGES


def to_json(stages: Pipeline) -> str:
    """A pipeline as JSON: a list of [stage name, {parameter: value}]."""
    return json.dumps([[stage.name, _values(stage)] for stage in stages])


def _values(stage: Stage) -> dict[str, Any]:
    values = {attribute: getattr(stage, attribute) for attribute in stage.parameters}
    return {a: {str(k): x for k, x in v.items()} if isinstance(v, Mapping) else v for a, v in values.items()}


def from_json(text: str) -> Pipeline:
    """The inverse of to_json. Raises ParameterError for unknown stages or parameters, or values out of range."""
    stages = []
    pairs = read_json(text, "pipeline")
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        match pair:
            case [str(name), dict(values)]:
                stages.append(_stage(name, values))
            case _:
                raise ParameterError("pipeline", "a pipeline in JSON is a list of [stage name, {parameter: value}]")
    return tuple(stages)


def _stage(name: str, values: Mapping[str, Any]) -> Stage:
    if name not in STAGES:
        raise unknown(name, STAGES, "stage")
    for attribute in values:
        if attribute not in STAGES[name].parameters:
            raise unknown(attribute, STAGES[name].parameters, f"parameter of {name}")
    return STAGES[name](**values)
