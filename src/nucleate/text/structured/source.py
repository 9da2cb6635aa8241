"""A form in the words of llguidance: one text that its parser takes. Checks no limits."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from nucleate.core.parameter import ParameterError
from nucleate.core.structured import Structured
from nucleate.text.structured.library import library, told

WHITESPACE: Final = r"( |\n( {0,40}|\t{0,10}))"
"""What may stand between tokens of JSON, once, or nothing: enough to indent, and an end to it."""

_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def source(structured: Structured) -> str:
    """The JSON text of a grammar. Raises ParameterError for GBNF that cannot be read."""
    if structured.form.startswith("json"):
        schema = json.dumps(structured.schema)
        return str(library().LLMatcher.grammar_from_json_schema(schema, overrides=_options(structured)))
    if structured.regex is not None:
        return str(library().LLMatcher.grammar_from_regex(structured.regex))
    if structured.choice is not None:
        # In ASCII, because the syntax of Lark has no control characters in strings.
        # As a terminal, because the alternatives of a rule are tried one by one.
        return _lark(
            "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in dict.fromkeys(structured.choice))
        )
    return _lark(lark_text(structured.grammar or ""))


def lark_text(grammar: str) -> str:
    """A grammar in Lark; GBNF is converted."""
    return _converted(grammar) if _GBNF.search(grammar) else grammar


def _lark(text: str) -> str:
    """Wrapped, because text that begins with a brace would be taken for the library's own JSON."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _options(structured: Structured) -> dict[str, Any]:
    """Every option the library has, so that none can be set by the schema itself."""
    flexible = structured.whitespace == "bounded"
    return {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": flexible,
        "whitespace_pattern": WHITESPACE if flexible else None,
        "coerce_one_of": structured.policy != "strict",
        "lenient": structured.policy == "lenient",
    }


def _converted(text: str) -> str:
    library()
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(_ESCAPE.sub(_character, text)))
    except RecursionError:
        raise ParameterError("grammar", "grammar: nested too deeply") from None
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise ParameterError("grammar", f"grammar: not GBNF: {told(str(error))}") from None


def _character(found: re.Match[str]) -> str:
    """An escape of GBNF that the converter gets wrong, as one that it gets right or as the character itself."""
    digits = found[1] or found[2]
    if not digits:
        return found[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ParameterError("grammar", f"grammar: {found[0]} is no character")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
