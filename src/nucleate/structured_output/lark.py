"""Parses grammars in llguidance's Lark dialect, to check them: repetitions, operators, embedded schemas, token ids.

A grammar can embed JSON schemas (``%json``), llguidance options and token ids, which need the same checks as other
constraints.
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
from nucleate.structured_output.pattern_parser import Item, Size, expanded_size, total_size
from nucleate.structured_output.pattern_syntax import nesting, unsupported_syntax, with_explicit_classes
from nucleate.structured_output.schema_rewriting import prepare_schema
from nucleate.structured_output.schema_soundness import rewrite_schema

_TOKEN = re.compile(
    r"(?P<skip>(?:\#|//)[^\n]*|[ \t]+)|(?P<newline>(?:\r?\n)+[ \t]*)|(?P<embedded>%(?:json|regex|llguidance))"
    r"|(?P<string>\"(?:\\.|[^\"\\\n])*\"i?)|(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)|(?P<special><[^<>\s]+>)"
    r"|(?P<rule>!?[_?]?[a-z][_a-z0-9-]*)|(?P<terminal>_?[A-Z][_A-Z0-9-]*)|(?P<number>[+-]?[0-9]+(?:\.[0-9]+)?)"
    r"|(?P<mark>\.\.|->|(?s:.))"
)
_COUNT = re.compile(r"\{(\+?[0-9]+)?(,)?(\+?[0-9]+)?\}|~(\+?[0-9]+)(?:\.\.(\+?[0-9]+))?")
_OPERATORS: Final[Mapping[str, tuple[str, ...]]] = {
    "(": ("(",), ")": (")",), "[": ("(",), "]": (")", "?"), "*": ("*",), "+": ("+",), "?": ("?",)
}  # fmt: skip
_DECODER = json.JSONDecoder()
_OPTIONS: Final = {"no_forcing", "allow_initial_skip", "skip_repetition"}
_REGEX_OPTIONS: Final = {"substring_chunks", "substring_words", "substring_chars"}
_UNSUPPORTED: Final = {
    "max_tokens": "grammars constrain text, not tokens",
    "temperature": "it is a parameter of the request",
    "stop": "generated text is never removed; use suffix or lazy",
}


class LarkToken(NamedTuple):
    """A token of a grammar. ``kind``: a group of ``_TOKEN``. For embedded JSON: its ``value`` and line count.

    ``line``, ``column``: its first character, from 1.
    """

    kind: str
    text: str
    line: int
    value: Any = None
    lines: int = 0
    column: int = 1

    @property
    def pattern_and_flags(self) -> tuple[str, str]:
        """The parts of a regular expression."""
        pattern, _, flags = self.text[1:].rpartition("/")
        return pattern, flags


@dataclass(frozen=True)
class Lark:
    """A parsed grammar. ``text``: its text, with options set in the embedded schemas."""

    text: str
    num_alternatives: int
    """Number of ``|`` between alternatives."""
    num_operators: int
    """Number of uses of ``&`` and ``~`` on terminals."""
    depth: int
    """Nesting depth of brackets."""
    size: tuple[int, int]
    """The largest minimum and maximum length of a terminal, or of all rules together, in characters."""
    regex_characters: int
    """Characters in ``%regex``."""
    schemas: tuple[dict[str, Any], ...]
    """Embedded schemas."""
    token_id_ranges: tuple[tuple[int, int], ...]
    """Ranges of token ids, inclusive."""


def parse_lark(text: str, options: Mapping[str, Any] | None = None) -> Lark:
    """Parse a grammar. options: options to set in each embedded schema.

    Raises ParameterError for unsupported features: llguidance options that change the text, and the rule attributes
    max_tokens, temperature and stop. The numbers for an invalid grammar are arbitrary.
    """
    all_tokens = list(tokenize(text))
    tokens = [token for token in all_tokens if token.kind not in ("skip", "newline")]
    negations = 0
    for token, following in pairwise([*tokens, LarkToken("end", "", 0)]):
        if token.kind == "rule" and token.text in _UNSUPPORTED and following.text == "=":
            _reject(token, f"{token.text} is not supported: {_UNSUPPORTED[token.text]}")
        if token.kind == "embedded":
            _check_embedded(token)
        if token.kind == "regex":
            _check_pattern(token)
        negations += token.text == "~" and following.kind != "number"
    operators = [token.text for token in tokens if token.kind == "mark"]
    return Lark(
        text="".join(_to_llguidance(token, options or {}) for token in all_tokens),
        num_alternatives=operators.count("|"),
        num_operators=operators.count("&") + negations,
        depth=nesting(operators),
        size=_size(all_tokens),
        regex_characters=sum(_regex_characters(token) for token in tokens),
        schemas=tuple(token.value for token in tokens if token.text == "%json"),
        token_id_ranges=tuple(ids for token in tokens if token.kind == "special" for ids in _token_id_ranges(token)),
    )


def tokenize(text: str) -> Iterator[LarkToken]:
    """Yield all tokens of a grammar, white space and comments included."""
    position, line, line_start = 0, 1, 0
    while found := _TOKEN.match(text, position):
        kind, position, value = found.lastgroup or "", found.end(), None
        if kind == "embedded":
            start = len(text) - len(text[position:].lstrip(" \t\r\n"))
            try:
                value, position = _DECODER.raw_decode(text, start)
            except (ValueError, RecursionError) as error:
                _reject(LarkToken(kind, found[0], line), f"{found[0]} needs JSON after it: {str(error)[:80]}")
        yield LarkToken(
            kind, found[0], line, value, text.count("\n", found.end(), position), column=found.start() - line_start + 1
        )
        line_start = max(line_start, text.rfind("\n", found.start(), position) + 1)
        line += text.count("\n", found.start(), position)


def _to_llguidance(token: LarkToken, options: Mapping[str, Any]) -> str:
    """Return the text of a token, with options set in an embedded schema, on the same number of lines."""
    if token.kind == "regex":
        pattern, flags = token.pattern_and_flags
        return f"/{with_explicit_classes(pattern)}/{flags}"
    if token.kind != "embedded":
        return token.text
    value = token.value
    if options and token.text == "%json":
        value = {**rewrite_schema(prepare_schema(deepcopy(value))), "x-guidance": options}
    return f"{token.text} {{" + "\n" * token.lines + json.dumps(value)[1:]


def _check_pattern(token: LarkToken) -> None:
    pattern, flags = token.pattern_and_flags
    if "x" in flags:
        _reject(token, "the flag x of a regex is not supported; write it without spaces and comments")
    found = unsupported_syntax(pattern)
    if found is not None:
        lines = pattern[: found.position].split("\n")
        column = len(lines[-1]) + 1 + (token.column if len(lines) == 1 else 0)
        _reject(token._replace(line=token.line + len(lines) - 1), f"column {column}: {found}")


def _check_embedded(token: LarkToken) -> None:
    given = token.value if isinstance(token.value, dict) else None
    if token.text == "%json" and given is None:
        _reject(token, "%json needs an object")
    if token.text == "%regex" and (given is None or len(given) != 1 or not given.keys() <= _REGEX_OPTIONS):
        _reject(token, f"%regex needs an object with one of {', '.join(sorted(_REGEX_OPTIONS))}")
    for name in (("no object",) if given is None else given) if token.text == "%llguidance" else ():
        if name not in _OPTIONS:
            _reject(token, f"%llguidance takes {', '.join(sorted(_OPTIONS))}; got {shown(name)}")


def _regex_characters(token: LarkToken) -> int:
    return len(json.dumps(token.value)) if token.text == "%regex" else 0


def _token_id_ranges(token: LarkToken) -> Iterator[tuple[int, int]]:
    """Yield the ranges of token ids in ``<[5,7-9]>``, inclusive."""
    if not token.text.startswith("<["):
        return
    for part in token.text[2:].removesuffix(">").removesuffix("]").split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if found is None:
            _reject(token, f"token ids must be given as ids or ranges, such as <[5,7-9]>, not {shown(token.text)}")
        yield int(found[1]), int(found[2] or found[1])


def _size(tokens: list[LarkToken]) -> tuple[int, int]:
    """Return the largest size of a terminal, or of all rules together. Nested terminals multiply; rules count once."""
    definitions = _definitions(tokens)
    terminals = {name: body for name, body in definitions.items() if name.lstrip("_")[:1].isupper()}
    uses = {name: {token.text for token in body} & terminals.keys() for name, body in terminals.items()}
    sizes: dict[str, Size] = {}
    try:
        for name in TopologicalSorter(uses).static_order():
            sizes[name] = total_size(_items(definitions[name], sizes))
    except CycleError as error:
        raise ParameterError("grammar", f"grammar: terminals refer to one another: {error.args[1][0]}") from None
    rules = [total_size(_items(body, sizes)) for name, body in definitions.items() if name not in sizes]
    sizes[""] = Size(sum(size.low for size in rules), sum(size.high for size in rules))
    return max(size.low for size in sizes.values()), max(size.high for size in sizes.values())


def _definitions(tokens: list[LarkToken]) -> dict[str, list[LarkToken]]:
    """Return the tokens of each definition by name; those before the first definition are under an empty name."""
    definitions: dict[str, list[LarkToken]] = {"": []}
    name, at_line_start = "", True
    for token in tokens:
        if at_line_start and token.kind in ("rule", "terminal"):
            name = token.text
            definitions.setdefault(name, [])
        else:
            definitions[name].append(token)
        at_line_start = token.kind == "newline" or (at_line_start and token.kind == "skip")
    return definitions


def _items(body: list[LarkToken], sizes: Mapping[str, Size]) -> Iterator[Item]:
    """Yield the parts of a definition for ``total_size``."""
    tokens = [token for token in body if token.kind not in ("skip", "newline")]
    for position, token in enumerate(tokens):
        if token.kind == "mark":
            if token.text in ("{", "~"):
                yield from _repetition("".join(part.text for part in tokens[position : position + 5]))
            yield from _OPERATORS.get(token.text, ())
        elif token.kind != "number":
            yield _item_size(token, sizes)


def _repetition(text: str) -> Iterator[str]:
    """Return the repetition of the previous part as ``{low,high}``, if there is one."""
    found = _COUNT.match(text)
    if found is not None:
        low, comma, high, exactly, last = found.groups()
        yield f"{{{(low or exactly or '0')[:12]}{',' if comma or last else ''}{(high or last or '')[:12]}}}"


def _item_size(token: LarkToken, sizes: Mapping[str, Size]) -> Size:
    if token.kind == "regex":
        return expanded_size(token.pattern_and_flags[0])
    if token.kind == "string":
        length = len(token.text.removesuffix("i")) - 2
        return Size(length, length)
    return Size(1, 1 + _regex_characters(token)) if token.kind == "embedded" else sizes.get(token.text, Size(1, 1))


def _reject(token: LarkToken, reason: str) -> NoReturn:
    separator = ", " if reason.startswith("column") else ": "
    raise ParameterError("grammar", f"grammar: in line {token.line}{separator}{reason}")
