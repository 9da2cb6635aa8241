"""The library llguidance: loaded when first needed, its panics and messages made ours. Knows no request."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

FAILED: Final = "the grammar engine failed"

_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): ")


@cache
def library() -> Any:
    """The module. Raises ModuleNotFoundError with what to install."""
    try:
        import llguidance
    except ModuleNotFoundError as error:
        if error.name != "llguidance":
            raise
        raise ModuleNotFoundError(
            "structured output needs the package llguidance: pip install 'nucleate[structured]'"
        ) from None
    return llguidance


@cache
def parser_limits() -> Any:
    """What one grammar may cost the library. Its own errors would quote the grammar, so they are kept short.

    As many items in a row as a thousand optional properties need; in a step the library's own number, since a mask over
    a large vocabulary takes thousands for the simplest pattern. What ambiguous grammars cost is for the time to bound.
    """
    return library().LLParserLimits(
        max_items_in_row=5_000, step_max_items=50_000, max_lexer_states=50_000, verbose_errors=False
    )


def raise_unless_panic(error: BaseException) -> None:
    """Return if the library panicked, which is a BaseException of a class it does not export; else raise it again."""
    if type(error).__name__ != "PanicException" or type(error).__module__ != "pyo3_runtime":
        raise error


def told(message: str, place: bool = False) -> str:
    """A message of the library on one line and of bounded length. ``place``: with line and column of a grammar."""
    lines = message.partition("<non-verbose/>")[0].splitlines() or ["it cannot be used"]
    line = lines[0]
    found = _PLACE.match(line)
    reasons = [text for text in lines if text.startswith("error: ")]
    if reasons:
        line = f"{found[0] if found else ''}{reasons[-1].removeprefix('error: ')}"
    if not place:
        line = _PLACE.sub("", line)
    line = " ".join(line.split())
    return line if len(line) <= 200 else line[:197] + "..."
