"""Converts GBNF, the grammar format of llama.cpp, to Lark."""

from __future__ import annotations

import re

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.llguidance_loader import library, short_message

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def is_gbnf(grammar: str) -> bool:
    return _RULE.search(grammar) is not None


def lark_text(grammar: str) -> str:
    """Return a grammar in Lark, converted from GBNF if necessary. Raises ParameterError for invalid GBNF."""
    return _converted(grammar) if is_gbnf(grammar) else grammar


def _converted(text: str) -> str:
    library()
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(_ESCAPE.sub(_character, text)))
    except RecursionError:
        raise ParameterError("grammar", "grammar: nested too deeply") from None
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise ParameterError("grammar", f"grammar: invalid GBNF: {short_message(str(error))}") from None


def _character(found: re.Match[str]) -> str:
    """Rewrite an escape sequence that llguidance's converter mishandles."""
    digits = found[1] or found[2]
    if not digits:
        return found[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ParameterError("grammar", f"grammar: {found[0]} is not a valid character")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
