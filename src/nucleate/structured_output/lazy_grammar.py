"""Lazy grammars, as in llama.cpp: any text until a trigger, then a text of the grammar that begins with the trigger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, final

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.gbnf import is_gbnf, lexing_of
from nucleate.structured_output.gbnf_parser import parse_gbnf
from nucleate.structured_output.grammar_expressions import EMPTY, Expression, choice, sequence
from nucleate.structured_output.grammar_quotient import Symbol, gbnf_quotient, lark_quotient
from nucleate.structured_output.grammar_triggers import FIELD, GrammarTrigger
from nucleate.structured_output.tag_compiler import TagCompiler, checked_stops
from nucleate.structured_output.tag_expressions import free_text
from nucleate.structured_output.tag_formats import FIELD as TAG_FIELD
from nucleate.structured_output.tag_formats import Token
from nucleate.structured_output.tag_grammar import Grammars
from nucleate.structured_output.tag_tokens import SpecialTokens


def lazy_grammar(
    grammar: str, triggers: tuple[GrammarTrigger, ...], options: Mapping[str, Any], tokens: SpecialTokens
) -> str:
    """Return a lazy grammar in llguidance's JSON format. Raises ParameterError. options: for JSON schemas in it."""
    with _own_errors():
        found = _LazyGrammar(grammar, options, tokens)
        return found.grammars.document(found.expression(triggers))


@contextmanager
def _own_errors() -> Iterator[None]:
    try:
        yield
    except ParameterError as error:
        if error.field != TAG_FIELD:
            raise
        raise ParameterError(FIELD, str(error).replace(f"{TAG_FIELD}.", "").replace(TAG_FIELD, FIELD)) from None


@final
class _LazyGrammar:
    def __init__(self, grammar: str, options: Mapping[str, Any], tokens: SpecialTokens) -> None:
        self._grammar, self._tokens = grammar, tokens
        self._compiler = TagCompiler(tokens, {})
        self._rules = parse_gbnf(grammar) if is_gbnf(grammar) else None
        self.grammars = Grammars(options)

    def expression(self, triggers: tuple[GrammarTrigger, ...]) -> Expression:
        """Free text, or free text up to a trigger and the rest of the grammar."""
        begins: dict[str | int, str] = {}
        for index, trigger in enumerate(triggers):
            at = f"{FIELD}[{index}]"
            found = [self._tokens.resolve(Token(at, trigger.value))] if trigger.type == "token" else trigger.words(at)
            begins |= dict.fromkeys(found, at)
        stops = checked_stops([begin for begin in begins if isinstance(begin, str)], FIELD)
        sections = list(chain.from_iterable(self._sections(begin, at, stops) for begin, at in begins.items()))
        return choice([free_text(stops, FIELD), *sections])

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
            raise ParameterError(FIELD, f"{at}: no text of the grammar begins with {shown(begin)}")

    def _rest(self, beginnings: list[list[Symbol]], at: str) -> Expression | None:
        """Return what follows one of some beginnings in the grammar, or None if it has none of them."""
        if self._rules is None:
            rests = (lark_quotient(self._grammar, symbols, self._tokens.is_token) for symbols in reversed(beginnings))
            text = next((rest for rest in rests if rest is not None), None)
            return None if text is None else self.grammars.lark(text, at)
        try:
            lexing = lexing_of(gbnf_quotient(self._rules, beginnings, self._tokens.is_token))
        except ParameterError as error:
            if "no finite text" not in str(error):
                raise
            return None
        return self.grammars.gbnf(lexing, at)
