"""Traces and draws of a recorded step, under the parameters of its run or under others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.engine.request import Request, ValidatedRequest
from nucleate.inspector.store import Run
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.companion import split_combine
from nucleate.sampling.distributions import is_stateful
from nucleate.sampling.stage import Pipeline, Stage
from nucleate.sampling.stages import STAGES
from nucleate.sampling_params import SamplingParams
from nucleate.structured_output import CompiledGrammar, Guide

_COMBINED = tuple(
    parameter.name
    for name in ("guidance", "contrastive")
    for parameter in STAGES[name].parameters.values()
    if parameter.public
)
"""Parameters of the stages that combine two rows of logits: only the result is recorded."""

Prepare = Callable[[Request], ValidatedRequest]
"""``Engine.prepare``."""


class StepInputs(NamedTuple):
    """What ``trace`` needs for a recorded step."""

    logits: NDArray[np.float32]  #: [V]
    stages: Pipeline  #: with their state, and with the seed in the draw
    output_ids: list[int]
    mask: NDArray[np.int32] | None  #: [W]


def step_inputs(run: Run, position: int, params: SamplingParams, prepare: Prepare) -> StepInputs:
    """The inputs of a trace of a step under some parameters. Raises InspectorError, ParameterError."""
    recorded = run.inputs(position)
    for name in _COMBINED:
        if getattr(params, name) != getattr(run.params, name):
            raise ParameterError(name, f"{name} cannot be changed for a step that was sampled before: generate again")
    request = prepare(Request(run.prompt_ids, params))
    output_ids = run.token_ids[:position]
    mask = recorded.mask
    if params.structured_outputs != run.params.structured_outputs:
        mask = None if request.grammar is None else _mask(request.grammar, output_ids, params)
    _, stages = split_combine(request.pipeline.given)
    state = {type(stage): stage for stage in recorded.stages}
    stages = tuple(_with_state(stage, state.get(type(stage), stage)) for stage in stages)
    return StepInputs(recorded.logits, _with_seed(stages, run.seed), output_ids, mask)


def _mask(grammar: CompiledGrammar, output_ids: list[int], params: SamplingParams) -> NDArray[np.int32]:
    guide = Guide(grammar, ignore_eos=params.ignore_eos)
    for token in output_ids:
        guide.accept_token(token)
        if guide.error is not None:
            raise ParameterError("structured_outputs", "structured_outputs does not allow the tokens before this step")
    mask: NDArray[np.int32] = guide.mask()[0]
    return mask


def _with_state(stage: Stage, recorded: Stage) -> Stage:
    """The recorded stage, if it is the same one with the state of its step; otherwise the stage as it starts."""
    public = [name for name, parameter in type(stage).parameters.items() if parameter.public]
    same = all(getattr(stage, name) == getattr(recorded, name) for name in public)
    return recorded if same and is_stateful(recorded) else stage


def _with_seed(stages: Pipeline, seed: int) -> Pipeline:
    draw = stages[-1]
    if getattr(draw, "seed", 0) is None:
        draw = dataclasses.replace(draw, seed=seed)  # type: ignore[type-var]
    return (*stages[:-1], draw)
