"""nucleate: the complete token-generation pipeline, from logits to streamed text.

The names below are the public ones; each is imported when it is first used, so that ``import nucleate`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nucleate import watermark as watermark
    from nucleate.chat.tools import Tool as Tool
    from nucleate.comparison.compare import compare as compare
    from nucleate.comparison.comparison import Comparison as Comparison
    from nucleate.engine.async_engine import AsyncEngine as AsyncEngine
    from nucleate.engine.async_engine import EngineStoppedError as EngineStoppedError
    from nucleate.engine.beam_params import BeamCompletion as BeamCompletion
    from nucleate.engine.beam_params import BeamOutput as BeamOutput
    from nucleate.engine.beam_params import BeamParams as BeamParams
    from nucleate.engine.beam_params import BeamRequest as BeamRequest
    from nucleate.engine.engine import Engine as Engine
    from nucleate.engine.request import Request as Request
    from nucleate.inspector.notebook import inspect as inspect
    from nucleate.jit.kernel_libraries import warm as warm
    from nucleate.llm import LLM as LLM
    from nucleate.llm.model_loading import load_sampler as load_sampler
    from nucleate.models.protocol import ModelError as ModelError
    from nucleate.outputs import Completion as Completion
    from nucleate.outputs import CompletionChunk as CompletionChunk
    from nucleate.outputs import CompletionOutput as CompletionOutput
    from nucleate.outputs import EngineOutput as EngineOutput
    from nucleate.outputs import StepLogprobs as StepLogprobs
    from nucleate.outputs import TokenLogprob as TokenLogprob
    from nucleate.outputs import ToolCall as ToolCall
    from nucleate.outputs import ToolCallDelta as ToolCallDelta
    from nucleate.outputs import Usage as Usage
    from nucleate.parameters.parameter import ParameterError as ParameterError
    from nucleate.plugins.plugin_loader import register_stage as register_stage
    from nucleate.sampling import stages as stages
    from nucleate.sampling.functional import LogitsError as LogitsError
    from nucleate.sampling.functional import probabilities as probabilities
    from nucleate.sampling.functional import sample as sample
    from nucleate.sampling.presets import PRESETS as PRESETS
    from nucleate.sampling.route import explain as explain
    from nucleate.sampling.sampler import Sampler as Sampler
    from nucleate.sampling.sampler import SamplerOutput as SamplerOutput
    from nucleate.sampling.stage import Pipeline as Pipeline
    from nucleate.sampling.stage import Stage as Stage
    from nucleate.sampling.trace import Trace as Trace
    from nucleate.sampling.trace import trace as trace
    from nucleate.sampling_params import SamplingParams as SamplingParams
    from nucleate.speculative.config import Speculation as Speculation
    from nucleate.structured_output.spec import StructuredOutputs as StructuredOutputs
    from nucleate.watermark import WatermarkKey as WatermarkKey

_NAMES = {
    "chat.tools": "Tool",
    "comparison.compare": "compare",
    "comparison.comparison": "Comparison",
    "engine.async_engine": "AsyncEngine EngineStoppedError",
    "engine.beam_params": "BeamCompletion BeamOutput BeamParams BeamRequest",
    "engine.engine": "Engine",
    "engine.request": "Request",
    "inspector.notebook": "inspect",
    "jit.kernel_libraries": "warm",
    "llm": "LLM",
    "llm.model_loading": "load_sampler",
    "models.protocol": "ModelError",
    "outputs": "Completion CompletionChunk CompletionOutput EngineOutput StepLogprobs TokenLogprob "
    "ToolCall ToolCallDelta Usage",
    "parameters.parameter": "ParameterError",
    "plugins.plugin_loader": "register_stage",
    "sampling.route": "explain",
    "sampling.functional": "LogitsError probabilities sample",
    "sampling.presets": "PRESETS",
    "sampling.sampler": "Sampler SamplerOutput",
    "sampling.stage": "Pipeline Stage",
    "sampling.stages": "stages",
    "sampling.trace": "Trace trace",
    "sampling_params": "SamplingParams",
    "speculative.config": "Speculation",
    "structured_output.spec": "StructuredOutputs",
    "watermark": "WatermarkKey watermark",
}
"""The public names of each module."""

_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)  # noqa: PLE0605  # the names are above


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nucleate' has no attribute {name!r}")
    home = importlib.import_module(f"nucleate.{_HOMES[name]}")
    value = home if name in ("stages", "watermark") else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
