"""Text that is valid by construction: what is asked for, compiled, as masks of allowed tokens. Knows no model.

``Structured`` is what a request says. ``Grammars`` compiles it for one vocabulary, once per model; a ``Compiled`` makes
a ``Matcher`` per answer, which says before each token which ones may follow. ``Guide`` is it in the loop of an answer.
"""

from nucleate.core.structured import Structured
from nucleate.text.structured.grammar import Compiled, Grammars
from nucleate.text.structured.guide import Guide, form_of, skippable, why
from nucleate.text.structured.limits import Limits
from nucleate.text.structured.matcher import Matcher, MatcherError

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
