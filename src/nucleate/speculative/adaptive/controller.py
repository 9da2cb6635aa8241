"""Adaptive speculation length: drafts as many tokens as save time, from measured acceptance rates and step times.

A draft token is worth the probability that it is accepted, and costs the time to draft and verify it. It pays if that
probability is higher than the number of tokens that the engine generates in that time anyway: this maximizes throughput
(Dinkelbach, On nonlinear fractional programming, 1967).

Where drafts do not pay, or where that is unknown, *shadow drafts* are made now and then: they are not verified, but
compared with the tokens that come. They cost only the time of the draft method, which is limited to a small share.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from nucleate.speculative.adaptive.acceptance_rate import AcceptanceRates, AcceptedCounts
from nucleate.speculative.adaptive.costs import AFRESH, StepCosts
from nucleate.speculative.draft import NO_DRAFT, Draft, DraftContext, Proposer, TargetOutput
from nucleate.speculative.tree import truncate

SHADOW_SHARE = 0.005
"""The share of the time that shadow drafts may take."""

SHADOW_TOKENS = 4
"""The most tokens of a shadow draft."""

SAVED, OWED = 8, 1000
"""Steps for which unused time for shadow drafts is saved, and for which overspent time is owed."""

AHEAD = 32
"""Steps before a shadow draft from which on a proposer receives hidden states again, which takes time, too."""

WIDTH_SHARE = 0.1
"""Weight of one tree in the moving average of the width of trees."""

ROUNDS = 3
"""Iterations of the fixed point between draft lengths and throughput."""

MARGIN = 1.15, 0.01
"""Safety margin: a token must bring so many times its price, and so much more, as prices are estimates."""


class _DraftRequest(NamedTuple):
    """A draft to ask the proposer for."""

    place: int  #: index of its sequence
    tokens: int  #: number of tokens to draft
    chances: AcceptanceRates
    length: int  #: how many of them to verify; of a tree, its depth; 0 for a shadow draft
    charged: bool  #: whether it counts against the time for shadow drafts


class AdaptiveProposer(Proposer):
    """Wraps a proposer, and drafts only as many tokens as pay.

    The engine reports every step without prompts (``end_step``) and every verified draft (``accepted``).

    trees: whether drafts are trees. They are drafted at full size and truncated to the depth that pays: at each depth
    at most one token is accepted, at the price of the average number of tokens per depth.
    """

    def __init__(self, proposer: Proposer, *, trees: bool = False) -> None:
        self.costs, self.layers = StepCosts(), proposer.layers
        self._proposer, self._trees, self._width = proposer, trees, 1.0
        self._chances: dict[int, AcceptanceRates] = {}
        self._all = AcceptedCounts(0.95)
        self._newcomer = AcceptanceRates(self._all)
        self._seconds = 0.0  # left for shadow drafts
        self._step = 0.0  # duration of the last step
        self._ahead = AHEAD if proposer.layers else 0
        self._reading = self._ahead  # steps since hidden states are received again, for a shadow draft,
        self._spent = 0.0  # and seconds that this took
        self._reach = 1  # twice the longest draft so far: the cost of longer ones is unknown
        self._drafting = 1  # how many sequences had a draft to verify in the last step

    def active(self) -> bool:
        """Whether ``propose`` may ask for any draft, as far as that is known without the sequences."""
        return self._due or (self._drafting > 0 and self.costs.since < AFRESH)

    @property
    def _due(self) -> bool:
        """Whether there is time for shadow drafts."""
        return self._seconds >= 0 and self._reading >= self._ahead

    def propose(self, states: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``."""
        begin = perf_counter()
        if self.costs.since >= AFRESH:  # a step without drafts, to measure it
            return [NO_DRAFT] * len(states)
        requests = self._requests(states, counts)
        drafts = [NO_DRAFT] * len(states)
        if requests:
            made = self._proposer.propose([states[one.place] for one in requests], [one.tokens for one in requests])
            for one, draft in zip(requests, made, strict=True):
                drafts[one.place] = self._accept_or_shadow(one, states[one.place], draft)
        self._drafting = sum(map(bool, drafts))
        share = 1 - sum([not one.charged for one in requests]) / max(len(states), 1)
        self._seconds -= (perf_counter() - begin) * share
        if requests:
            self._seconds, self._spent = self._seconds - self._spent, 0.0
        if self._seconds < 0:
            self._reading = 0
        return drafts

    def _requests(self, states: Sequence[DraftContext], counts: Sequence[int]) -> list[_DraftRequest]:
        """The drafts to ask for: those that pay, and shadow drafts, if there is time for them."""
        due, found = self._due, []
        for place, (state, count) in enumerate(zip(states, counts, strict=True)):
            if count < 1:
                continue
            chances = self._chances.get(state.key)
            if chances is None:
                chances = self._chances[state.key] = AcceptanceRates(self._all)
            chances.compare(state.token_ids)
            found.append((place, count, chances))
        lengths = self._lengths([(chances, count) for _, count, chances in found], len(states))
        requests = []
        for (place, count, chances), length in zip(found, lengths, strict=True):
            verify = length > 0 and not chances.silent
            if verify or (due and not chances.shadow):
                wanted = (count if self._trees else length) if length else min(count, SHADOW_TOKENS)
                requests.append(_DraftRequest(place, wanted, chances, length, charged=not verify))
        return requests

    def _lengths(self, found: Sequence[tuple[AcceptanceRates, int]], sequences: int) -> list[int]:
        """The draft lengths that maximize the joint throughput, up to the given maxima.

        The first iteration uses the throughput without drafts and requires a margin; later ones that of the result.
        """
        price, fixed = self.costs.price(sequences) * self._width, self.costs.fixed
        rate, (times, more) = 1.0, MARGIN
        lengths = [0] * len(found)
        for _ in range(ROUNDS):
            worth = times * rate
            pays = [each.length(min(most, self._reach), worth * price + more, worth * fixed) for each, most in found]
            if not any(count for count, _ in pays):
                break
            lengths, times, more = [count for count, _ in pays], 1.0, 0.0
            written = sequences + sum([gain for _, gain in pays])
            rate = max(rate, written / (sequences * (1 + fixed) + price * sum(lengths)))
        return lengths

    def _accept_or_shadow(self, request: _DraftRequest, state: DraftContext, draft: Draft) -> Draft:
        """The draft to verify; none if it becomes a shadow draft."""
        chances, length = request.chances, request.length
        chances.silent = not draft
        if self._trees and length and draft:
            self._width += WIDTH_SHARE * (len(draft) / draft.depth - self._width)
            draft = truncate(draft, len(draft), length, len(draft))
        if not length and draft.distributions is not None:  # only verification tells what would be accepted
            length, draft = 1, draft.prefix(1)
            self._seconds -= (self.costs.price(1) + self.costs.fixed) * self._step
        if length or not draft:
            chances.drafted = draft.depth
            self._reach = max(self._reach, 2 * draft.depth)
            return draft
        chances.shadow, chances.start, chances.drafted = draft, len(state.token_ids), 0
        self._proposer.accepted(state.key, 0)
        return NO_DRAFT

    def resting(self, *, joining: bool = False) -> bool:
        """Whether no draft is expected soon, so that hidden states are not needed.

        joining: whether a new sequence starts, of which only the shared acceptance rates are known.
        """
        price = MARGIN[0] * self.costs.price(1) * self._width + MARGIN[1]
        pays = joining and self._newcomer.length(SHADOW_TOKENS, price, self.costs.fixed)[0] > 0
        return self._seconds < 0 and not self._drafting and not pays

    def joined(self) -> None:
        """A sequence starts: ask for drafts again."""
        self._drafting = max(1, self._drafting)

    def read(self, readings: Sequence[TargetOutput]) -> None:
        """See ``Proposer.read``."""
        begin = perf_counter()
        self._proposer.read(readings)
        self._reading += 1
        if not self._drafting:
            self._spent += perf_counter() - begin

    def accepted(self, key: int, count: int) -> None:
        """See ``Proposer.accepted``."""
        chances = self._chances.get(key)
        if chances is not None and chances.drafted:
            chances.record(chances.drafted, count)
            chances.drafted = 0
            self._proposer.accepted(key, count)

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``."""
        self._chances.pop(key, None)
        self._proposer.forget(key, output_ids)

    def end_step(self, sequences: int, computed: int, seconds: float) -> None:
        """Record a step: its sequences, computed tokens (drafts included) and duration (drafting included).

        A step in which the model failed for some sequences is ignored.
        """
        if computed < max(sequences, 1):
            return
        self._step = self.costs.usual(sequences, computed, seconds)
        more = SHADOW_SHARE * self._step
        self._seconds = max(-OWED * more, min(self._seconds + more, SAVED * more))
        self.costs.record(sequences, computed, self._step)
