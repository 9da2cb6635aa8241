"""How many tokens to draft: as many as save time. From what was kept, and how long steps took; knows no other reason.

A drafted token is worth the chance that it is kept; it costs the time to draft and to read it. It pays if that chance
is higher than the number of tokens that the engine writes in that time as it is: then the rate of all is as high as it
can be (Dinkelbach, On nonlinear fractional programming, 1967).

Where drafts do not pay, or it is not known whether they do, they are made quietly: nobody reads them, and they are
compared with the tokens that come. That takes the time of the proposer only, and of all time a small part.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from nucleate.speculative.adaptive.acceptance_rate import AcceptanceRates, AcceptedCounts
from nucleate.speculative.adaptive.costs import AFRESH, StepCosts
from nucleate.speculative.draft import NO_DRAFT, Draft, DraftContext, Proposer, TargetOutput
from nucleate.speculative.tree import truncate

QUIET = 0.005
"""The part of the time that drafts may take which nobody reads."""

QUIET_TOKENS = 4
"""Of such a draft, at most."""

SAVED, OWED = 8, 1000
"""Steps for which time that such drafts did not need is kept for them, and time that they took beyond that is owed."""

AHEAD = 32
"""How many steps before such a draft a proposer that reads hidden states begins to read them: that takes time, too."""

WIDTH_SHARE = 0.1
"""What one tree has of the average of how wide they are."""

ROUNDS = 3
"""In which the number of drafted tokens and the rate that comes of it are brought together."""

MARGIN = 1.15, 0.01
"""What a token must bring: so many times its price, and so much more, as prices are estimates."""


class _Asked(NamedTuple):
    """A draft that is asked for."""

    place: int  #: of its sequence
    tokens: int  #: that the proposer is to make
    chances: AcceptanceRates
    length: int  #: how many of them, or how deep a tree of them, are to be read
    aloud: bool  #: whether it costs nothing of the time for quiet drafts


class AdaptiveProposer(Proposer):
    """Another proposer's drafts, as long as they pay.

    The engine tells with ``end_step`` of every step that reads no prompt, and with ``accepted`` of every draft.

    trees: drafts have branches. They are made as large as they may be, and cut to the depth that pays: at each depth
    one token is kept at most, at the price of as many as there are at a depth on average.
    """

    def __init__(self, proposer: Proposer, *, trees: bool = False) -> None:
        self.costs, self.layers = StepCosts(), proposer.layers
        self._proposer, self._trees, self._width = proposer, trees, 1.0
        self._chances: dict[int, AcceptanceRates] = {}
        self._all = AcceptedCounts(0.95)
        self._newcomer = AcceptanceRates(self._all)
        self._seconds = 0.0  # for quiet drafts
        self._step = 0.0  # seconds of the last step
        self._ahead = AHEAD if proposer.layers else 0
        self._reading = self._ahead  # steps since hidden states are read again, for a quiet draft,
        self._spent = 0.0  # and seconds that it took
        self._reach = 1  # how many tokens were drafted at most, twice: what more of them cost is not known yet
        self._drafting = 1  # how many sequences had a draft to be read, last time

    def active(self) -> bool:
        """Whether ``propose`` would ask for any draft, as far as is known before the sequences are."""
        return self._due or (self._drafting > 0 and self.costs.since < AFRESH)

    @property
    def _due(self) -> bool:
        """Whether there is time for quiet drafts."""
        return self._seconds >= 0 and self._reading >= self._ahead

    def propose(self, states: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``."""
        begin = perf_counter()
        if self.costs.since >= AFRESH:  # a step without drafts, to see what it takes
            return [NO_DRAFT] * len(states)
        asked = self._asked(states, counts)
        drafts = [NO_DRAFT] * len(states)
        if asked:
            made = self._proposer.propose([states[one.place] for one in asked], [one.tokens for one in asked])
            for one, draft in zip(asked, made, strict=True):
                drafts[one.place] = self._said(one, states[one.place], draft)
        self._drafting = sum(map(bool, drafts))
        quiet = 1 - sum([one.aloud for one in asked]) / max(len(states), 1)
        self._seconds -= (perf_counter() - begin) * quiet
        if asked:
            self._seconds, self._spent = self._seconds - self._spent, 0.0
        if self._seconds < 0:
            self._reading = 0
        return drafts

    def _asked(self, states: Sequence[DraftContext], counts: Sequence[int]) -> list[_Asked]:
        """The drafts to ask for: those that pay, and quiet ones, if there is time for them."""
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
        asked = []
        for (place, count, chances), length in zip(found, lengths, strict=True):
            aloud = length > 0 and not chances.silent
            if aloud or (due and not chances.quiet):
                wanted = count if self._trees else length
                asked.append(_Asked(place, wanted if length else min(count, QUIET_TOKENS), chances, length, aloud))
        return asked

    def _lengths(self, found: Sequence[tuple[AcceptanceRates, int]], sequences: int) -> list[int]:
        """How many tokens each is to have, of so many at most: those with which most are written per second, together.

        At the rate without drafts, at first, where they must bring more than their price; and then at that of what was
        found, as time is worth more then.
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

    def _said(self, asked: _Asked, state: DraftContext, draft: Draft) -> Draft:
        """A draft, if it is to be read."""
        chances, length = asked.chances, asked.length
        chances.silent = not draft
        if self._trees and length and draft:
            self._width += WIDTH_SHARE * (len(draft) / draft.depth - self._width)
            draft = truncate(draft, len(draft), length, len(draft))
        if not length and draft.distributions is not None:  # only its distribution says what would be kept
            length, draft = 1, draft.prefix(1)
            self._seconds -= (self.costs.price(1) + self.costs.fixed) * self._step
        if length or not draft:
            chances.drafted = draft.depth
            self._reach = max(self._reach, 2 * draft.depth)
            return draft
        chances.quiet, chances.start, chances.drafted = draft, len(state.token_ids), 0
        self._proposer.accepted(state.key, 0)
        return NO_DRAFT

    def resting(self, *, joining: bool = False) -> bool:
        """Whether no draft comes soon, so that nobody need tell what the target's layers gave.

        joining: a sequence begins, of which nothing is known but what others were told.
        """
        price = MARGIN[0] * self.costs.price(1) * self._width + MARGIN[1]
        pays = joining and self._newcomer.length(QUIET_TOKENS, price, self.costs.fixed)[0] > 0
        return self._seconds < 0 and not self._drafting and not pays

    def joined(self) -> None:
        """A sequence begins: it is worth asking for drafts, if it was not."""
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
            chances.told(chances.drafted, count)
            chances.drafted = 0
            self._proposer.accepted(key, count)

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``."""
        self._chances.pop(key, None)
        self._proposer.forget(key, output_ids)

    def end_step(self, sequences: int, read: int, seconds: float) -> None:
        """A step of so many sequences read so many tokens, those of drafts too, in this time, drafting included.

        One that did not read all of them, as the model failed, says nothing of what steps take.
        """
        if read < max(sequences, 1):
            return
        self._step = self.costs.usual(sequences, read, seconds)
        more = QUIET * self._step
        self._seconds = max(-OWED * more, min(self._seconds + more, SAVED * more))
        self.costs.stepped(sequences, read, self._step)
