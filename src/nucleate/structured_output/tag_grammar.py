"""Compiles structural tags to llguidance's grammar format, and checks that the lexer reads them as they are defined.

The lexer reads the longest text that some terminal allowed at this point matches. It is wrong if a terminal X matches a
text, a character follows that may come after X, and another allowed terminal Y (or X) can also read that character.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from functools import cache
from time import thread_time
from typing import Any, Final, NoReturn, cast, final

import numpy as np

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output import structural_tag as tags
from nucleate.structured_output.gbnf import gbnf_lexing, is_gbnf, lark_body, lark_of_lexing
from nucleate.structured_output.grammar_expressions import (
    Choice,
    Expression,
    Repetition,
    Sequence,
    Terminal,
    TokenReference,
    rebuilt,
)
from nucleate.structured_output.lark import parse_lark
from nucleate.structured_output.lexing import Lexing, boundary_bytes, follow_sets
from nucleate.structured_output.llguidance_library import SpecialTokens, library, parser_limits
from nucleate.structured_output.structural_tag import FIELD, Format, parts_of, reject
from nucleate.structured_output.tag_compiler import (
    ANY,
    ANY_CHARACTERS,
    Embedded,
    Pattern,
    TagCompiler,
    ascii_or_other,
    concatenation,
    intersection,
    regex,
)
from nucleate.structured_output.terminal_automata import Budget, TooManyStepsError, compare_pairs, members

MAX_SECONDS: Final = 1.0
"""Maximum CPU time to compare the terminals of a grammar."""


def check_conflicts(expression: Expression) -> set[Pattern]:
    """Raise ParameterError, which names the place, if the lexer would not be exact.

    Returns the terminals that the lexer can end as soon as they match, without the next character (lazily).
    """
    uses: list[Expression] = []
    languages = Languages()
    terminals = _numbered(expression, uses)
    nullable = [isinstance(leaf, Pattern) and languages.nullable(leaf) for leaf in uses]
    try:
        following, ends = follow_sets({"start": terminals}, "start", len(uses), nullable, budget := Budget())
        return _Conflicts(uses, following, languages, budget).check(ends.first)
    except TooManyStepsError:
        raise ParameterError(
            FIELD, f"{FIELD} is too complex: too many alternatives, or expressions that are hard to tell apart"
        ) from None


def _numbered(expression: Expression, uses: list[Expression]) -> Expression:
    """Return an expression with the number of its use in place of each leaf; add the leaves to ``uses``."""
    if isinstance(expression, Sequence | Choice | Repetition):
        return rebuilt(expression, [_numbered(part, uses) for part in expression.parts])
    uses.append(expression)
    return Terminal(len(uses) - 1, len(uses) - 1)


@final
class Languages:
    """Decides whether terminals have a text in common, with the lexer of llguidance over single bytes.

    Raises TooManyStepsError if that takes more than ``MAX_SECONDS`` of CPU time in total.
    """

    def __init__(self) -> None:
        self._seconds = MAX_SECONDS
        self._continues: dict[tuple[Pattern, frozenset[str], Pattern], bool] = {}
        self._mask_W = np.zeros(9, np.int32)

    def nullable(self, pattern: Pattern) -> bool:
        if pattern.prefix or pattern.until is not None:
            return False
        return pattern.stops is not None or bool(self._matcher(pattern).is_accepting())

    def overlaps(self, left: Pattern, right: Pattern) -> bool:
        return not self._is_empty(intersection(left, right))

    def continues(self, left: Pattern, after: frozenset[str], right: Pattern) -> bool:
        """Return whether a text of ``right`` begins with one of ``left`` and a character of ``after``."""
        found = self._continues.get((left, after, right))
        if found is None:
            found = not self._is_empty(intersection(right, concatenation([left, Pattern(one_of(after)), ANY])))
            self._continues[left, after, right] = found
        return found

    def _is_empty(self, pattern: Pattern) -> bool:
        begin = thread_time()
        matcher = self._matcher(pattern)
        if not matcher.is_accepting():
            matcher.unsafe_compute_mask_ptr(self._mask_W.ctypes.data, self._mask_W.nbytes)
        self._seconds -= thread_time() - begin
        if self._seconds < 0:
            raise TooManyStepsError
        return bool(matcher.is_error() and "NoExtension" in matcher.get_error())

    def _matcher(self, pattern: Pattern) -> Any:
        definitions: dict[str, str] = {}
        pattern.definitions(definitions)
        lines = [f"{name}: {body}" for name, body in definitions.items()]
        text = json.dumps({"grammars": [{"lark_grammar": "\n".join([f"start: {pattern.name}", *lines])}]})
        matcher = library().LLMatcher(_byte_tokenizer(), text, log_level=0, limits=parser_limits())
        if matcher.is_error():
            reject(pattern.at, matcher.get_error().splitlines()[0][:200])
        return matcher


class _Bytes:
    """A tokenizer of single bytes."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids: Final = [256]
    tokens: Final = [bytes([value]) for value in range(256)] + [b""]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


