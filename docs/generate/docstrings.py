"""Turns docstrings of this project into the form that Sphinx's autodoc reads.

Parameters are described in sentences, ``name: meaning`` or ``name, other: meaning``, within a paragraph. They become a
list.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any

_FIELDS = re.compile(r"Fields:(\n +\w+: .+)+")
"""The fields in the docstring of SamplingParams, one per line."""
_GENERATED = re.compile(r"Alias for field number \d+$")


def process(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Replace the lines of a docstring. The handler of autodoc's event ``autodoc-process-docstring``."""
    if lines and _GENERATED.match(lines[0]):
        lines.clear()
    lines[:] = docstring_lines(lines, parameters_of(thing))


def parameters_of(thing: Any) -> list[str]:
    """Return the names of the parameters of a function or of a class's constructor."""
    try:
        found = [*inspect.signature(thing).parameters.values()]
    except (TypeError, ValueError):
        return []
    return [p.name for p in found]


def docstring_lines(lines: Sequence[str], parameters: Sequence[str]) -> list[str]:
    """Return the lines of a docstring with lists of parameters."""
    made: list[str] = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        if _FIELDS.fullmatch(paragraph):
            made += ["Fields:", "", *(f"- {_named(line)}" for line in paragraph.splitlines()[1:]), ""]
            continue
        literal = paragraph.startswith((" ", "=", ">>>", "- ", "* ")) or "\n " in paragraph
        made += [*(paragraph.splitlines() if literal else _paragraph(paragraph, parameters)), ""]
    return made


def _named(line: str) -> str:
    name, _, meaning = line.strip().partition(": ")
    return f"**{name}**: {_escaped(meaning)}"


def _paragraph(text: str, parameters: Sequence[str]) -> Iterable[str]:
    text = " ".join(text.split())
    name = "|".join(rf"(?:``)?{re.escape(p)}(?:=\w+)?(?:``)?" for p in parameters)
    marks = (
        [*re.finditer(rf"(?:^|(?<=[.;)] ))((?:{name})(?:, (?:{name}))*)(: |, (?=also))", text)] if parameters else []
    )
    if not marks:
        return [_escaped(text)]
    found = [_escaped(text[: marks[0].start()].rstrip(" ;")), ""] if marks[0].start() else []
    rest = ""
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        meaning = text[mark.end() : following.start() if following else None].strip().rstrip(";")
        if following is None:
            meaning, raises, end = meaning.partition(" Raises ")
            rest = f"Raises {end}" if raises else ""
        names = ", ".join(f"**{one.strip('`')}**" for one in mark[1].split(", "))
        found.append(f"- {names}: {_escaped(meaning)}")
    return [*found, *(["", _escaped(rest)] if rest else [])]


def _escaped(text: str) -> str:
    """Return prose without the characters that reStructuredText would read as markup, outside of literals."""
    parts = re.split(r"(``.*?``)", text)
    return "".join(part if part.startswith("``") else _plain(part) for part in parts)


def _plain(text: str) -> str:
    text = re.sub(r"`([^`]+)`", r"``\1``", text)
    return text.replace("*", r"\*").replace("|", r"\|")
