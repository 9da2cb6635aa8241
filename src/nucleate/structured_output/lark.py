"""Reads grammars in llguidance's Lark dialect: their repetitions, operators, embedded schemas and token ids.

A grammar can hold whole JSON schemas (``%json``), options of the library and ids of tokens. They are found here, so
that the checks of other constraints apply to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any, Final, NamedTuple, NoReturn

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.repetition_limits import Item, Size, size_of, unrolled
from nucleate.structured_output.schema_soundness import sound

_WORD = re.compile(
    r"(?P<skip>(?:\#|//)[^\n]*|[ \t]+)|(?P<newline>(?:\r?\n)+[ \t]*)|(?P<embedded>%(?:json|regex|llguidance))"
    r"|(?P<string>\"(?:\\.|[^\"\\\n])*\"i?)|(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)|(?P<special><[^<>\s]+>)"
    r"|(?P<rule>!?[_?]?[a-z][_a-z0-9-]*)|(?P<terminal>_?[A-Z][_A-Z0-9-]*)|(?P<number>[+-]?[0-9]+(?:\.[0-9]+)?)"
    r"|(?P<mark>\.\.|->|(?s:.))"
)
_COUNT = re.compile(r"\{(\+?[0-9]+)?(,)?(\+?[0-9]+)?\}|~(\+?[0-9]+)(?:\.\.(\+?[0-9]+))?")
_MARKS: Final[Mapping[str, tuple[str, ...]]] = {
    "(": ("(",), ")": (")",), "[": ("(",), "]": (")", "?"), "*": ("*",), "+": ("+",), "?": ("?",)
}  # fmt: skip
_DECODER = json.JSONDecoder()
_OPTIONS: Final = {"no_forcing", "allow_initial_skip", "skip_repetition"}
_PARTS: Final = {"substring_chunks", "substring_words", "substring_chars"}
_UNSUPPORTED: Final = {
    "max_tokens": "grammars constrain text, not tokens",
    "temperature": "it is a parameter of the request",
    "stop": "generated text is never removed; use suffix or lazy",
}


class LarkToken(NamedTuple):
    """``kind`` is a group of the expression above. After an embedding: the ``value``, and how many ``lines`` it has."""

    kind: str
    text: str
    line: int
    value: Any = None
    lines: int = 0


@dataclass(frozen=True)
class Lark:
    """A grammar that was read. ``text``: the grammar, with options set in its embedded schemas."""

    text: str
    alternatives: int
    """Number of bars between alternatives."""
    operators: int
    """Number of uses of & and ~ on terminals."""
    depth: int
    """Nesting of brackets."""
    size: Size
    """The largest minimum and maximum length of a terminal, or of all rules together."""
    parts: int
    """Characters and chunks in ``%regex``."""
    schemas: tuple[dict[str, Any], ...]
    """Embedded schemas."""
    ids: tuple[tuple[int, int], ...]
    """Ranges of token ids, inclusive."""


def read(text: str, options: Mapping[str, Any] | None = None) -> Lark:
    """Read a grammar. ``options``: options to set in each embedded schema.

    Raises ParameterError for what cannot be enforced: llguidance options that change the text, and the rule attributes
    max_tokens, temperature and stop. An invalid grammar gives any numbers.
    """
    words = list(_words(text))
    tokens = [word for word in words if word.kind not in ("skip", "newline")]
    negations = 0
    for word, after in pairwise([*tokens, LarkToken("end", "", 0)]):
        if word.kind == "rule" and word.text in _UNSUPPORTED and after.text == "=":
            _reject(word, f"{word.text} is not supported: {_UNSUPPORTED[word.text]}")
        _CHECKS.get(word.text, _nothing)(word)
        negations += word.text == "~" and after.kind != "number"
    marks = [word.text for word in tokens if word.kind == "mark"]
    return Lark(
        text="".join(_written(word, options or {}) for word in words),
        alternatives=marks.count("|"),
        operators=marks.count("&") + negations,
        depth=_depth(marks),
        size=_size(words),
        parts=sum(_parts(word) for word in tokens),
        schemas=tuple(word.value for word in tokens if word.text == "%json"),
        ids=tuple(each for word in tokens if word.kind == "special" for each in _ids(word)),
    )


def _words(text: str) -> Iterator[LarkToken]:
    """Yield all words of the text."""
    place, line = 0, 1
    while found := _WORD.match(text, place):
        kind, place, value = found.lastgroup or "", found.end(), None
        if kind == "embedded":
            start = len(text) - len(text[place:].lstrip(" \t\r\n"))
            try:
                value, place = _DECODER.raw_decode(text, start)
            except (ValueError, RecursionError) as error:
                _reject(LarkToken(kind, found[0], line), f"{found[0]} needs JSON after it: {str(error)[:80]}")
        yield LarkToken(kind, found[0], line, value, text.count("\n", found.end(), place))
        line += text.count("\n", found.start(), place)


def _written(word: LarkToken, options: Mapping[str, Any]) -> str:
    """Return a word in llguidance's syntax, on the same number of lines."""
    if word.kind != "embedded":
        return word.text
    value = word.value
    if options and word.text == "%json":
        value = {**sound(deepcopy(value)), "x-guidance": options}
    return f"{word.text} {{" + "\n" * word.lines + json.dumps(value)[1:]


