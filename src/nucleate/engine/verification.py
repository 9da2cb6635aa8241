"""Verification of the drafts of some answers, by drawing or by laws. Knows neither schedule nor proposers.

The rules themselves are those of ``verify``; here they meet the sampler, forms of text, and the ends of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.engine.request import RunningSequence, ScheduledSequence
from nucleate.outputs import StepLogprobs
from nucleate.sampling.sampler import Sampler
from nucleate.speculative.acceptance import RULES, coins, coupled, last_coin
from nucleate.speculative.draft import ROOT, Draft
from nucleate.structured_output import Guide, MatcherError


class DraftRow(NamedTuple):
    """An answer whose next token is to be drawn."""

    reading: ScheduledSequence
    branch: RunningSequence
    place: int  #: of the logits of its last token; those of its drafted tokens follow


class VerificationCallbacks(NamedTuple):
    """What an engine does for a verification."""

    logits: Any  #: [L, V], NumPy or torch
    draw: Callable[[list[RunningSequence], list[int]], Sequence[int]]
    """A token for each of some answers, from the logits at these places; -1 for those that end without."""
    take: Callable[[RunningSequence, int, StepLogprobs | None], None]
    """An answer goes on with a token that was chosen."""
    fail: Callable[[RunningSequence, str], None]
    """An answer ends, as no token can be drawn for this reason."""
    over: Callable[[RunningSequence], bool]
    """Whether an answer has ended, or will, with what it has."""


class InvalidDistributionError(ValueError):
    """A draft whose law is none, or of another vocabulary."""


Path = tuple[int, ...]
"""The places of the drafted tokens that stay, see ``Verdict``."""


def follow(rows: Sequence[DraftRow], hands: VerificationCallbacks) -> list[Path]:
    """Draw as without drafts, and go on while what is drawn has been drafted; which were. See ``acceptance.coupled``.

    Tokens that had to follow one that was drawn are there already.
    """
    drafted = [place for place, row in enumerate(rows) if row.reading.draft]
    starts = [rows[place].reading.chunk.stop for place in drafted]
    depths = [rows[place].reading.draft.depths() for place in drafted]

    def draw(sequences: list[int], places: list[int]) -> list[int]:
        if places[0] == ROOT:  # all of them, and those without drafts
            tokens = hands.draw([row.branch for row in rows], [row.place for row in rows])
            return [tokens[place] for place in drafted]
        found = [-1] * len(sequences)
        asked: list[int] = []
        for at, (sequence, place) in enumerate(zip(sequences, places, strict=True)):
            ids, end = rows[drafted[sequence]].branch.job.token_ids, starts[sequence] + depths[sequence][place] + 1
            if end < len(ids):
                found[at] = ids[end]
            else:
                asked.append(at)
        if asked:
            going = [(rows[drafted[sequences[at]]], places[at] + 1) for at in asked]
            drawn = hands.draw([row.branch for row, _ in going], [row.place + more for row, more in going])
            for at, token in zip(asked, drawn, strict=True):
                found[at] = token
        return found

    drafts = [rows[place].reading.draft for place in drafted]
    kept: list[Path] = [()] * len(rows)
    for place, verdict in zip(
        drafted, coupled(drafts, draw, lambda each, _: hands.over(rows[drafted[each]].branch)), strict=True
    ):
        kept[place] = verdict.path
    return kept


def judge(row: DraftRow, hands: VerificationCallbacks, sampler: Sampler, rule: str) -> Path:
    """Verify the draft of one answer by a rule of ``acceptance.RULES``; which of its tokens stay.

    Raises WrongLawError, and then nothing has changed.
    """
    branch, draft, start = row.branch, row.reading.draft, row.reading.chunk.stop
    step = start - len(branch.live.request.prompt_ids)
    logits_NV = hands.logits[row.place : row.place + len(draft) + 1]
    masks = None if branch.answer.guide is None else Masks(branch.answer.guide, draft)
    laws = sampler.distributions(branch.row, logits_NV, draft.tokens, masks, parents=draft.parents)
    seed, count = branch.answer.seed, len(draft)
    try:
        verdict = RULES[rule].verify(laws, draft, coins(seed, step, count), last_coin(seed, step))
    except (ValueError, TypeError) as error:
        raise InvalidDistributionError(str(error)) from error
    ids, lines = branch.job.token_ids, [0, *(place + 1 for place in verdict.path)]  # of logits, laws and masks
    said = 0
    for token, line in zip(verdict.tokens(draft), lines, strict=False):
        if hands.over(branch):
            break
        if start + said == len(ids):
            mask_W = None if masks is None else masks[line]
            told = sampler.accept(branch.row, token, logits_NV[line], mask_W, distribution=laws[line])
            hands.take(branch, token, told)
        elif ids[start + said] != token:  # another one had to follow
            break
        said += 1
    else:
        if verdict.token < 0 and not hands.over(branch):
            hands.fail(branch, laws.errors[lines[-1]])
    return verdict.path[: min(said, len(ids) - start - 1)]


class Masks:
    """What a form allows now, and after each drafted token that it allows, int32 [W]: worked out as it is asked for."""

    def __init__(self, guide: Guide, draft: Draft) -> None:
        self._draft, self._before, self._words = draft, draft.before(), guide.form.words
        self._guides = {0: _copy(guide)}
        self._found: dict[int, NDArray[np.int32]] = {}

    def __getitem__(self, line: int) -> NDArray[np.int32]:
        if line not in self._found:
            guide = self._guide(line)
            self._found[line] = np.zeros(self._words, np.int32) if guide is None else guide.mask()[0]
        return self._found[line]

    def _guide(self, line: int) -> Guide | None:
        if line not in self._guides:
            guide = self._guides[line] = _copy(self._guide(self._before[line - 1] + 1))
            if guide is not None:
                guide.push(self._draft.tokens[line - 1])
        return self._guides[line]


def _copy(guide: Guide | None) -> Guide | None:
    """Another one in the same state; None if it can allow nothing any more."""
    if guide is None or guide.error is not None:
        return None
    copied = Guide(guide.form)
    try:
        copied.matcher = guide.matcher.copy()
    except MatcherError:
        return None
    return copied
