"""How many tokens to draft: as many as save time. From what was kept, and how long steps took; knows no other reason.

A drafted token is worth the chance that it is kept; it costs the time to draft and to read it. It pays if that chance
is higher than the number of tokens that the engine writes in that time as it is: then the rate of all is as high as it
can be (Dinkelbach, On nonlinear fractional programming, 1967).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nucleate.engine.draft.draft import Draft, Proposer, Read, State
from nucleate.engine.draft.worth import Worth

TRIALS = 0.01
"""The part of its tokens that a sequence may lose by drafts that were only tried."""

LONGEST_PAUSE = 100
"""Steps without a draft, before one is tried."""

MARGIN = 1.15, 0.01
"""What a token must bring: so many times its price, and so much more, as prices are estimates."""

REST, SILENCE = 16, 8
"""Steps for which nobody needs to ask, at most: where drafts do not pay, and where nothing suggests itself."""


class AdaptiveProposer:
    """Another proposer's drafts, as long as they pay, and none where they do not; then one is tried now and then.

    The engine tells with ``stepped`` of every step that reads no prompt, and with ``accepted`` of every draft.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.costs, self.worth = Costs(), Worth()
        self._proposer = proposer
        self._chances: dict[int, Chances] = {}
        self._all = Kept()

    @property
    def layers(self) -> tuple[int, ...]:
        """See ``Proposer.layers``."""
        return self._proposer.layers

    def propose(self, states: Sequence[State], counts: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``. Who gets no draft is not asked for: those that do get theirs at once."""
        drafts, price = [Draft()] * len(states), self._wanted
        if not self.worth.allows():
            return drafts
        known = [self._known(state.key) for state in states]
        lengths = [chances.length(count, price) for chances, count in zip(known, counts, strict=True)]
        asked = [place for place, length in enumerate(lengths) if length]
        if asked:
            made = self._proposer.propose([states[place] for place in asked], [lengths[place] for place in asked])
            for place, draft in zip(asked, made, strict=True):
                drafts[place] = draft
        for chances, draft, length in zip(known, drafts, lengths, strict=True):
            chances.drafted = len(draft)
            chances.silent = chances.silent + 1 if length and not draft else 0
        return drafts

    def rest(self, key: int) -> int:
        """For how many steps a sequence that got no draft need not be asked for again. They count as if it had been."""
        chances = self._chances.get(key)
        return 0 if chances is None else chances.rest()

    def read(self, readings: Sequence[Read]) -> None:
        """See ``Proposer.read``."""
        self._proposer.read(readings)

    @property
    def _wanted(self) -> float:
        return MARGIN[0] * self.costs.price + MARGIN[1]

    def _known(self, key: int) -> Chances:
        chances = self._chances.get(key)
        if chances is None:
            chances = self._chances[key] = Chances(self._all)
        return chances

    def accepted(self, key: int, count: int) -> None:
        """See ``Proposer.accepted``."""
        chances = self._chances.get(key)
        if chances is not None and chances.drafted:
            self._all.add(chances.drafted, count)
            chances.told(count, self._wanted)
            self._proposer.accepted(key, count)

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``."""
        self._chances.pop(key, None)
        self._proposer.forget(key, output_ids)

    def stepped(self, read: int, written: int, seconds: float, sequences: int = 0) -> None:
        """A step read so many tokens, those of drafts too, and wrote so many, in this time, drafting included.

        sequences: how many there were; if it is told, drafts that cost more time than they save are found out.
        """
        self.costs.stepped(read, written, seconds)
        if sequences:
            self.worth.stepped(sequences, read, written, seconds)


@dataclass
class Costs:
    """What time a step takes: so much, and so much more for each token that it reads. Recent steps count most.

    The slope is that of a line through them; as long as all of them read about as many tokens, it is a guess.
    """

    decay: float = 0.98
    weight: float = 0.0
    read: float = 0.0  #: means of the steps
    written: float = 0.0
    seconds: float = 0.0
    spread: float = 0.0  #: of what was read: the mean of its squared distance to the mean
    together: float = 0.0  #: the same of what was read and of the seconds

    def stepped(self, read: int, written: int, seconds: float) -> None:
        """See ``AdaptiveProposer.stepped``."""
        self.weight = self.decay * self.weight + 1.0
        part = 1.0 / self.weight
        more_read, more_seconds = read - self.read, seconds - self.seconds
        self.read += part * more_read
        self.written += part * (written - self.written)
        self.seconds += part * more_seconds
        self.spread += part * (more_read * (read - self.read) - self.spread)
        self.together += part * (more_read * (seconds - self.seconds) - self.together)

    @property
    def price(self) -> float:
        """How many tokens are written in the time that one more token takes: the chance at which it pays."""
        if self.seconds <= 0:
            return 0.3  # nothing is known yet
        guess, doubt = self.seconds / (self.read + 20.0), 0.03
        slope = max(0.0, (self.together + doubt * guess) / (self.spread + doubt))
        return slope * self.written / self.seconds


@dataclass
class Kept:
    """How often a drafted token was kept after those before it were, by its place in the draft."""

    decay: float = 0.9
    tried: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)

    def add(self, drafted: int, kept: int) -> None:
        """Of a draft of so many tokens the first ones were kept."""
        for place in range(min(drafted, kept + 1)):  # nothing is known of what comes after one that was not
            if place == len(self.tried):
                self.tried.append(0.0)
                self.kept.append(0.0)
            self.tried[place] = self.decay * self.tried[place] + 1.0
            self.kept[place] = self.decay * self.kept[place] + (place < kept)

    def rate(self, place: int, prior: float, weight: float) -> float:
        """The chance at a place, where ``weight`` tries are as if they had gone as the prior says."""
        tried, kept = (0.0, 0.0) if place >= len(self.tried) else (self.tried[place], self.kept[place])
        return (kept + weight * prior) / (tried + weight)


class Chances:
    """What is known of the drafts of one sequence, and whether to go on with them."""

    def __init__(self, everyone: Kept) -> None:
        self.drafted = 0  # tokens of the draft that is being verified
        self.silent = 0  # times in a row that there was none, though it was worth one
        self._own, self._all = Kept(), everyone
        self._lost = 0.0  # tokens that would have been written in the time of drafts that failed

    def length(self, most: int, price: float) -> int:
        """How many tokens are worth their price; one, to try, where none is and enough time has gone by."""
        count, chance, rate = 0, 1.0, 0.5
        for place in range(most):
            rate = self._own.rate(place, self._all.rate(place, rate, 2.0), 2.0)
            chance *= rate
            if chance <= price:
                break
            count += 1
        if count or most < 1:
            return count
        self._lost -= TRIALS
        return 1 if self._lost <= 0 else 0

    def rest(self) -> int:
        """Steps until the next trial, if there is time until then; and a few, where nothing has suggested itself."""
        if self.silent:
            return min(SILENCE, self.silent // 2)
        steps = min(REST, max(0, int(self._lost / TRIALS) - 1))
        self._lost -= TRIALS * steps
        return steps

    def told(self, kept: int, price: float) -> None:
        """Of the draft so many tokens were kept."""
        self._own.add(self.drafted, kept)
        lost = max(0.0, self._lost) + price * self.drafted - kept
        self._lost = min(max(0.0, lost), TRIALS * LONGEST_PAUSE)
        self.drafted = 0
