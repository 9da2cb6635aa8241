"""The prompts of a comparison: built-in ones, and those of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError

BUILT_IN = (
    "Once upon a time",
    "The little dog ran to the",
    "One day, a girl named Lily found a",
    "The sun was shining and the birds",
    "Tom and his sister wanted to build a",
    "It was raining, so the children",
    "The old man looked at the sea and",
    "There was a small house near the forest.",
)
"""Prompts for the embedded model, which tells stories."""


def read_prompts(path: str | Path) -> list[str]:
    """Return the prompts of a file, one per line: text, a JSON string, or an object with a prompt. Raises OSError."""
    found = []
    for number, line in enumerate(Path(path).read_text("utf-8-sig").splitlines(), 1):
        if line.strip():
            found.append(_prompt(line.strip(), f"{path}, line {number}"))
    return check_prompts(found)


def _prompt(line: str, place: str) -> str:
    if not line.startswith(("{", '"')):
        return line
    try:
        value: Any = json.loads(line)
    except ValueError:
        if line.startswith('"'):  # a line of dialogue
            return line
        raise ParameterError("prompts", f"{place} begins with {{ but is not JSON: {shown(line)}") from None
    value = value.get("prompt") if isinstance(value, Mapping) else value
    if not isinstance(value, str):
        raise ParameterError("prompts", f"{place} must have the field prompt with a string, got {shown(line)}")
    return value


def check_prompts(prompts: Sequence[str]) -> list[str]:
    """Return the prompts as a list. Raises ParameterError."""
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    if not given or not all(isinstance(one, str) and one for one in given):
        raise ParameterError("prompts", f"prompts must be a list of non-empty strings, got {shown(given)}")
    return given
