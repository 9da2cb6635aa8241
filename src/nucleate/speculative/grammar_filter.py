"""Truncates drafts to tokens that are valid and that the grammar of the sequence allows.

A token that the grammar forbids is removed with all its descendants. If it was sampled from a distribution, it stays,
and only its descendants go: to remove a token for what it is would change the distribution of the output.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nucleate.speculative.draft import ROOT, Draft
from nucleate.speculative.tree import keep
from nucleate.structured_output import Guide, MatcherError


def allowed(draft: Draft, vocab_size: int, guide: Guide | None) -> Draft:
    """The allowed part of a draft, with tokens of type ``int``.

    The first invalid token and all after it are removed.
    """
    kinds = int, np.integer
    wrong = (at for at, token in enumerate(draft.tokens) if not isinstance(token, kinds) or not 0 <= token < vocab_size)
    draft = draft.prefix(next(wrong, len(draft)))
    if any(type(token) is not int for token in draft.tokens):
        draft = replace(draft, tokens=tuple(map(int, draft.tokens)))
    if guide is None or not draft:
        return draft
    return draft.prefix(_allowed_length(draft, guide)) if draft.chain else _allowed_tree(draft, guide)


def _allowed_length(draft: Draft, guide: Guide) -> int:
    """How many tokens of a chain to keep; none if the grammar has failed."""
    place, count, more = 0, len(draft), int(draft.distributions is not None)
    try:
        matcher = guide.matcher.copy()
    except (ValueError, MatcherError):
        return 0
    try:
        while place < count and not matcher.terminated:
            matcher.accept_token(draft.tokens[place])
            place += 1
    except (ValueError, MatcherError):
        return min(place + more, count)
    return place


def _allowed_tree(draft: Draft, guide: Guide) -> Draft:
    """The allowed part of a tree."""
    kept = []
    try:
        matchers = {ROOT: guide.matcher.copy()}
    except (ValueError, MatcherError):
        return draft.prefix(0)
    for place, parent in enumerate(draft.before()):
        before = matchers.get(parent)
        if before is None or before.terminated:
            continue
        try:
            after = before.copy()
            after.accept_token(draft.tokens[place])
            matchers[place] = after
        except (ValueError, MatcherError):
            if draft.distributions is None:
                continue
        kept.append(place)
    return keep(draft, kept)
