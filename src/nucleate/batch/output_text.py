"""Completions as JSON, and validation results as one line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from nucleate.outputs import CompletionOutput, Validation

_RARE: Mapping[str, Any] = {"validation": None, "reasoning": None, "tool_calls": [], "reasoning_tokens": 0}
"""Fields that are left out where they have these values."""


def to_json(value: Any) -> Any:
    """Convert a completion, or a part of it, to JSON values; numbers that are not finite become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "_asdict"):
        return {name: to_json(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        names += ["cumulative_logprob"] if isinstance(value, CompletionOutput) else []
        found = {name: to_json(getattr(value, name)) for name in names}
        for name, default in _RARE.items():
            if name in found and found[name] == default:
                del found[name]
        return found
    return value


def validation_text(validation: Validation) -> str:
    """Describe in one line whether an output conforms to a schema with unsupported keywords."""
    result = f"the output is invalid: {'; '.join(validation.errors)}" if validation.errors else "the output is valid"
    if validation.unchecked:
        result += f", except that nothing checks {', '.join(validation.unchecked)}"
    return " ".join(f"ignored schema keywords: {', '.join(validation.ignored)}; {result}".split())