@cache
def _byte_tokenizer() -> Any:
    return library().LLTokenizer(_Bytes(), n_vocab=257, eos_token=256)


def one_of(characters: frozenset[str]) -> str:
    """Return a regular expression of one of some characters, as in ``ANY_CHARACTERS``."""
    if characters == ANY_CHARACTERS:
        return "/(?s:.)/"
    parts = [f"\\x{{{ord(each):x}}}" if each.isascii() else r"\x{80}-\x{10ffff}" for each in sorted(characters)]
    return f"/[{''.join(parts)}]/"


@final
class _Conflicts:
    def __init__(self, uses: Items[Expression], following: Items[int], languages: Languages, budget: Budget) -> None:
        self._uses, self._following, self._languages, self._budget = uses, following, languages, budget
        self._after = [self._first_of(uses_after) for uses_after in following]
        self._lazy = {leaf for leaf in uses if isinstance(leaf, Pattern) and leaf.ends_itself and not leaf.literal}

    def check(self, first: int) -> set[Pattern]:
        """Return the terminals that may be lazy. Raises ParameterError."""
        compare_pairs(first, self._following, self._budget, self._check_pair)
        return self._lazy

    def _first_of(self, uses: int) -> frozenset[str]:
        """Return the characters with which some uses may begin."""
        found: set[str] = set()
        for use in members(uses):
            self._budget.spend()
            leaf = self._uses[use]
            if isinstance(leaf, Pattern | Embedded):
                found |= leaf.first
        return frozenset(found)

    def _check_pair(self, left: int, right: int) -> bool:
        """Check that two uses can be told apart. Returns whether they have a text in common."""
        match self._uses[left], self._uses[right]:
            case (TokenReference() as a, TokenReference() as b):
                return a.text == b.text
            case (Pattern() as a, Pattern() as b):
                if not (a.prefix.startswith(b.prefix) or b.prefix.startswith(a.prefix)):
                    return False
                self._check_order(a, left, b)
                self._check_order(b, right, a)
                shares = self._share_text(a, b)
                self._check_lazy(a, b, shares)
                self._check_lazy(b, a, shares)
                return shares
            case (Embedded() as a, Embedded() as b) if left == right or (a.is_json and b.is_json):
                if (a.continues & self._after[left]) or (b.continues & self._after[right]):
                    _ambiguous(a, self._next(left))
                return True
            case (Pattern() | Embedded() as a, Pattern() | Embedded() as b) if self._share_first(a, b):
                what = b.at or "another alternative"
                reject(a.at, f"cannot be told apart from {what}: both may begin with the same text")
        return False

    def _check_order(self, a: Pattern, use: int, b: Pattern) -> None:
        """Check that the lexer may end ``a`` although ``b`` could read on."""
        after = self._after[use]
        if not after or (a.until is not None and a.stops == b.stops):  # both end at the same stops
            return
        if a.literal and b.literal:
            rest = b.prefix[len(a.prefix) :] if b.prefix.startswith(a.prefix) else ""
            conflict = not after.isdisjoint(ascii_or_other(rest[:1]))
        else:
            conflict = self._languages.continues(a, after, b)
        if conflict:
            _ambiguous(a, self._next(use) if a is b else b)

    def _check_lazy(self, a: Pattern, b: Pattern, shares: bool) -> None:
        """Let ``a`` not be lazy if ``b`` could match the same text, or read on."""
        if a is b or a not in self._lazy or (a.stops is not None and a.stops == b.stops):
            return
        if shares or self._languages.continues(a, ANY_CHARACTERS, b):
            self._lazy.remove(a)

    def _share_text(self, a: Pattern, b: Pattern) -> bool:
        if a is b:
            return True
        if a.literal and b.literal:
            return a.prefix == b.prefix
        if a.stops is not None and a.stops == b.stops:
            return a.until == b.until
        return self._languages.overlaps(a, b)

    def _share_first(self, a: Pattern | Embedded, b: Pattern | Embedded) -> bool:
        """Return whether two uses may begin with the same character."""
        shared = a.first & b.first
        for pattern in (a, b):
            if shared and isinstance(pattern, Pattern) and not pattern.prefix and pattern.stops is None:
                beginning = concatenation([Pattern(one_of(shared)), ANY])
                return self._languages.overlaps(pattern, beginning)
        return bool(shared)

    def _next(self, use: int) -> Expression | None:
        return next((self._uses[after] for after in members(self._following[use])), None)


