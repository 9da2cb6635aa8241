"""Converts constraints to llguidance's grammar format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from nucleate.structured_output.gbnf import lark_text
from nucleate.structured_output.json_schema import PreparedSchema
from nucleate.structured_output.lark import parse_lark
from nucleate.structured_output.lazy_grammar import lazy_grammar
from nucleate.structured_output.llguidance_loader import library
from nucleate.structured_output.pattern_syntax import check_syntax, with_explicit_classes
from nucleate.structured_output.schema_soundness import rewrite_schema
from nucleate.structured_output.spec import StructuredOutputs, Whitespace
from nucleate.structured_output.tag_compiler import SpecialTokens

WHITESPACE: Final = r"( |\n( {0,16}|\t{0,8}))"
"""Optional whitespace between JSON tokens: bounded, but enough for indentation (four levels of four spaces).

Some models generate as much whitespace as is allowed: with 40 spaces, the bundled model needed 1.3 times the tokens.
"""


def llguidance_grammar(
    spec: StructuredOutputs, tokens: SpecialTokens, options: Mapping[str, Any], schema: PreparedSchema | None = None
) -> str:
    """Return the constraint in llguidance's JSON format. Raises ParameterError for an invalid grammar.

    options: of llguidance for JSON schemas. schema: the prepared schema of a JSON constraint, which is changed.
    """
    if spec.grammar is not None and spec.grammar_triggers is not None:
        return lazy_grammar(spec.grammar, spec.grammar_triggers, options, tokens)
    if schema is not None:
        text = json.dumps(rewrite_schema(schema))
        return str(library().LLMatcher.grammar_from_json_schema(text, overrides=dict(options)))
    if spec.regex is not None:
        check_syntax("regex", spec.regex)
        return str(library().LLMatcher.grammar_from_regex(with_explicit_classes(spec.regex)))
    if spec.choice is not None:
        # ASCII, because Lark strings cannot contain control characters.
        # A terminal, because the parser tries the alternatives of a rule one by one.
        return _lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in dict.fromkeys(spec.choice)))
    return _lark(parse_lark(lark_text(spec.grammar or ""), options).text)


def _lark(text: str) -> str:
    """Wrap a Lark grammar in JSON, because llguidance parses text that starts with a brace as its own format."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def schema_options(spec: StructuredOutputs, whitespace: Whitespace) -> dict[str, Any]:
    """Return llguidance's options for JSON schemas: all of them, so that a schema cannot override any.

    whitespace: for a constraint that does not select any.
    """
    flexible = (spec.whitespace or whitespace) == "flexible"
    return {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": flexible,
        "whitespace_pattern": WHITESPACE if flexible else None,
        "coerce_one_of": False,
        "lenient": spec.on_unsupported == "ignore",
    }
