"""Structured output: constraints compiled to token masks.

``StructuredOutputs`` is the constraint of a request. A ``GrammarCompiler`` (one per model) compiles it for the
vocabulary to a ``CompiledGrammar``, which creates a ``GrammarMatcher`` per sequence: it computes the mask of each step.
``Guide`` combines the matcher with the validation of the output.
"""

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
