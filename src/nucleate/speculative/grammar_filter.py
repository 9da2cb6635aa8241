"""Which drafted tokens are worth reading: those that are tokens, and may follow as far as a form goes. Knows no model.

What may not follow is left out, with all that follows it; but not if it was drawn from a law: to leave a token out for
what it is would change the law of what is said. Then it stays, and nothing after it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nucleate.speculative.draft import ROOT, Draft
from nucleate.speculative.tree import keep
from nucleate.structured_output import Guide, MatcherError


def allowed(draft: Draft, vocab_size: int, guide: Guide | None) -> Draft:
    """As much of a draft as may follow. From the first on that is no token nothing is taken.

    Its tokens are ``int`` from here on, as those that stay are told.
    """
    kinds = int, np.integer
    wrong = (at for at, token in enumerate(draft.tokens) if not isinstance(token, kinds) or not 0 <= token < vocab_size)
    draft = draft.prefix(next(wrong, len(draft)))
    if any(type(token) is not int for token in draft.tokens):
        draft = replace(draft, tokens=tuple(map(int, draft.tokens)))
    if guide is None or not draft:
        return draft
    return draft.prefix(_followed(draft, guide)) if draft.chain else _grown(draft, guide)


def _followed(draft: Draft, guide: Guide) -> int:
    """How many tokens of a chain may follow; none where the form has failed, whatever they are."""
    place, count, more = 0, len(draft), int(draft.laws is not None)
    try:
        matcher = guide.matcher.copy()
    except (ValueError, MatcherError):
        return 0
    try:
        while place < count and not matcher.stopped:
            matcher.push(draft.tokens[place])
            place += 1
    except (ValueError, MatcherError):
        return min(place + more, count)
    return place


def _grown(draft: Draft, guide: Guide) -> Draft:
    """What of a tree may follow, each token after those that lead to it."""
    kept = []
    try:
        matchers = {ROOT: guide.matcher.copy()}
    except (ValueError, MatcherError):
        return draft.prefix(0)
    for place, parent in enumerate(draft.before()):
        before = matchers.get(parent)
        if before is None or before.stopped:
            continue
        try:
            after = before.copy()
            after.push(draft.tokens[place])
            matchers[place] = after
        except (ValueError, MatcherError):
            if draft.laws is None:
                continue
        kept.append(place)
    return keep(draft, kept)
