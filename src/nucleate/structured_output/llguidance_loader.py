"""Imports llguidance on first use; handles its panics and error messages."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

from nucleate.parameters.converters import install_extra

FAILED: Final = "the grammar engine failed"

_POSITION = re.compile(r"^(?:at )?\d+\(\d+\): ")


@cache
def library() -> Any:
    """Return the module llguidance. Raises ModuleNotFoundError, which names the package to install."""
    try:
        import llguidance
    except ModuleNotFoundError as error:
        if error.name != "llguidance":
            raise
        message = f"structured output needs the package llguidance: {install_extra('structured')}"
        raise ModuleNotFoundError(message) from None
    return llguidance


@cache
def parser_limits() -> Any:
    """Return llguidance's limits for the Earley parser and the lexer.

    Items per row: enough for a thousand optional properties. Items per step: llguidance's default, because a mask over
    a large vocabulary needs thousands even for simple patterns. ``TimeBudget`` limits ambiguous grammars. Verbose
    errors would quote the grammar.
    """
    return library().LLParserLimits(
        max_items_in_row=5_000, step_max_items=50_000, max_lexer_states=50_000, verbose_errors=False
    )


def raise_unless_panic(error: BaseException) -> None:
    """Re-raise an error unless it is a Rust panic of llguidance, which is a BaseException of a private class."""
    if type(error).__name__ != "PanicException" or type(error).__module__ != "pyo3_runtime":
        raise error


def short_message(message: str, keep_position: bool = False) -> str:
    """Shorten an error message of llguidance to one line of 200 characters. keep_position: keep line and column."""
    lines = message.partition("<non-verbose/>")[0].splitlines() or ["it cannot be used"]
    line = lines[0]
    found = _POSITION.match(line)
    reasons = [text for text in lines if text.startswith("error: ")]
    if reasons:
        line = f"{found[0] if found else ''}{reasons[-1].removeprefix('error: ')}"
    if not keep_position:
        line = _POSITION.sub("", line)
    line = " ".join(line.split())
    return line if len(line) <= 200 else line[:197] + "..."
