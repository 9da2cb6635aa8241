"""Completions as JSON, and validation results as one line."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from nucleate.outputs import CompletionOutput, Validation


def plain(value: Any) -> Any:
    """A completion, or a part of it, as JSON has it: objects with names, and null for what has no number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "_asdict"):
        return {name: plain(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        names += ["cumulative_logprob"] if isinstance(value, CompletionOutput) else []
        found = {name: plain(getattr(value, name)) for name in names}
        if found.get("validation", "") is None:  # most answers have none
            del found["validation"]
        return found
    return value


def worth(validation: Validation) -> str:
    """How far an answer fulfils a schema that was not held in full, on one line."""
    found = f"the text is wrong: {'; '.join(validation.errors)}" if validation.errors else "the text fulfils it all"
    return " ".join(f"the schema was not held in full: {', '.join(validation.ignored)}; {found}".split())