def _ambiguous(leaf: Expression, following: Expression | None) -> NoReturn:
    at, other = getattr(leaf, "at", ""), getattr(following, "at", "")
    what = f"what follows ({other})" if other and other != at else "the text after it"
    reject(at, f"its end is ambiguous: {what} may also continue it; give it an end that cannot be part of it")


_FIRST_OF_TYPES: Final = {
    "object": "{", "array": "[", "string": '"', "boolean": "tf", "null": "n", "integer": "-0123456789",
    "number": "-0123456789",
}  # fmt: skip
_IN_NUMBERS: Final = frozenset("0123456789.eE+-")


def tag_grammar(
    form: Format, schemas: Mapping[str, dict[str, Any]], options: Mapping[str, Any], tokens: SpecialTokens
) -> str:
    """Return a structural tag in llguidance's JSON format. Raises ParameterError.

    schemas: the rewritten schema of each JSON schema by its place. options: of llguidance for them.
    """
    embedded: dict[str, Expression] = {}
    grammars = Grammars(options)
    for part in parts_of(form):
        if isinstance(part, tags.JsonSchema):
            text = json.dumps({**schemas[part.at], "x-guidance": options})
            first, continues = _json_boundaries(part.schema)
            embedded[part.at] = Embedded(f"%json {text}", first, continues, part.at, is_json=True)
        elif isinstance(part, tags.Grammar):
            if is_gbnf(part.grammar):
                embedded[part.at] = grammars.gbnf(gbnf_lexing(part.grammar), part.at)
            else:
                embedded[part.at] = grammars.lark(part.grammar, part.at)
    return grammars.document(TagCompiler(tokens, embedded).expression(form))


class Grammars:
    """The grammars that a grammar embeds. options: of llguidance for JSON schemas in them."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._texts: list[str] = []

    def gbnf(self, lexing: Lexing, at: str) -> Expression:
        if len(lexing.rules) == len(lexing.uses) == 1 and lexing.terminals[0].regular:
            return regex(lexing.terminals[0].regex, at)
        first, continues = map(_characters, boundary_bytes(lexing))
        return self._added(lark_of_lexing(lexing), first, continues, at)

    def lark(self, text: str, at: str) -> Expression:
        """Embed a grammar in Lark. It has the longest match, also at its end."""
        return self._added(parse_lark(text, self._options).text, ANY_CHARACTERS, frozenset(), at)

    def _added(self, text: str, first: frozenset[str], continues: frozenset[str], at: str) -> Expression:
        self._texts.append(text)
        return Embedded(f"@grammar_{len(self._texts)}", first, continues, at)

    def document(self, expression: Expression) -> str:
        """Return an expression in llguidance's JSON format. Raises ParameterError if it is ambiguous."""
        lazy = check_conflicts(expression)
        embedded = [{"name": f"grammar_{number}", "lark_grammar": text} for number, text in enumerate(self._texts, 1)]
        return json.dumps({"grammars": [{"lark_grammar": _lark(expression, lazy)}, *embedded]})


def _characters(byte_set: int) -> frozenset[str]:
    return frozenset(ascii_or_other(chr(byte) for byte in range(256) if byte_set >> byte & 1))


def _json_boundaries(schema: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Return the characters with which the JSON of a schema may begin, and those that may continue a complete text."""
    given = schema if isinstance(schema, Mapping) else {}
    kinds = [given["type"]] if isinstance(given.get("type"), str) else given.get("type")
    values = [given["const"]] if "const" in given else given.get("enum")
    if isinstance(values, list):
        first = frozenset(json.dumps(value)[0] for value in values)
    elif isinstance(kinds, list) and all(isinstance(kind, str) and kind in _FIRST_OF_TYPES for kind in kinds):
        first = frozenset("".join(_FIRST_OF_TYPES[kind] for kind in kinds))
    else:
        first = frozenset("".join(_FIRST_OF_TYPES.values()))
    return first, frozenset() if first.isdisjoint("-0123456789") else _IN_NUMBERS


def _lark(expression: Expression, lazy: Collection[Pattern]) -> str:
    """Return an expression in Lark. lazy: the terminals that end as soon as they match."""
    rules: dict[Expression, str] = {}
    lines: list[str] = []
    terminals: dict[str, str] = {}

    def leaf(part: Expression) -> str:
        if isinstance(part, TokenReference):
            return part.text
        if isinstance(part, Pattern):
            part.definitions(terminals)
            if part not in lazy:
                return part.name
        if part not in rules:
            rules[part] = name = f"rule_{len(rules)}"
            lines.append(
                f"{name}[lazy]: {part.name}" if isinstance(part, Pattern) else f"{name}: {cast('Embedded', part).text}"
            )
        return rules[part]

    start = lark_body(expression, leaf, lines)
    definitions = [f"{name}: {body}" for name, body in terminals.items()]
    return "\n".join([f"start: {start}", *lines, *definitions]) + "\n"
