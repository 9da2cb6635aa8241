"""Beam search over rows of logits: chooses the continuations of all beams, finishes beams, decides when to stop.

The reference implementation, which defines the results, is ``generation/beam_search.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.engine.beam_params import BeamParams
from nucleate.outputs import StepLogprobs
from nucleate.sampling.reference import RowError, check_scores
from nucleate.structured_output import CompiledGrammar, Guide

Scores = NDArray[np.float64]
BOUND_LANES = 64
"""Number of scores that ``top_score_bound`` reduces to one maximum."""


class BeamConstraint:
    """The grammar of one beam."""

    def __init__(self, grammar: CompiledGrammar, ignore_eos: bool) -> None:
        self.guide, self._ignore_eos = Guide(grammar, ignore_eos=ignore_eos), ignore_eos

    def advance(self, token: int) -> tuple[BeamConstraint, bool]:
        """The constraint after an allowed token, and whether the output is complete with it."""
        after = BeamConstraint(self.guide.grammar, self._ignore_eos)
        after.guide.matcher = self.guide.matcher.copy()
        return after, after.guide.accept_token(token)


LogprobsOf = Callable[[int, int], StepLogprobs]
"""The logprobs to report for a step, from the row of an open beam and the chosen token."""


class SearchError(Exception):
    """An open beam has no next token. beam: its index; reason: why."""

    def __init__(self, beam: int, reason: str) -> None:
        super().__init__(beam, reason)
        self.beam, self.reason = beam, reason


class BeamToken(NamedTuple):
    """A token of a beam, linked to the previous one."""

    previous: BeamToken | None
    token: int
    logprobs: StepLogprobs | None


@dataclass(slots=True)
class OpenBeam:
    """An unfinished beam."""

    last_token: BeamToken | None = None
    logprob: float = 0.0
    constraint: BeamConstraint | None = None


class FinishedBeam(NamedTuple):
    """A finished beam."""

    last_token: BeamToken
    length: int
    score: float
    logprob: float
    ended: bool  #: by EOS, a stop token or a complete grammar; False: at the maximum length

    @property
    def steps(self) -> list[BeamToken]:
        """Its tokens with their logprobs, in order."""
        steps: list[BeamToken] = []
        node: BeamToken | None = self.last_token
        while node is not None:
            steps.append(node)
            node = node.previous
        return steps[::-1]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(node.token for node in self.steps)


class BeamCandidate(NamedTuple):
    """A beam that continues in this step: the index of its parent among the open beams, and its new token."""

    parent: int
    token: int


class BeamSearch:
    """A beam search. ends: token ids that finish a beam; max_tokens: maximum length; constraint: of the first beam."""

    def __init__(
        self, params: BeamParams, ends: Iterable[int], max_tokens: int, constraint: BeamConstraint | None = None
    ) -> None:
        self.params, self.ends, self.max_tokens, self.length = params, frozenset(ends), max_tokens, 0
        size = params.num_beams // params.num_beam_groups
        self._groups = [_Group(self, size, [OpenBeam(constraint=constraint)]) for _ in range(params.num_beam_groups)]

    @property
    def open(self) -> list[OpenBeam]:
        """The unfinished beams by group, best first; before the first step one for all groups. Empty: finished."""
        return self._groups[0].open if not self.length else [beam for group in self._groups for beam in group.open]

    def step(
        self,
        logits_BV: NDArray[np.float32],
        masks_BW: NDArray[np.int32] | None = None,
        logprobs_of: LogprobsOf | None = None,
    ) -> list[BeamCandidate]:
        """Take one step with the logits of the ``open`` beams, in their order.

        masks_BW: grammar masks; bit i % 32 of word i // 32 is token i. Returns the beams that are open afterwards, in
        order. Raises SearchError.
        """
        total_BV = logprobs(logits_BV)
        total_BV += np.array([beam.logprob for beam in self.open])[:, None]
        if masks_BW is not None:
            apply_masks(total_BV, masks_BW)
        begins = not self.length
        self.length += 1
        children: list[BeamCandidate] = []
        token_counts = Counter[int]()
        row = 0
        for group in self._groups:
            end = row + len(group.open)
            own, tokens = group.step(total_BV[row:end], row, token_counts, logprobs_of)
            children += own
            token_counts.update(tokens)
            row = 0 if begins else end
        return children

    def best(self) -> list[FinishedBeam]:
        """The finished beams, best first: ``num_return_sequences`` of them, or fewer if there are no more."""
        found: dict[tuple[int, ...], FinishedBeam] = {}
        for one in sorted((one for group in self._groups for one in group.finished), key=_by_score):
            found.setdefault(one.token_ids, one)
        return list(found.values())[: self.params.num_return_sequences]

    def score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self.params.length_penalty)


def _by_score(found: FinishedBeam) -> float:
    """Sorting is stable: among equal scores the earlier one comes first."""
    return -found.score


@dataclass(slots=True)
class _Group:
    """The beams of one group. The group is finished when no beam is open."""

    search: BeamSearch
    size: int
    open: list[OpenBeam]
    finished: list[FinishedBeam] = field(default_factory=list)

    def step(
        self, total_BV: Scores, row_offset: int, token_counts: Counter[int], logprobs_of: LogprobsOf | None
    ) -> tuple[list[BeamCandidate], list[int]]:
        """Returns the continuing beams of this group, and their tokens. row_offset: the row of its first beam."""
        search, before, self.open = self.search, self.open, []
        last, vocabulary = search.length == search.max_tokens, total_BV.shape[1]
        children: list[BeamCandidate] = []
        tokens: list[int] = []
        weight = search.params.diversity_penalty
        penalty = {token: weight * count for token, count in token_counts.items()} if weight else {}
        ranked = _ranked_candidates(total_BV, penalty, self.size * (1 + len(search.ends)))
        for rank, index in enumerate(ranked):
            if rank >= self.size and (last or len(self.open) == self.size):
                break
            row, token = divmod(index, vocabulary)
            constraint, ended = before[row].constraint, token in search.ends
            if constraint is not None:
                constraint, complete = constraint.advance(token)
                ended = ended or complete
            if ended and rank >= self.size:  # a finished beam below the top ``size`` candidates is dropped
                continue
            logprob = float(total_BV[row, token])
            reported = None if logprobs_of is None else logprobs_of(row_offset + row, token)
            node = BeamToken(before[row].last_token, token, reported)
            if not ended:
                tokens.append(token)
            if not ended and not last:
                self.open.append(OpenBeam(node, logprob, constraint))
                children.append(BeamCandidate(row_offset + row, token))
            else:
                score = search.score(logprob, search.length)
                self.finished.append(FinishedBeam(node, search.length, score, logprob, ended))
                self.finished.sort(key=_by_score)
        del self.finished[self.size :]
        if self._is_done():
            self.open, children, tokens = [], [], []
        return children, tokens

    def _is_done(self) -> bool:
        """Whether no open beam can still improve the result, see ``BeamParams.early_stopping``."""
        params, search = self.search.params, self.search
        if len(self.finished) < self.size or not self.open:
            return False
        optimistic = params.early_stopping == "never" and params.length_penalty > 0
        best = max(beam.logprob for beam in self.open)
        longest = search.max_tokens if optimistic else search.length
        return params.early_stopping is True or search.score(best, longest) <= self.finished[-1].score


def logprobs(logits_BV: NDArray[np.float32]) -> Scores:
    """Log-softmax of logits [B, V] in float64. Raises SearchError for a row with a NaN, a +inf or no finite score.

    It works row by row, so that intermediate arrays stay in the CPU cache.
    """
    total_BV = np.empty(logits_BV.shape)
    weight_V = np.empty(logits_BV.shape[1])
    for row, (logits_V, total_V) in enumerate(zip(logits_BV, total_BV, strict=True)):
        top = float(logits_V.max())
        if not np.isfinite(top):
            try:
                check_scores(np.arange(len(logits_V)), logits_V)
            except RowError as error:
                raise SearchError(row, str(error)) from None
        np.subtract(logits_V, top, out=total_V, dtype=np.float64)
        total_V -= np.log(np.exp(total_V, out=weight_V).sum())
    return total_BV


def apply_masks(total_BV: Scores, masks_BW: NDArray[np.int32]) -> None:
    """Set masked tokens to -inf. Raises SearchError for a row in which no token is left."""
    bits_BV = np.unpackbits(masks_BW.view(np.uint8), axis=1, bitorder="little")[:, : total_BV.shape[1]]
    total_BV[bits_BV == 0] = -np.inf
    left_B = total_BV.max(axis=1) > -np.inf
    if not left_B.all():
        raise SearchError(int(left_B.argmin()), "every token that is allowed is at -inf")


def _ranked_candidates(total_BV: Scores, penalty: dict[int, float], count: int) -> Iterator[int]:
    """Indices into the flat array, highest score first; ties by beam, then by token id."""
    if penalty:
        total_BV = total_BV.copy()
        for token, less in penalty.items():
            total_BV[:, token] -= less
    total_N, done = total_BV.ravel(), 0
    while done < len(total_N):
        least = top_score_bound(total_N, count)
        near_N = np.flatnonzero(total_N >= least if least > -np.inf else total_N > -np.inf)
        order_N = near_N[np.argsort(-total_N[near_N], kind="stable")]
        yield from order_N[done:count].tolist()
        if len(order_N) < count:
            return
        done, count = count, 4 * count


def top_score_bound(total_N: Scores, count: int) -> float:
    """A lower bound that at least ``count`` scores reach, and not many more: the count-th highest of partial maxima."""
    parts = len(total_N) // BOUND_LANES
    if parts < count:
        return -np.inf
    highest = total_N[: parts * BOUND_LANES].reshape(BOUND_LANES, parts).max(axis=0)
    return float(np.partition(highest, parts - count)[parts - count])
