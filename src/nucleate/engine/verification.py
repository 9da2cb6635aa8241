"""Checks the drafts of running sequences: filters them by vocabulary and grammar, and verifies them.

A token that the grammar forbids is removed with all its descendants. If it was sampled from a distribution, it stays
and only its descendants are removed: dropping a sampled token because of its value would bias the output distribution.
Verifying applies the acceptance rules to the sampler, grammars and stop criteria.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.engine.running_request import RunningSequence
from nucleate.engine.scheduler import ScheduledSequence
from nucleate.engine.token_sampler import TokenSampler
from nucleate.sampling.sampler import Sampler
from nucleate.speculative.acceptance import RULES, acceptance_uniforms, coupled, residual_uniform
from nucleate.speculative.draft import ROOT, Draft, select_nodes
from nucleate.structured_output import Guide, MatcherError, error_message


def filter_draft(draft: Draft, vocab_size: int, guide: Guide | None) -> Draft:
    """The allowed part of a draft, with tokens of type ``int``.

    The first token outside the vocabulary and all tokens after it are removed.
    """
    draft = draft.prefix(_valid_length(draft, vocab_size))
    if any(type(token) is not int for token in draft.tokens):
        draft = replace(draft, tokens=tuple(map(int, draft.tokens)))
    return draft if guide is None or not draft else _allowed(draft, guide)


def _valid_length(draft: Draft, vocab_size: int) -> int:
    """The number of tokens before the first one outside the vocabulary."""
    for index, token in enumerate(draft.tokens):
        if not isinstance(token, (int, np.integer)) or not 0 <= token < vocab_size:
            return index
    return len(draft)


def _allowed(draft: Draft, guide: Guide) -> Draft:
    """The part of a draft that the grammar allows; empty if the grammar has failed."""
    parents, allowed = draft.parent_indices(), []
    last_child = {parent: index for index, parent in enumerate(parents)}
    try:
        matchers = {ROOT: guide.matcher.copy()}
    except (ValueError, MatcherError):
        return draft.prefix(0)
    for index, parent in enumerate(parents):
        before = matchers.get(parent)
        if before is None or before.terminated:
            continue
        try:
            after = before if last_child[parent] == index else before.copy()  # a chain needs no further copies
            after.accept_token(draft.tokens[index])
            matchers[index] = after
        except (ValueError, MatcherError):
            if draft.distributions is None:
                continue
        allowed.append(index)
    return select_nodes(draft, allowed)


class InvalidDistributionError(ValueError):
    """A draft distribution that is not one, or is of another vocabulary."""


Path = tuple[int, ...]
"""The positions of the accepted draft tokens, see ``AcceptanceResult``."""


def verify_coupled(ready: Sequence[ScheduledSequence], logits_LV: Any, sampler: TokenSampler) -> list[Path]:
    """Sample as without drafts, for as long as the sampled tokens are drafted ones: the path of each draft.

    See ``acceptance.coupled``.

    Tokens that a grammar forces after a sampled one are already in the sequence.
    """
    drafted = [one for one in ready if one.draft]
    depths = [one.draft.depths() for one in drafted]

    def sample(indices: list[int], nodes: list[int]) -> list[int]:
        """The next tokens of some drafted sequences, each after a node of its draft."""
        if nodes[0] == ROOT:  # the first call: all of them, and the sequences without drafts
            tokens = sampler.sample([one.sequence for one in ready], [one.logits_row for one in ready], logits_LV)
            return [token for one, token in zip(ready, tokens, strict=True) if one.draft]
        found = [-1] * len(indices)
        unknown: list[int] = []
        for at, (index, node) in enumerate(zip(indices, nodes, strict=True)):
            one = drafted[index]
            ids, end = one.sequence.token_ids, one.stop + depths[index][node] + 1
            if end < len(ids):
                found[at] = ids[end]
            else:
                unknown.append(at)
        if unknown:
            ones = [drafted[indices[at]] for at in unknown]
            rows = [one.logits_row + nodes[at] + 1 for one, at in zip(ones, unknown, strict=True)]
            tokens = sampler.sample([one.sequence for one in ones], rows, logits_LV)
            for at, token in zip(unknown, tokens, strict=True):
                found[at] = token
        return found

    results = coupled([one.draft for one in drafted], sample, lambda index, _: drafted[index].sequence.done)
    return [result.path for result in results]


def verify_by_rule(
    one: ScheduledSequence, logits_LV: Any, token_sampler: TokenSampler, sampler: Sampler, rule: str
) -> Path:
    """Verify the draft of one sequence by a rule of ``acceptance.RULES``: which of its tokens are accepted.

    Raises InvalidDistributionError, without any effect.
    """
    sequence: RunningSequence = one.sequence
    draft, start, processor = one.draft, one.stop, sequence.processor
    position = start - len(sequence.running.request.prompt_ids)
    logits_NV = logits_LV[one.logits_row : one.logits_row + len(draft) + 1]
    masks = None if processor.guide is None else DraftMasks(processor.guide, draft)
    targets = sampler.distributions(sequence.row, logits_NV, draft.tokens, masks, parents=draft.parents)
    uniforms = acceptance_uniforms(processor.seed, position, len(draft))
    try:
        result = RULES[rule].verify(targets, draft, uniforms, residual_uniform(processor.seed, position))
    except (ValueError, TypeError) as error:
        raise InvalidDistributionError(str(error)) from error
    ids, lines = sequence.token_ids, [0, *(node + 1 for node in result.path)]  # of logits, distributions and masks
    count = 0
    for token, line in zip(result.tokens(draft), lines, strict=False):
        if sequence.done:
            break
        if start + count == len(ids):
            mask_W = None if masks is None else masks[line]
            logprobs = sampler.accept(sequence.row, token, logits_NV[line], mask_W, distribution=targets[line])
            token_sampler.accept(sequence, token, logprobs, logits_NV[line], mask_W)
        elif ids[start + count] != token:  # the grammar forced another one
            break
        count += 1
    else:
        if result.token < 0 and not sequence.done:
            token_sampler.fail(sequence, error_message(targets.errors[lines[-1]], processor.guide))
    return result.path[: min(count, len(ids) - start - 1)]


class DraftMasks:
    """The grammar mask at the start of a draft (line 0) and after each of its tokens, int32 [W], computed lazily."""

    def __init__(self, guide: Guide, draft: Draft) -> None:
        self._draft, self._parents, self._words = draft, draft.parent_indices(), guide.grammar.num_words
        self._guides = {0: _copy(guide)}
        self._masks: dict[int, NDArray[np.int32]] = {}

    def __getitem__(self, line: int) -> NDArray[np.int32]:
        if line not in self._masks:
            guide = self._guide(line)
            self._masks[line] = np.zeros(self._words, np.int32) if guide is None else guide.mask()[0]
        return self._masks[line]

    def _guide(self, line: int) -> Guide | None:
        if line not in self._guides:
            guide = self._guides[line] = _copy(self._guide(self._parents[line - 1] + 1))
            if guide is not None:
                guide.accept_token(self._draft.tokens[line - 1])
        return self._guides[line]


def _copy(guide: Guide | None) -> Guide | None:
    """A guide in the same state; None if it allows nothing any more."""
    if guide is None or guide.error is not None:
        return None
    copied = Guide(guide.grammar)
    try:
        copied.matcher = guide.matcher.copy()
    except MatcherError:
        return None
    return copied
