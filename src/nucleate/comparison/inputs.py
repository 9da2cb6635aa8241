"""Reads what a comparison is given: the settings, and the prompts (built-in ones, or those of a file).

Settings are fields of SamplingParams as keywords, as text (``temperature=0.8 top_p=0.9``), or a pipeline.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.pipeline_format import is_pipeline
from nucleate.sampling_params import SamplingParams

FIELD = "settings"
OWN = {"n": 1, "seed": None, "prompt_logprobs": None}
"""Fields that the comparison sets itself, with their values here."""


def read_settings(given: Any, defaults: SamplingParams, max_tokens: int) -> dict[str, SamplingParams]:
    """Return the settings by name, with defaults for fields that they do not set. Raises ParameterError.

    given: a mapping of names to settings, or a list of settings as text, which are their own names.
    """
    if not isinstance(given, Mapping):
        if isinstance(given, str) or not all(isinstance(one, str) for one in given):
            raise ParameterError(FIELD, f"settings must be a mapping of names, or a list of texts, got {shown(given)}")
        given = named(given)
    if not given:
        raise ParameterError(FIELD, "settings is empty; give at least one, such as 'temperature=0.8 top_p=0.9'")
    return {str(name): _read(str(name), one, defaults, max_tokens) for name, one in given.items()}


def named(texts: Iterable[str]) -> dict[str, str]:
    """Return settings by name: that in front of a colon (``warm: temperature=1.2``), or the whole text."""
    found: dict[str, str] = {}
    for text in texts:
        name, colon, rest = text.partition(":")
        name, fields = (name, rest) if colon and "=" not in name and name.strip() else (text.strip() or "default", text)
        if name.strip() in found:
            raise ParameterError(FIELD, f"settings has {name.strip()!r} twice")
        found[name.strip()] = fields
    return found


def _read(name: str, given: Any, defaults: SamplingParams, max_tokens: int) -> SamplingParams:
    try:
        params = _params(given, defaults)
        for field, own in OWN.items():
            if getattr(params, field) != own:
                why = "the comparison sets the seeds, with one output each"
                raise ParameterError(field, f"{field} cannot be set: {why}, got {shown(getattr(params, field))}")
        return params if params.max_tokens is not None else params.replace(max_tokens=max_tokens)
    except ParameterError as error:
        raise ParameterError(FIELD, f"setting {name!r}: {error}") from None


def _params(given: Any, defaults: SamplingParams) -> SamplingParams:
    if isinstance(given, SamplingParams):
        return given.with_defaults(defaults)
    if isinstance(given, tuple) and is_pipeline(given):
        return defaults.override(pipeline=given)
    if isinstance(given, str):
        given = parse(given)
    if not isinstance(given, Mapping):
        allowed = "an object of fields, text such as 'temperature=0.8', a SamplingParams or a pipeline"
        raise ParameterError(FIELD, f"must be {allowed}, got {shown(given)}")
    return defaults.override(**{str(name): value for name, value in given.items()})


def parse(text: str) -> dict[str, Any]:
    """Return the fields of a text, ``NAME=VALUE ...``. Values are JSON, or else text; quotes as in a shell."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ParameterError(FIELD, f"{text!r} cannot be read: {error}") from None
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ParameterError(FIELD, f"must be NAME=VALUE words, such as temperature=0.8, got {word!r}")
        if name in found:
            raise ParameterError(FIELD, f"has {name} twice")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


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
