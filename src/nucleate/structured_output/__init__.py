"""Structured output: constraints compiled to token masks.

``StructuredOutputs`` is the constraint of a request. A ``GrammarCompiler`` (one per model) compiles it to a
``CompiledGrammar``, which creates a ``GrammarMatcher`` per sequence. The matcher computes the token bitmask of each
step. ``Guide`` combines the matcher with the validation of the output.
"""

from nucleate.structured_output.compiler import GrammarCompiler, compile_grammar
from nucleate.structured_output.grammar_limits import GrammarLimits
from nucleate.structured_output.grammar_matcher import GrammarMatcher, MatcherError
from nucleate.structured_output.guide import CompiledGrammar, Guide, can_jump_forward, error_message
from nucleate.structured_output.spec import StructuredOutputs

__all__ = [
    "CompiledGrammar",
    "GrammarCompiler",
    "GrammarLimits",
    "GrammarMatcher",
    "Guide",
    "MatcherError",
    "StructuredOutputs",
    "can_jump_forward",
    "compile_grammar",
    "error_message",
]
