"""Text that is valid by construction: what is asked for, compiled, as masks of allowed tokens. Knows no model.

``Structured`` is what a request says. ``Grammars`` compiles it for one vocabulary, once per model; a ``Compiled`` makes
a ``Matcher`` per answer, which says before each token which ones may follow. ``Guide`` is it in the loop of an answer.
"""

from nucleate.structured_output.compiler import Compiled, Grammars
from nucleate.structured_output.grammar_limits import Limits
from nucleate.structured_output.grammar_matcher import Matcher, MatcherError
from nucleate.structured_output.guide import Guide, form_of, skippable, why
from nucleate.structured_output.spec import Structured

__all__ = [
    "Compiled",
    "Grammars",
    "Guide",
    "Limits",
    "Matcher",
    "MatcherError",
    "Structured",
    "form_of",
    "skippable",
    "why",
]
