"""The pages of the API reference, and the public names on each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ApiPage:
    """A page about some public names, which are written without the prefix ``nucleate.``."""

    name: str
    title: str
    about: str
    names: tuple[str, ...]


PAGES = (
    ApiPage(
        "llm",
        "Text generation",
        "A model with its tokenizer, the values that it returns, and tools.",
        (
            *("LLM", "Completion", "CompletionOutput", "CompletionChunk", "Usage", "StepLogprobs", "TokenLogprob"),
            *("outputs.Finish", "outputs.Validation", "Tool", "ToolCall", "ToolCallDelta", "warm"),
        ),
    ),
    ApiPage(
        "sampling_params",
        "Sampling parameters",
        "The parameters of a request as a value. [Parameters](../parameters.md) lists all fields.",
        ("SamplingParams", "StructuredOutputs", "PRESETS", "Pipeline"),
    ),
    ApiPage(
        "sampling",
        "Sampling",
        "Logits to tokens, with and without state.",
        ("sample", "probabilities", "Sampler", "SamplerOutput", "load_sampler", "explain"),
    ),
    ApiPage(
        "trace",
        "Trace and inspector",
        "What each stage does to a row of logits. [Trace schema](../trace.md) describes the JSON.",
        ("trace", "Trace", "sampling.trace.TraceStep", "sampling.trace_reasons.StageChange", "inspect"),
    ),
    ApiPage(
        "engine",
        "Engine",
        "Continuous batching, for programs that drive the engine themselves, and speculative decoding.",
        (
            *("Engine", "AsyncEngine", "Request", "EngineOutput", "outputs.EngineStats"),
            *("outputs.SpeculativeStats", "Speculation"),
        ),
    ),
    ApiPage("beam", "Beam search", "", ("BeamParams", "BeamRequest", "BeamCompletion", "BeamOutput")),
    ApiPage(
        "stage",
        "Stages",
        "The base classes of stages, for [stages of your own](../../custom_stages.md). The built-in stages, in "
        "`nucleate.stages`, have [a page each](../stages/index.md).",
        (
            *("Stage", "sampling.stage.Combine", "sampling.stage.Shift", "sampling.stage.Scale"),
            *("sampling.stage.Floor", "sampling.stage.Prefix", "sampling.stage.Ceiling", "sampling.stage.Transform"),
            *("sampling.stage.Tap", "sampling.stage.Draw", "sampling.stage.param", "sampling.stage.RowStats"),
            *("sampling.stage.TokenInfo", "sampling.stage.SampledToken", "sampling.history.HistoryView"),
            *("sampling.history.History", "sampling.stage.IncrementalListing"),
            *("sampling.stage.TextEncoder", "parameters.parameter.Parameter"),
            *("register_stage", "plugins.stage_check.check_stage"),
        ),
    ),
    ApiPage("maths", "Functions of rules", "What the rule of a stage may use.", ("sampling.maths",)),
    ApiPage(
        "watermark",
        "Watermarks",
        "The stages of watermarks have pages of their own: [kgw](../stages/kgw.md), "
        "[gumbel_watermark](../stages/gumbel_watermark.md) and [synthid](../stages/synthid.md).",
        ("watermark",),
    ),
    ApiPage("comparison", "Comparison", "", ("compare", "Comparison")),
    ApiPage(
        "integrations",
        "Integrations",
        "Adapters for Transformers, and the server as an ASGI application.",
        (
            *("integrations.transformers.SamplingLogitsProcessor", "integrations.transformers.CustomGenerate"),
            *("server.app.application", "server.service.Service", "server.limits.ServerLimits"),
            "server.request_log.RequestLog",
        ),
    ),
    ApiPage(
        "scale",
        "Several machines",
        "Classes and functions for Ray ([batches](../../scale_offline.md), [replicas](../../scale_online.md)).",
        ("scale.data.Generate", "scale.data.pool_options", "scale.serve.app", "scale.serve.build"),
    ),
    ApiPage(
        "models",
        "Models",
        "What a model has to provide.",
        (
            *(
                "models.protocol.Model",
                "models.protocol.DecodingContext",
                "models.protocol.ModelLimits",
                "models.runner.Runner",
            ),
            "models.loader.load",
        ),
    ),
    ApiPage("errors", "Exceptions", "", ("ParameterError", "LogitsError", "ModelError", "EngineStoppedError")),
)

WITHOUT_MEMBERS = frozenset(
    {"server.service.Service", "server.request_log.RequestLog", "sampling.trace_reasons.StageChange"}
)
"""Classes that callers construct or read as a whole."""
