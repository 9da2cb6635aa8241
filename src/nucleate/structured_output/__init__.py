"""Text that is valid by construction: what is asked for, compiled, as masks of allowed tokens. Knows no model.

``StructuredOutputs`` is what a request says. ``GrammarCompiler`` compiles it for one vocabulary, once per model; a
``CompiledGrammar`` makes a ``GrammarMatcher`` per answer, which says before each token which ones may follow. ``Guide``
is it in the loop of an answer."""

from nucleate.structured_output.compiler import CompiledGrammar, GrammarCompiler
from nucleate.structured_output.grammar_limits import GrammarLimits
from nucleate.structured_output.grammar_matcher import GrammarMatcher, MatcherError
from nucleate.structured_output.guide import Guide, form_of, skippable, why
from nucleate.structured_output.spec import StructuredOutputs

__all__ = [
    "CompiledGrammar",
    "GrammarCompiler",
    "GrammarLimits",
    "GrammarMatcher",
    "Guide",
    "MatcherError",
    "StructuredOutputs",
    "form_of",
    "skippable",
    "why",
]
