"""Lazy grammars, as in llama.cpp: any text until a trigger, then a text of the grammar that begins with the trigger.

What may follow a trigger is a quotient of the grammar: the rest of its texts after a given word or token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, final

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.gbnf import is_gbnf, lexing_of, parse_gbnf
from nucleate.structured_output.grammar_expressions import (
    EMPTY,
    NOTHING,
    Characters,
    Choice,
    Expression,
    Reference,
    Repetition,
    Rules,
    TokenReference,
    choice,
    repetition,
    sequence,
    shortest_text,
    shortest_texts,
    substituted,
)
from nucleate.structured_output.llguidance_library import SpecialTokens
from nucleate.structured_output.spec import TRIGGERS, GrammarTrigger
from nucleate.structured_output.structural_tag import FIELD, Token
from nucleate.structured_output.tag_compiler import TagCompiler, checked_stops, free_text
from nucleate.structured_output.tag_grammar import Grammars

Symbol = str | int
"""A character, or the id of a special token."""


def gbnf_quotient(rules: Rules, beginnings: Iterable[Sequence[Symbol]], is_token: Callable[[str, int], bool]) -> Rules:
    """Return rules whose ``root`` has the rests of the texts with one of some beginnings.

    is_token: whether a token reference, given as its text, stands for a token id.
    """
    found, starts = dict(rules), []
    for number, symbols in enumerate(beginnings):
        start = "root"
        for step, symbol in enumerate(symbols):
            suffix = f" {number}.{step}"  # no rule of a grammar has a space in its name
            found |= _Quotient(found, symbol, suffix, is_token).rules(start)
            start += suffix
        starts.append(start)
    inner_root = {"root": Reference(" root")}
    renamed = {f" {name}" if name == "root" else name: substituted(body, inner_root) for name, body in found.items()}
    return {**renamed, "root": choice(inner_root.get(start, Reference(start)) for start in starts)}


@final
class _Quotient:
    """The rules after one symbol (Brzozowski's derivative), under their names with a suffix."""

    def __init__(self, rules: Rules, symbol: Symbol, suffix: str, is_token: Callable[[str, int], bool]) -> None:
        self._rules, self._symbol, self._suffix, self._is_token = rules, symbol, suffix, is_token
        self._shortest = shortest_texts(rules)
        self._waiting: list[str] = []

    def rules(self, start: str) -> dict[str, Expression]:
        found: dict[str, Expression] = {}
        self._waiting.append(start)
        while self._waiting:
            name = self._waiting.pop()
            if name + self._suffix not in found:
                found[name + self._suffix] = self._after(self._rules[name])
        return found

    def _after(self, expression: Expression) -> Expression:
        match expression:
            case Characters():
                code = ord(self._symbol) if isinstance(self._symbol, str) else -1
                return EMPTY if any(low <= code <= high for low, high in expression.ranges) else NOTHING
            case TokenReference():
                same = isinstance(self._symbol, int) and self._is_token(expression.text, self._symbol)
                return EMPTY if same else NOTHING
            case Reference():
                self._waiting.append(expression.name)
                return Reference(expression.name + self._suffix)
            case Choice():
                return choice(map(self._after, expression.parts))
            case Repetition():
                [part] = expression.parts
                high = None if expression.high is None else expression.high - 1
                return sequence([self._after(part), repetition(part, max(expression.low - 1, 0), high)])
        found = []
        for position, part in enumerate(expression.parts):
            found.append(sequence([self._after(part), *expression.parts[position + 1 :]]))
            if shortest_text(part, self._shortest) > 0:
                break
        return choice(found)


def lazy_grammar(
    grammar: str, triggers: tuple[GrammarTrigger, ...], options: Mapping[str, Any], tokens: SpecialTokens
) -> str:
    """Return a lazy grammar in llguidance's JSON format. Raises ParameterError. options: for JSON schemas in it."""
    if not is_gbnf(grammar):
        raise ParameterError("grammar", "grammar: with grammar_lazy, it must be in GBNF, such as root ::= ...")
    try:
        found = _LazyGrammar(grammar, options, tokens)
        return found.grammars.document(found.expression(triggers))
    except ParameterError as error:
        if error.field != FIELD:
            raise
        raise ParameterError(TRIGGERS, str(error).replace(f"{FIELD}.", "").replace(FIELD, TRIGGERS)) from None


@final
class _LazyGrammar:
    def __init__(self, grammar: str, options: Mapping[str, Any], tokens: SpecialTokens) -> None:
        self._tokens = tokens
        self._compiler = TagCompiler(tokens, {})
        self._rules = parse_gbnf(grammar)
        self.grammars = Grammars(options)

    def expression(self, triggers: tuple[GrammarTrigger, ...]) -> Expression:
        """Free text, or free text up to a trigger and the rest of the grammar."""
        begins: dict[str | int, str] = {}
        for index, trigger in enumerate(triggers):
            at = f"{TRIGGERS}[{index}]"
            found = [self._tokens.resolve(Token(at, trigger.value))] if trigger.type == "token" else trigger.words(at)
            begins |= dict.fromkeys(found, at)
        stops = checked_stops([begin for begin in begins if isinstance(begin, str)], TRIGGERS)
        sections = list(chain.from_iterable(self._sections(begin, at, stops) for begin, at in begins.items()))
        return choice([free_text(stops, TRIGGERS), *sections])

    def _sections(self, begin: str | int, at: str, stops: frozenset[str]) -> Iterator[Expression]:
        """Yield free text up to a trigger with the rest of the grammar, for each spelling of the trigger."""
        found = False
        for ending, position in self._compiler.endings(begin, begin):
            spelled = begin if isinstance(begin, str) else self._tokens.text(begin)
            beginnings: list[list[Symbol]] = [[*spelled]]
            if ending.token_id is not None:
                after = begin[position:] if isinstance(begin, str) else ""
                beginnings.append([*ending.text, ending.token_id, *after])
            rest = self._rest(beginnings, at)
            if rest is not None:
                found = True
                text = self._compiler.text(begin, at, position) if isinstance(begin, str) else EMPTY
                yield sequence([self._compiler.up_to(ending, stops, at), text, rest])
        if not found:
            raise ParameterError(TRIGGERS, f"{at}: no text of the grammar begins with {shown(begin)}")

    def _rest(self, beginnings: list[list[Symbol]], at: str) -> Expression | None:
        """Return what follows one of some beginnings in the grammar, or None if it has none of them."""
        try:
            lexing = lexing_of(gbnf_quotient(self._rules, beginnings, self._tokens.is_token))
        except ParameterError as error:
            if "no finite text" not in str(error):
                raise
            return None
        return self.grammars.gbnf(lexing, at)
