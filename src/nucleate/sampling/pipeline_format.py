"""Pipelines as JSON (``[{"stage": "temperature", "t": 0.8}, ...]``) and as text (``temperature(0.8) | top_p(0.9)``)."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, TypeGuard

from nucleate.parameters import converters
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import Parameter, ParameterError, unknown
from nucleate.sampling.stage import Combine, Draw, Pipeline, Stage, Tap, shape_of
from nucleate.sampling.stages import STAGES
from nucleate.sampling.stages.constraints.mask import Mask
from nucleate.sampling.watermark_key import WatermarkKey

FIELD = "pipeline"
MAX_STAGES = 64
"""Maximum number of stages in a pipeline."""
_NOUN = "a tuple of stages, a list of objects with a stage and its parameters, or text such as 'temperature(0.8) | top_p(0.9)'"  # noqa: E501


def is_pipeline(value: object) -> TypeGuard[Pipeline]:
    """Whether a value is a tuple of stages."""
    return isinstance(value, tuple) and bool(value) and all(isinstance(stage, Stage) for stage in value)


def pipeline_to_json(stages: Pipeline) -> list[dict[str, Any]]:
    """Return plain JSON values: the name of each stage, and its parameters that differ from their defaults.

    Watermark keys are left out.
    """
    return [{"stage": stage.name, **_changed(stage)} for stage in stages]


def _changed(stage: Stage) -> dict[str, Any]:
    values = {attribute: getattr(stage, attribute) for attribute in stage.parameters}
    return {
        attribute: {str(token): number for token, number in value.items()} if isinstance(value, Mapping) else value
        for attribute, value in values.items()
        if value != stage.parameters[attribute].default and not isinstance(value, WatermarkKey)
    }


def read_pipeline(value: Any) -> Pipeline:
    """Return the pipeline of a tuple of stages, of JSON or of text. Raises ParameterError, or TypeError for others."""
    if isinstance(value, str):
        stages = tuple(_made(index, *call) for index, call in enumerate(parse_calls(value)))
    elif isinstance(value, Sequence):
        stages = tuple(_stage(index, entry) for index, entry in enumerate(value))
    else:
        raise TypeError
    _check(stages)
    return stages


def _check(stages: Pipeline) -> None:
    if not stages:
        raise _error("has no stage")
    if len(stages) > MAX_STAGES:
        raise _error(f"has {len(stages)} stages; at most {MAX_STAGES} are allowed")
    for index, stage in enumerate(stages):
        try:
            shape_of(stage)
        except TypeError as error:
            raise _error(str(error), index) from None
        if isinstance(stage, Mask):
            raise _error("mask comes with each step, from structured output", index)
        if isinstance(stage, Draw) and index < len(stages) - 1:
            raise _error(f"{stage.name} is a draw, which must be the last stage", index)
        if isinstance(stage, Combine) and index:
            raise _error(f"{stage.name} combines the logits of two sequences, which must be the first stage", index)
    if sum(isinstance(stage, Tap) for stage in stages) > 1:
        raise _error("has more than one Tap")


def _stage(index: int, entry: Any) -> Stage:
    """Return a stage, also from its JSON."""
    if isinstance(entry, Stage):
        return entry
    if not isinstance(entry, Mapping) or not isinstance(entry.get("stage"), str):
        raise _error(f"must be a stage, or an object with the name of a stage, got {shown(entry)}", index)
    given = {name: value for name, value in entry.items() if name != "stage"}
    return _made(index, entry["stage"], [], given)


def _made(index: int, name: str, positional: Sequence[Any], named: Mapping[str, Any]) -> Stage:
    """Return a new stage. Parameters may have the name of the attribute or of the field of SamplingParams."""
    if name not in STAGES:
        raise _error(str(unknown(name, STAGES, "stage")), index)
    kind = STAGES[name]
    attributes = [attribute for attribute, parameter in kind.parameters.items()]
    if len(positional) > len(attributes):
        raise _error(f"{name} takes at most {len(attributes)} parameters, got {len(positional)}", index)
    fields = {parameter.name: attribute for attribute, parameter in kind.parameters.items()}
    values = dict(zip(attributes, positional, strict=False))
    for key, value in named.items():
        attribute = key if key in attributes else fields.get(key)
        if attribute is None:
            raise _error(str(unknown(str(key), attributes, f"parameter of {name}")), index)
        if attribute in values:
            raise _error(f"{name} has {attribute} twice", index)
        values[attribute] = value
    missing = [a for a, p in kind.parameters.items() if a not in values and _required(p)]
    if missing:
        raise _error(f"{name} needs {', '.join(missing)}", index)
    try:
        return kind(**values)
    except ParameterError as error:
        raise _error(f"{name}: {error}", index) from None


def _required(parameter: Parameter) -> bool:
    return parameter.default is MISSING


Call = tuple[str, list[Any], dict[str, Any]]
"""The name of a stage, its positional parameters, and its named ones."""


def parse_calls(text: str, field: str = FIELD) -> Iterator[Call]:
    """Yield the stages of ``name(value, name=value) | name | ...``; values are Python literals."""
    try:
        tree = ast.parse(" ".join(text.splitlines()).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        form = f"is not of the form 'temperature(0.8) | top_p(0.9)': {converters.one_line(error)}"
        raise _error(form, field=field) from None
    parts: list[ast.expr] = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitOr):
        parts.append(tree.right)
        tree = tree.left
    for index, part in enumerate([tree, *reversed(parts)]):
        call = part if isinstance(part, ast.Call) else ast.Call(part, [], [])
        if not isinstance(call.func, ast.Name):
            raise _error(f"must be the name of a stage, got {shown(ast.unparse(part))}", index, field)
        try:
            positional = [ast.literal_eval(value) for value in call.args]
            named = {str(pair.arg): ast.literal_eval(pair.value) for pair in call.keywords}
        except ValueError:
            raise _error(f"{call.func.id} has a parameter that is not a literal value", index, field) from None
        yield call.func.id, positional, named


def _error(message: str, index: int | None = None, field: str = FIELD) -> ParameterError:
    return ParameterError(field, f"{field}{'' if index is None else f'[{index}]'} {message}")


KIND = "tuple[Stage, ...]"
"""The kind of a parameter that is a pipeline."""
converters.CONVERT[KIND] = lambda value, _: read_pipeline(value)
converters.NOUNS[KIND] = "", _NOUN
