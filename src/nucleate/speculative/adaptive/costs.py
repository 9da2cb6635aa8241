"""What drafts cost: the time that they add to steps, beside that of steps without. Knows numbers only.

A draft adds so much to a step, and so much more with each drafted token. The first is what a proposer takes, and
verification; the second is what reading takes, mostly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

AFRESH = 64
"""Steps after which one without drafts is made, if there was none."""

REST = 20
"""Of the time of a step, what its tokens do not take, in tokens: the guess."""

KEPT, KEPT_PLAIN = 0.97, 0.8
"""What is left of the weight of a step after another one: with drafts, and without."""

TRUST = 0.9993
"""What is left, after a step without drafts, of what they were seen to add: it may have been bad luck."""

DOUBT = 0.001
"""How much the guess weighs, as a spread of what steps with drafts were expected to add."""

LATE = 2.0
"""How many times a step without drafts one may seem to take, for each token that it reads in place of one: a step that
takes longer was held up by others.
"""


@dataclass
class StepCosts:
    """Told of each step. Time is counted in steps without drafts of as many sequences.

    Of steps with drafts, x is what their tokens are expected to add, y what they have added. The slope is that of a
    line through these; as long as all have about as many tokens, it is a guess.
    """

    plain: dict[int, float] = field(default_factory=dict)
    """Seconds of a step without drafts, by the number of sequences."""
    since: int = 0  #: steps since one without drafts
    tried: bool = False  #: whether there were drafts at all: the first ones have kernels compiled, or loaded
    weight: float = 1.0  #: of steps with drafts; at first, one that added nothing for nothing
    x: float = 0.0  #: the mean of what was told last, recent numbers count most, as of the next three
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def usual(self, sequences: int, read: int, seconds: float) -> float:
        """What a step took that read so many tokens, if it was not held up."""
        plain = self.plain.get(sequences)
        return seconds if plain is None else min(seconds, LATE * plain * read / sequences)

    def stepped(self, sequences: int, read: int, seconds: float) -> None:
        """A step of so many sequences read so many tokens, those of drafts too, in this time, drafting included."""
        plain = self.plain.get(sequences)
        if read == sequences:
            before = seconds if plain is None else plain
            self.plain[sequences] = before + (1 - KEPT_PLAIN) * (seconds - before)
            self.y, self.xy, self.since = TRUST * self.y, TRUST * self.xy, 0
        elif plain is None:
            self.since = AFRESH
        else:
            self.since += 1
            if self.tried:
                self._added((read - sequences) / (sequences + REST), seconds / plain - 1)
            self.tried = True

    def _added(self, x: float, y: float) -> None:
        self.weight = KEPT * self.weight + 1
        share = 1 / self.weight
        self.x += share * (x - self.x)
        self.y += share * (y - self.y)
        self.xx += share * (x * x - self.xx)
        self.xy += share * (x * y - self.xy)

    @property
    def _slope(self) -> float:
        return max(0.0, (self.xy - self.x * self.y + DOUBT) / (self.xx - self.x * self.x + DOUBT))

    def price(self, sequences: int) -> float:
        """How many tokens are written without drafts in the time that one more drafted token takes; at most one."""
        return min(1.0, self._slope * sequences / (sequences + REST))

    @property
    def fixed(self) -> float:
        """And how many a sequence writes in the time that drafts take in a step, however many tokens they have."""
        return max(0.0, self.y - self._slope * self.x)
