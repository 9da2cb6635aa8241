"""nucleate: the complete token-generation pipeline, from logits to streamed text.

The names below are the public ones; each is imported when it is first used, so that ``import nucleate`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nucleate import watermark as watermark
    from nucleate.chat.tools import Tool
    from nucleate.comparison.compare import compare
    from nucleate.comparison.comparison import Comparison
    from nucleate.engine.async_engine import AsyncEngine, EngineStoppedError
    from nucleate.engine.beam_params import BeamCompletion, BeamOutput, BeamParams, BeamRequest
    from nucleate.engine.engine import Engine
    from nucleate.engine.request import Request
    from nucleate.inspector.notebook import inspect
    from nucleate.jit.kernel_libraries import warm
    from nucleate.llm import LLM
    from nucleate.models.protocol import ModelError
    from nucleate.outputs import (
        Completion,
        CompletionChunk,
        CompletionOutput,
        EngineOutput,
        StepLogprobs,
        TokenLogprob,
        ToolCall,
        ToolCallDelta,
        Usage,
    )
    from nucleate.parameters.parameter import ParameterError
    from nucleate.plugins.plugin_loader import register_stage
    from nucleate.sampling import stages as stages
    from nucleate.sampling.functional import LogitsError, probabilities, sample
    from nucleate.sampling.presets import PRESETS
    from nucleate.sampling.route import explain
    from nucleate.sampling.sampler import Sampler, SamplerOutput
    from nucleate.sampling.stage import Pipeline, Stage
    from nucleate.sampling.trace import Trace, trace
    from nucleate.sampling_params import SamplingParams
    from nucleate.speculative.config import Speculation
    from nucleate.structured_output.spec import StructuredOutputs
    from nucleate.watermark import WatermarkKey

_HOMES = {
    "stages": "sampling.stages",
    "Pipeline": "sampling.stage",
    "Stage": "sampling.stage",
    "LLM": "llm",
    "compare": "comparison.compare",
    "inspect": "inspector.notebook",
    "Comparison": "comparison.comparison",
    "Engine": "engine.engine",
    "Request": "engine.request",
    "Speculation": "speculative.config",
    "BeamCompletion": "engine.beam_params",
    "BeamOutput": "engine.beam_params",
    "BeamParams": "engine.beam_params",
    "BeamRequest": "engine.beam_params",
    "AsyncEngine": "engine.async_engine",
    "EngineStoppedError": "engine.async_engine",
    "SamplingParams": "sampling_params",
    "sample": "sampling.functional",
    "probabilities": "sampling.functional",
    "Sampler": "sampling.sampler",
    "SamplerOutput": "sampling.sampler",
    "PRESETS": "sampling.presets",
    "trace": "sampling.trace",
    "Trace": "sampling.trace",
    "explain": "sampling.route",
    "register_stage": "plugins.plugin_loader",
    "Completion": "outputs",
    "EngineOutput": "outputs",
    "CompletionOutput": "outputs",
    "CompletionChunk": "outputs",
    "StepLogprobs": "outputs",
    "StructuredOutputs": "structured_output.spec",
    "TokenLogprob": "outputs",
    "Tool": "chat.tools",
    "ToolCall": "outputs",
    "ToolCallDelta": "outputs",
    "Usage": "outputs",
    "ParameterError": "parameters.parameter",
    "LogitsError": "sampling.functional",
    "ModelError": "models.protocol",
    "warm": "jit.kernel_libraries",
    "watermark": "watermark",
    "WatermarkKey": "watermark",
}

__all__ = [
    "LLM",
    "PRESETS",
    "AsyncEngine",
    "BeamCompletion",
    "BeamOutput",
    "BeamParams",
    "BeamRequest",
    "Comparison",
    "Completion",
    "CompletionChunk",
    "CompletionOutput",
    "Engine",
    "EngineOutput",
    "EngineStoppedError",
    "LogitsError",
    "ModelError",
    "ParameterError",
    "Pipeline",
    "Request",
    "Sampler",
    "SamplerOutput",
    "SamplingParams",
    "Speculation",
    "Stage",
    "StepLogprobs",
    "StructuredOutputs",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Trace",
    "Usage",
    "WatermarkKey",
    "compare",
    "explain",
    "inspect",
    "probabilities",
    "register_stage",
    "sample",
    "stages",
    "trace",
    "warm",
    "watermark",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nucleate' has no attribute {name!r}")
    home = importlib.import_module(f"nucleate.{_HOMES[name]}")
    value = home if name in ("stages", "watermark") else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
