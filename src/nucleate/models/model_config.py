"""Reads the JSON files of a model folder, with clear errors for broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nucleate.models.protocol import ModelError


def read_config(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError with one line that names the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must contain a JSON object, not {type(value).__name__}")
    return value


def positive(config: dict[str, Any], name: str, default: float | None = None) -> float:
    """A number > 0 in config.json. ``default``, if given, replaces a missing or null value."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"config.json: {name} must be a number > 0, got {value!r:.60}")
    return value


def positive_integer(config: dict[str, Any], name: str, default: int | None = None) -> int:
    """The same for an integer > 0."""
    value = positive(config, name, default)
    if not isinstance(value, int):
        raise ModelError(f"config.json: {name} must be an integer, got {value!r:.60}")
    return value
