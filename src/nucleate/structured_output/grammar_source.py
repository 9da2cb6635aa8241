"""A form in the words of llguidance: one text that its parser takes. Checks no limits."""

from __future__ import annotations

import json
from typing import Any, Final

from nucleate.structured_output.gbnf import lark_text
from nucleate.structured_output.lark import read
from nucleate.structured_output.llguidance_loader import library
from nucleate.structured_output.schema_soundness import sound
from nucleate.structured_output.spec import StructuredOutputs

WHITESPACE: Final = r"( |\n( {0,16}|\t{0,8}))"
"""What may stand between tokens of JSON, once, or nothing: enough to indent, and an end to it.

Four levels of four spaces, or eight of two; what is deeper is indented less. A model that likes blanks writes as many
as it may, at every place: with 40 the embedded model took 1.3 times the tokens.
"""


def source(spec: StructuredOutputs) -> str:
    """The JSON text of a grammar. Raises ParameterError for a grammar that cannot be read."""
    if spec.kind.startswith("json"):
        schema = json.dumps(sound(spec.schema))
        return str(library().LLMatcher.grammar_from_json_schema(schema, overrides=_options(spec)))
    if spec.regex is not None:
        return str(library().LLMatcher.grammar_from_regex(spec.regex))
    if spec.choice is not None:
        # In ASCII, because the syntax of Lark has no control characters in strings.
        # As a terminal, because the alternatives of a rule are tried one by one.
        return _lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in dict.fromkeys(spec.choice)))
    return _lark(read(lark_text(spec.grammar or ""), _options(spec)).text)


def _lark(text: str) -> str:
    """Wrapped, because text that begins with a brace would be taken for the library's own JSON."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _options(spec: StructuredOutputs) -> dict[str, Any]:
    """Every option for JSON the library has, so that none can be set by a schema itself."""
    flexible = spec.whitespace == "flexible"
    return {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": flexible,
        "whitespace_pattern": WHITESPACE if flexible else None,
        "coerce_one_of": spec.on_unsupported != "error",
        "lenient": spec.on_unsupported == "ignore",
    }
