"""Converts constraints to llguidance's grammar format."""

from __future__ import annotations

import json
from typing import Any, Final

from nucleate.structured_output.gbnf import lark_text
from nucleate.structured_output.lark import read
from nucleate.structured_output.llguidance_loader import library
from nucleate.structured_output.schema_soundness import sound
from nucleate.structured_output.spec import StructuredOutputs

WHITESPACE: Final = r"( |\n( {0,16}|\t{0,8}))"
"""Optional whitespace between JSON tokens: enough for indentation, but bounded.

Allows four levels of four spaces, or eight of two. Some models generate as many blanks as allowed at every place: with
40, the bundled model took 1.3 times the tokens.
"""


def source(spec: StructuredOutputs) -> str:
    """Return llguidance's JSON text of a constraint. Raises ParameterError for an invalid grammar."""
    if spec.kind.startswith("json"):
        schema = json.dumps(sound(spec.schema))
        return str(library().LLMatcher.grammar_from_json_schema(schema, overrides=_options(spec)))
    if spec.regex is not None:
        return str(library().LLMatcher.grammar_from_regex(spec.regex))
    if spec.choice is not None:
        # In ASCII, because Lark strings cannot contain control characters.
        # As a terminal, because the alternatives of a rule are tried one by one.
        return _lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in dict.fromkeys(spec.choice)))
    return _lark(read(lark_text(spec.grammar or ""), _options(spec)).text)


def _lark(text: str) -> str:
    """Wrap a grammar in JSON: llguidance takes text that starts with a brace for its own format."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _options(spec: StructuredOutputs) -> dict[str, Any]:
    """Return all JSON options, so that a schema cannot set them itself."""
    flexible = spec.whitespace == "flexible"
    return {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": flexible,
        "whitespace_pattern": WHITESPACE if flexible else None,
        "coerce_one_of": spec.on_unsupported != "error",
        "lenient": spec.on_unsupported == "ignore",
    }
