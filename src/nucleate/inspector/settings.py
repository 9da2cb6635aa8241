"""Describes the model and all sampling parameters, from which the inspector makes its controls."""

from __future__ import annotations

import math
from dataclasses import MISSING
from importlib.metadata import version
from typing import Any

from nucleate.inspector.draws import MAX_DRAWS
from nucleate.inspector.trace_view import MAX_TOKENS
from nucleate.parameters.parameter import Parameter
from nucleate.sampling.presets import ORDER_PARAMETERS, PRESETS, REQUESTABLE
from nucleate.sampling.stage import Combine, shape_of
from nucleate.sampling.stages import STAGES
from nucleate.sampling_params import SamplingParams
from nucleate.tokenization.tokenizer import Tokenizer

EXAMPLE = "Once upon a time"


def settings(
    *,
    name: str,
    tokenizer: Tokenizer,
    vocab_size: int,
    context_length: int,
    defaults: SamplingParams,
    max_tokens: int,
    needs_key: bool = False,
) -> dict[str, Any]:
    """The settings page of the inspector, as JSON values. max_tokens: the most tokens of an inspected output."""
    stages = [STAGES[stage] for stage in REQUESTABLE if not issubclass(STAGES[stage], Combine)]
    given = {name: value for name, value in defaults.to_dict().items() if name != "pipeline"}
    return {
        "version": 1,
        "nucleate": version("nucleate"),
        "model": {
            "name": name,
            "vocab_size": vocab_size,
            "context_length": context_length,
            "chat": tokenizer.chat_template is not None,
        },
        "stages": [
            {
                "name": stage.name,
                "shape": shape_of(stage).lower(),
                "help": (stage.__doc__ or "").strip().splitlines()[0],
                "parameters": [_parameter(each, vocab_size) for each in stage.parameters.values() if each.public],
            }
            for stage in stages
        ],
        "draws": list(ORDER_PARAMETERS["draw"].choices),
        "orders": {
            preset: [each if isinstance(each, str) else each[0] for each in order] for preset, order in PRESETS.items()
        },
        "defaults": given,
        "origins": dict.fromkeys(given, "generation_config"),
        "limits": {"max_top": MAX_TOKENS, "max_draws": MAX_DRAWS, "max_tokens": max_tokens},
        "needs_key": needs_key,
        "example": EXAMPLE,
    }


def _parameter(parameter: Parameter, vocab_size: int) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "kind": parameter.kind,
        "help": parameter.help,
        "allowed": parameter.allowed,
        "default": _json(parameter.default),
        "neutral": _json(parameter.neutral),
        "low": parameter.low,
        "high": parameter.high,
        "open_low": parameter.open_low,
        "optional": parameter.optional,
        "choices": list(parameter.choices),
        "slider": slider(parameter, vocab_size),
    }


def slider(parameter: Parameter, vocab_size: int) -> dict[str, Any] | None:
    """The range of a slider for a number; None for other kinds. A parameter without bounds gets plausible ones."""
    if parameter.kind not in ("float", "int") or parameter.choices:
        return None
    if parameter.kind == "int":
        first = 0 if parameter.low is None else int(parameter.low)
        last = min(vocab_size, 1000) if parameter.high is None else int(min(parameter.high, vocab_size))
        return {"min": min(first, last), "max": max(first, last), "step": 1, "log": last - first > 100}
    neutral = parameter.neutral if isinstance(parameter.neutral, int | float) else 0.0
    around = 2.0 * abs(neutral) or 10.0
    low = -around if parameter.low is None else float(parameter.low)
    high = max(around, low + 1) if parameter.high is None else float(parameter.high)
    return {"min": low, "max": high, "step": 0.001 if high - low <= 1 else 0.01, "log": False}


def _json(value: Any) -> Any:
    if value is MISSING or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, tuple | list):
        return [_json(each) for each in value]
    return dict(value) if hasattr(value, "items") else value
