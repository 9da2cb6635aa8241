"""Flags for the form of an answer, one for each field of ``StructuredOutputs``. Knows no grammar and no schema."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nucleate.cli.input_text import decode
from nucleate.cli.main import UsageError
from nucleate.structured_output.spec import StructuredOutputs

if TYPE_CHECKING:
    from nucleate.engine.engine import Engine

_POLICIES = (
    "strict refuses what of a schema cannot be held, coerce takes oneOf for anyOf, lenient ignores and reports it"
)
_WHITESPACE = "of JSON: bounded is a space, or a line break and an indent, compact is none"
TITLE = "form of the text (at most one of the first five; what a file says is written @FILE)"

_ALWAYS: Mapping[str, Any] = {"action": "store_const", "const": True}
FLAGS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "json_schema": ("json-schema", "JSON that fulfils this JSON schema", {"metavar": "@FILE|JSON"}),
    "json_object": ("json-object", "any JSON object", _ALWAYS),
    "regex": ("regex", "all of the text matches this pattern", {"metavar": "PATTERN"}),
    "choice": ("choice", "one of some texts; once for each", {"metavar": "TEXT", "action": "append"}),
    "grammar": ("grammar", "a text of this grammar, in Lark or GBNF", {"metavar": "@FILE|TEXT"}),
    "policy": ("structured-policy", f"{_POLICIES} [default strict]", {"metavar": "NAME"}),
    "whitespace": ("structured-whitespace", f"{_WHITESPACE} [default bounded]", {"metavar": "NAME"}),
}
"""By field: the flag without its dashes, its help, what argparse is told of it besides."""

_FILES = ("json_schema", "grammar")


def add_form(parser: argparse.ArgumentParser) -> None:
    """Add the flags; ``read_form`` finds them."""
    group = parser.add_argument_group(TITLE)
    for field, (flag, text, options) in FLAGS.items():
        group.add_argument(f"--{flag}", dest=f"form_{field}", default=None, help=text, **options)


def read_form(arguments: argparse.Namespace) -> StructuredOutputs | None:
    """The form that the flags ask for, if any is there. Raises ParameterError, UsageError, OSError."""
    given = {field: getattr(arguments, f"form_{field}", None) for field in FLAGS}
    said: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    for field in _FILES:
        if field in said:
            said[field] = _content(FLAGS[field][0], said[field])
    return StructuredOutputs(**said) if said else None


def check_form(engine: Engine, form: StructuredOutputs | None) -> None:
    """Raise ParameterError if an engine cannot hold answers to a form, before every request would be told so."""
    from nucleate.engine.request import Request
    from nucleate.sampling_params import SamplingParams

    if form is not None:
        engine.prepare(Request([0], SamplingParams(structured=form)))


def _content(flag: str, text: str) -> str:
    """What a file says if the text names one after @; else the text."""
    if text.startswith("@"):
        return decode(Path(text[1:]).read_bytes(), text[1:]).removeprefix("\ufeff")
    if os.path.isfile(text):  # noqa: PTH113  # a text that can be no path is no error to it
        raise UsageError(f"--{flag} {text} is the name of a file: --{flag} @{text} reads it")
    return text
