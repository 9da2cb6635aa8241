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

from nucleate.engine.draft.chances import NONE, Chances, Kept
from nucleate.engine.draft.costs import Costs
from nucleate.engine.draft.draft import Draft, Proposer, Read, State
from nucleate.engine.draft.tree import narrow
from nucleate.engine.draft.worth import Worth

QUIET = 0.01
"""The part of the time that drafts may take which nobody reads."""

QUIET_TOKENS = 4
"""Of such a draft, at most."""

SAVED, OWED = 8, 1000
"""Steps for which time that such drafts did not need is kept for them, and time that they took beyond that is owed."""

WIDTH_SHARE = 0.1
"""What one tree has of the average of how wide they are."""

MARGIN = 1.15, 0.01
"""What a token must bring: so many times its price, and so much more, as prices are estimates."""


class AdaptiveProposer:
    """Another proposer's drafts, as long as they pay.

    The engine tells with ``stepped`` of every step that reads no prompt, and with ``accepted`` of every draft.

    trees: drafts have branches. They are made as large as they may be, and cut to the depth that pays: at each depth
    one token is kept at most, at the price of as many as there are at a depth on average.
    """

    def __init__(self, proposer: Proposer, *, trees: bool = False) -> None:
        self.costs, self.worth = Costs(), Worth()
        self._proposer, self._trees, self._width = proposer, trees, 1.0
        self._chances: dict[int, Chances] = {}
        self._all = Kept()
        self._seconds = 0.0  # for quiet drafts
        self._poor = 1.0  # the chance of the first token of a draft when drafts were found to cost time
        self._reach = 1  # how many tokens were drafted at most, twice: what more of them cost is not known yet
        self._drafting = 1  # how many sequences had a draft to be read, last time

    @property
    def layers(self) -> tuple[int, ...]:
        """See ``Proposer.layers``."""
        return self._proposer.layers

    def asks(self) -> bool:
        """Whether ``propose`` would ask for any draft, as far as is known before the sequences are."""
        return self._seconds >= 0 or (self._drafting > 0 and self.worth.allows())

    def propose(self, states: Sequence[State], counts: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``."""
        begin, price = perf_counter(), self._wanted
        fixed = MARGIN[0] * self.costs.fixed / max(len(states), 1)  # all of them share it
        if self.worth.paused and 2 * self._all.rate(0, 0.0, 0.5) > 1 + self._poor:
            self.worth.resume()
        allowed = self.worth.allows()
        if not allowed and not self.worth.paused:  # a step without drafts, to see what it takes
            return [NONE] * len(states)
        asked: list[tuple[int, Chances, int]] = []
        lengths: list[int] = []
        paid = 0  # that cost nothing of the time for quiet drafts: those to be read, and the first, which read a prompt
        for place, (state, count) in enumerate(zip(states, counts, strict=True)):
            if count < 1:
                continue
            chances = self._chances.get(state.key)
            new = chances is None
            if chances is None:
                chances = self._chances[state.key] = Chances(self._all)
            chances.compare(state.token_ids)
            length = min(chances.length(count, price, fixed), self._reach) if allowed else 0
            aloud = length > 0 and not chances.silent
            if aloud or new or (self._seconds >= 0 and not chances.quiet):
                asked.append((place, chances, length))
                wanted = count if self._trees else length
                lengths.append(wanted if length else min(count, QUIET_TOKENS))
                paid += aloud or new
        drafts = [NONE] * len(states)
        if asked:
            made = self._proposer.propose([states[place] for place, _, _ in asked], lengths)
            for (place, chances, length), draft in zip(asked, made, strict=True):
                drafts[place] = self._said(chances, states[place], length, draft, allowed=allowed)
        self._drafting = sum(map(bool, drafts))
        self._seconds -= (perf_counter() - begin) * (1 - paid / max(len(states), 1))
        return drafts

    def _said(self, chances: Chances, state: State, length: int, draft: Draft, *, allowed: bool) -> Draft:
        """A draft, if it is to be read."""
        chances.silent = not draft
        if self._trees and length and draft:
            self._width += WIDTH_SHARE * (len(draft) / draft.depth - self._width)
            draft = narrow(draft, len(draft), length, len(draft))
        if not length and allowed and draft.laws is not None:  # only its law says what would be kept
            length, draft = 1, draft.cut(1)
            self._seconds -= (self._wanted + self.costs.fixed) * self.costs.token
        if length or not draft:
            chances.drafted = draft.depth
            self._reach = max(self._reach, 2 * draft.depth)
            return draft
        chances.quiet, chances.start, chances.drafted = draft, len(state.token_ids), 0
        self._proposer.accepted(state.key, 0)
        return NONE

    def read(self, readings: Sequence[Read]) -> None:
        """See ``Proposer.read``."""
        self._proposer.read(readings)

    @property
    def _wanted(self) -> float:
        return (MARGIN[0] * self.costs.price + MARGIN[1]) * self._width

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

    def stepped(self, read: int, written: int, seconds: float, sequences: int = 0) -> None:
        """A step read so many tokens, those of drafts too, and wrote so many, in this time, drafting included.

        sequences: how many there were; if it is told, drafts that cost more time than they save are found out.
        """
        more = QUIET * seconds
        self._seconds = max(-OWED * more, min(self._seconds + more, SAVED * more))
        self.costs.stepped(read, written, seconds)
        if sequences:
            if read == sequences:
                self.costs.rested()
            elif sequences in self.worth.plain:
                self.costs.added(read - sequences, seconds - self.worth.plain[sequences])
            paused = self.worth.paused
            self.worth.stepped(sequences, read, written, seconds)
            if self.worth.paused > paused:
                self._poor = self._all.rate(0, 0.0, 0.5)
