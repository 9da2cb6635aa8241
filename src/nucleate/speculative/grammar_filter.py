"""Filters drafts: keeps the tokens that are in the vocabulary and that the grammar of the sequence allows.

A token that the grammar forbids is removed with all its descendants. If it was sampled from a distribution, it stays
and only its descendants are removed: dropping a sampled token because of its value would bias the output distribution.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nucleate.speculative.draft import ROOT, Draft, select_nodes
from nucleate.structured_output import Guide, MatcherError


def filter_draft(draft: Draft, vocab_size: int, guide: Guide | None) -> Draft:
    """The allowed part of a draft, with tokens of type ``int``.

    The first token outside the vocabulary and all tokens after it are removed.
    """
    draft = draft.prefix(_valid_length(draft, vocab_size))
    if any(type(token) is not int for token in draft.tokens):
        draft = replace(draft, tokens=tuple(map(int, draft.tokens)))
    if guide is None or not draft:
        return draft
    return draft.prefix(_allowed_length(draft, guide)) if draft.is_chain else _allowed_tree(draft, guide)


def _valid_length(draft: Draft, vocab_size: int) -> int:
    """The number of tokens before the first one outside the vocabulary."""
    for index, token in enumerate(draft.tokens):
        if not isinstance(token, (int, np.integer)) or not 0 <= token < vocab_size:
            return index
    return len(draft)


def _allowed_length(draft: Draft, guide: Guide) -> int:
    """How many tokens of a chain to keep; 0 if the grammar has failed."""
    index, length, sampled = 0, len(draft), int(draft.distributions is not None)
    try:
        matcher = guide.matcher.copy()
    except (ValueError, MatcherError):
        return 0
    try:
        while index < length and not matcher.terminated:
            matcher.accept_token(draft.tokens[index])
            index += 1
    except (ValueError, MatcherError):
        return min(index + sampled, length)
    return index


def _allowed_tree(draft: Draft, guide: Guide) -> Draft:
    """The allowed part of a tree; empty if the grammar has failed."""
    allowed = []
    try:
        matchers = {ROOT: guide.matcher.copy()}
    except (ValueError, MatcherError):
        return draft.prefix(0)
    for index, parent in enumerate(draft.parent_indices()):
        before = matchers.get(parent)
        if before is None or before.terminated:
            continue
        try:
            after = before.copy()
            after.accept_token(draft.tokens[index])
            matchers[index] = after
        except (ValueError, MatcherError):
            if draft.distributions is None:
                continue
        allowed.append(index)
    return select_nodes(draft, allowed)
