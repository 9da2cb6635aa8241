"""The structured-output flags: one per field of ``StructuredOutputs``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nucleate.cli.argument_parser import UsageError
from nucleate.cli.input_text import decode
from nucleate.structured_output.spec import TRIGGER_TYPES, StructuredOutputs

if TYPE_CHECKING:
    from nucleate.engine.engine import Engine

_ON_UNSUPPORTED = (
    "What to do with schema keywords that cannot be enforced: error rejects the schema, approximate also treats oneOf "
    "as anyOf, ignore skips and reports them (default: error)."
)
_WHITESPACE = (
    "Whitespace between JSON tokens: flexible (a space, or a line break with indentation) or none, which takes fewer "
    "tokens (default: flexible). In serve and batch, also for requests with a constraint or tools that do not say."
)
_MAX_DIGITS = "Maximum number of consecutive digits of a number in JSON; 0 for no limit (default: 16)."
TITLE = "structured output (at most one of the first six; @FILE reads the value from a file)"

FLAGS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "json_schema": ("json-schema", "Generate JSON that conforms to this JSON schema.", {"metavar": "@FILE|JSON"}),
    "json_object": ("json-object", "Generate a JSON object.", {"action": "store_const", "const": True}),
    "regex": ("regex", "Generate text that matches this regular expression as a whole.", {"metavar": "PATTERN"}),
    "choice": (
        "choice",
        "Generate one of several texts. Repeat the flag for each text.",
        {"metavar": "TEXT", "action": "append"},
    ),
    "grammar": ("grammar", "Generate text of this grammar, in Lark or GBNF.", {"metavar": "@FILE|TEXT"}),
    "structural_tag": (
        "structural-tag",
        "Generate free text with sections that follow a schema, pattern or grammar, as this structural tag says.",
        {"metavar": "@FILE|JSON"},
    ),
    "grammar_lazy": (
        "grammar-lazy",
        "Apply the grammar only from a trigger on; before it, the text is free. Needs --grammar-trigger.",
        {"action": "store_const", "const": True},
    ),
    "grammar_triggers": (
        "grammar-trigger",
        "What begins the grammar with --grammar-lazy: word:TEXT, token:TEXT or pattern:REGEX. Repeat for each trigger.",
        {"metavar": "TYPE:VALUE", "action": "append"},
    ),
    "on_unsupported": ("schema-on-unsupported", _ON_UNSUPPORTED, {"metavar": "ACTION"}),
    "strict_keywords": (
        "schema-strict-keywords",
        "Reject a schema with an unknown keyword that looks like a misspelled one, instead of ignoring it.",
        {"action": "store_const", "const": True},
    ),
    "whitespace": ("json-whitespace", _WHITESPACE, {"metavar": "MODE"}),
    "max_digits": ("json-max-digits", _MAX_DIGITS, {"metavar": "N"}),
}
"""By field: the flag without its dashes, its help text and further arguments for argparse."""

_FILES = ("json_schema", "grammar", "structural_tag")


def add_structured(parser: argparse.ArgumentParser) -> None:
    """Add the flags; ``read_structured`` reads them."""
    group = parser.add_argument_group(TITLE)
    for field, (flag, text, options) in FLAGS.items():
        group.add_argument(f"--{flag}", dest=f"structured_{field}", default=None, help=text, **options)


def read_structured(arguments: argparse.Namespace) -> StructuredOutputs | None:
    """Return the constraint that the flags set, or None. Raises ParameterError, UsageError, OSError."""
    given = {field: getattr(arguments, f"structured_{field}", None) for field in FLAGS}
    values: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    for field in _FILES:
        if field in values:
            values[field] = read_content(FLAGS[field][0], values[field])
    if (text := values.get("max_digits", "")).isdecimal() and len(text) < 10:
        values["max_digits"] = int(text)
    if "grammar_triggers" in values:
        values["grammar_triggers"] = [_trigger(text) for text in values["grammar_triggers"]]
    if hasattr(arguments, "max_num_seqs"):  # it is the engine's default: see ``flags.engine_options``
        values.pop("whitespace", None)
    return StructuredOutputs(**values) if values else None


def _trigger(text: str) -> dict[str, str]:
    kind, colon, value = text.partition(":")
    if not colon or kind not in TRIGGER_TYPES:
        raise UsageError(f"--grammar-trigger must be TYPE:VALUE with the type {', '.join(TRIGGER_TYPES)}, got {text}")
    return {"type": kind, "value": value}


def check_structured(engine: Engine, structured_outputs: StructuredOutputs | None) -> None:
    """Raise ParameterError now if the engine cannot enforce a constraint, instead of once per request."""
    from nucleate.engine.request import Request
    from nucleate.sampling_params import SamplingParams

    if structured_outputs is not None:
        engine.prepare(Request([0], SamplingParams(structured_outputs=structured_outputs)))


def read_content(flag: str, text: str) -> str:
    """Return the content of the file if the text is ``@FILE``; otherwise the text."""
    if text.startswith("@"):
        return decode(Path(text[1:]).read_bytes(), text[1:]).removeprefix("\ufeff")
    if os.path.isfile(text):  # noqa: PTH113  # Path(text) raises for some texts
        raise UsageError(f"--{flag} {text} is a file name; use --{flag} @{text} to read the file")
    return text