def _nothing(word: LarkToken) -> None: ...


def _check_schema(word: LarkToken) -> None:
    if not isinstance(word.value, dict):
        _reject(word, "%json needs an object")


def _check_options(word: LarkToken) -> None:
    known = ", ".join(sorted(_OPTIONS))
    for name in word.value if isinstance(word.value, dict) else ("no object",):
        if name not in _OPTIONS:
            _reject(word, f"%llguidance takes {known}; got {shown(name)}")


def _check_parts(word: LarkToken) -> None:
    if not isinstance(word.value, dict) or len(word.value) != 1 or not word.value.keys() <= _PARTS:
        _reject(word, f"%regex needs an object with one of {', '.join(sorted(_PARTS))}")


_CHECKS: Final = {"%json": _check_schema, "%llguidance": _check_options, "%regex": _check_parts}


def _parts(word: LarkToken) -> int:
    return len(json.dumps(word.value)) if word.text == "%regex" else 0


def _ids(word: LarkToken) -> Iterator[tuple[int, int]]:
    """Return the ranges of a numeric token."""
    if not word.text.startswith("<["):
        return
    for part in word.text[2:].removesuffix(">").removesuffix("]").split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if found is None:
            _reject(word, f"tokens are named by ids or ranges of them, such as <[5,7-9]>, not {shown(word.text)}")
        yield int(found[1]), int(found[2] or found[1])


def _depth(marks: list[str]) -> int:
    level = deepest = 0
    for mark in marks:
        level += (mark in "([{") - (mark in ")]}")
        deepest = max(deepest, level)
    return deepest


def _size(words: list[LarkToken]) -> Size:
    """Return the size: repetitions of nested terminals multiply; rules count once."""
    bodies = _bodies(words)
    terminals = {name: body for name, body in bodies.items() if name.lstrip("_")[:1].isupper()}
    uses = {name: {word.text for word in body} & terminals.keys() for name, body in terminals.items()}
    known: dict[str, Size] = {}
    try:
        for name in TopologicalSorter(uses).static_order():
            known[name] = size_of(_items(bodies[name], known))
    except CycleError as error:
        raise ParameterError("grammar", f"grammar: terminals refer to one another: {error.args[1][0]}") from None
    rules = [size_of(_items(body, known)) for name, body in bodies.items() if name not in known]
    sizes = [*known.values(), (sum(least for least, _ in rules), sum(most for _, most in rules))]
    return max(least for least, _ in sizes), max(most for _, most in sizes)


def _bodies(words: list[LarkToken]) -> dict[str, list[LarkToken]]:
    """Return the body of each definition by name; what comes before the first one has no name."""
    bodies: dict[str, list[LarkToken]] = {"": []}
    name, begins = "", True
    for word in words:
        if begins and word.kind in ("rule", "terminal"):
            name = word.text
            bodies.setdefault(name, [])
        else:
            bodies[name].append(word)
        begins = word.kind == "newline" or (begins and word.kind == "skip")
    return bodies


def _items(body: list[LarkToken], known: Mapping[str, Size]) -> Iterator[Item]:
    """Yield the parts of a definition with their sizes."""
    words = [word for word in body if word.kind not in ("skip", "newline")]
    for place, word in enumerate(words):
        if word.kind == "mark":
            if word.text in ("{", "~"):
                yield from _count("".join(each.text for each in words[place : place + 5]))
            yield from _MARKS.get(word.text, ())
        elif word.kind != "number":
            yield _one(word, known)


def _count(text: str) -> Iterator[str]:
    """Return the repetition count that a word gives to the previous part, if any."""
    found = _COUNT.match(text)
    if found is not None:
        low, comma, high, exactly, last = found.groups()
        yield f"{{{(low or exactly or '0')[:12]}{',' if comma or last else ''}{(high or last or '')[:12]}}}"


def _one(word: LarkToken, known: Mapping[str, Size]) -> Size:
    if word.kind == "regex":
        body, _, flags = word.text[1:].rpartition("/")
        return unrolled(f"(?{flags}){body}" if flags else body)
    if word.kind == "embedded":
        return 1, 1 + _parts(word)
    return (len(word.text.removesuffix("i")) - 2,) * 2 if word.kind == "string" else known.get(word.text, (1, 1))


def _reject(word: LarkToken, reason: str) -> NoReturn:
    raise ParameterError("grammar", f"grammar: in line {word.line}: {reason}")
