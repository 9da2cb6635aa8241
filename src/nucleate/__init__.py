"""nucleate: the complete token-generation pipeline, from logits to streamed text.

The names below are the public ones; each is imported when it is first used, so that ``import nucleate`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nucleate.core.event import Completion, Event, Output, Piece, StepLogprobs, TokenLogprob, Usage
    from nucleate.core.parameter import ParameterError
    from nucleate.core.structured import Structured
    from nucleate.engine.beam import BeamCompletion, BeamOutput, BeamParams, BeamRequest
    from nucleate.engine.engine import Engine
    from nucleate.engine.request import Request
    from nucleate.engine.speculate import Speculation
    from nucleate.engine.worker import AsyncEngine, EngineStoppedError
    from nucleate.llm import LLM
    from nucleate.models.model import ModelError
    from nucleate.params import SamplingParams
    from nucleate.pipeline import LogitsError, explain, probabilities, sample
    from nucleate.presets import PRESETS
    from nucleate.sampler import Sampled, Sampler
    from nucleate.tracing import Trace, trace
    from nucleate.warming import warm

_HOMES = {
    "LLM": "llm",
    "Engine": "engine.engine",
    "Request": "engine.request",
    "Speculation": "engine.speculate",
    "BeamCompletion": "engine.beam",
    "BeamOutput": "engine.beam",
    "BeamParams": "engine.beam",
    "BeamRequest": "engine.beam",
    "AsyncEngine": "engine.worker",
    "EngineStoppedError": "engine.worker",
    "SamplingParams": "params",
    "sample": "pipeline",
    "probabilities": "pipeline",
    "Sampler": "sampler",
    "Sampled": "sampler",
    "PRESETS": "presets",
    "trace": "tracing",
    "Trace": "tracing",
    "explain": "pipeline",
    "Completion": "core.event",
    "Event": "core.event",
    "Output": "core.event",
    "Piece": "core.event",
    "StepLogprobs": "core.event",
    "Structured": "core.structured",
    "TokenLogprob": "core.event",
    "Usage": "core.event",
    "ParameterError": "core.parameter",
    "LogitsError": "pipeline",
    "ModelError": "models.model",
    "warm": "warming",
}

__all__ = [
    "LLM",
    "PRESETS",
    "AsyncEngine",
    "BeamCompletion",
    "BeamOutput",
    "BeamParams",
    "BeamRequest",
    "Completion",
    "Engine",
    "EngineStoppedError",
    "Event",
    "LogitsError",
    "ModelError",
    "Output",
    "ParameterError",
    "Piece",
    "Request",
    "Sampled",
    "Sampler",
    "SamplingParams",
    "Speculation",
    "StepLogprobs",
    "Structured",
    "TokenLogprob",
    "Trace",
    "Usage",
    "explain",
    "probabilities",
    "sample",
    "trace",
    "warm",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nucleate' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"nucleate.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
