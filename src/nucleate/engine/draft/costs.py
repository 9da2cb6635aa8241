"""What drafts cost: time, in tokens that are written in it. Knows numbers only.

A step without drafts takes some time; drafts add so much to it, and so much more for each drafted token. The first is
what a proposer takes, and verification; the second is what reading takes, mostly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DECAY = 0.98
"""What is left of the weight of a number after another one."""

DOUBT = 0.5
"""How much the guess weighs, as a spread of the tokens that were drafted in steps."""

TRUST = 0.998
"""What is left, after a step without drafts, of the time that they were seen to add: it may have been bad luck."""

FAR = 2.0
"""How many times what is expected a step with drafts may seem to add, beyond a step."""

UNKNOWN = 0.3
"""The price of a token as long as nothing is known."""


@dataclass
class Mean:
    """The mean of what was told last, recent numbers count most."""

    decay: float = DECAY
    weight: float = 0.0
    value: float = 0.0

    def add(self, number: float) -> None:
        """One more."""
        self.weight = self.decay * self.weight + 1.0
        self.value += (number - self.value) / self.weight


@dataclass
class Costs:
    """Told of each step. The slope is that of a line through steps with drafts; as long as all of them have about as
    many drafted tokens, it is a guess."""

    read: float = 0.0  #: tokens, in a step: the mean of what was told last, as of the next two
    written: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0
    drafted: Mean = field(default_factory=Mean)  #: tokens, in a step that has any
    more: Mean = field(default_factory=Mean)  #: seconds of these, beyond those of a step without
    spread: Mean = field(default_factory=Mean)  #: of what was drafted: its squared distance to the mean
    together: Mean = field(default_factory=Mean)  #: the same of what was drafted and of the seconds

    def stepped(self, read: int, written: int, seconds: float) -> None:
        """A step read so many tokens, those of drafts too, and wrote so many, in this time, drafting included."""
        self.weight = DECAY * self.weight + 1.0
        share = 1.0 / self.weight
        self.read += share * (read - self.read)
        self.written += share * (written - self.written)
        self.seconds += share * (seconds - self.seconds)

    def rested(self) -> None:
        """A step had no drafts."""
        self.more.value *= TRUST
        self.together.value *= TRUST

    def added(self, drafted: int, seconds: float) -> None:
        """A step with so many drafted tokens took so much more than one without."""
        late = self.seconds
        if not self.drafted.weight:  # no more for none, as long as too little is known to say what is fixed
            for mean in (self.drafted, self.more, self.spread, self.together):
                mean.add(0.0)
            late = 0.0  # the first one has had kernels compiled, or loaded
        # a step that takes far longer than expected was held up by others
        seconds = min(seconds, late + FAR * (self.having + self.slope * drafted))
        before = drafted - self.drafted.value, seconds - self.more.value
        self.drafted.add(drafted)
        self.more.add(seconds)
        self.spread.add(before[0] * (drafted - self.drafted.value))
        self.together.add(before[1] * (drafted - self.drafted.value))

    @property
    def slope(self) -> float:
        """Seconds of one more drafted token; never more than one costs that is written."""
        if self.seconds <= 0:
            return 0.0
        guess = self.seconds / (self.read + 20.0)
        slope = (self.together.value + DOUBT * guess) / (self.spread.value + DOUBT)
        return min(max(0.0, slope), self.seconds / self.read)

    @property
    def token(self) -> float:
        """Seconds in which one token is written."""
        return self.seconds / max(self.written, 1.0)

    @property
    def price(self) -> float:
        """How many tokens are written in the time that one more drafted token takes."""
        return UNKNOWN if self.seconds <= 0 else self.slope * self.written / self.seconds

    @property
    def fixed(self) -> float:
        """And in the time that drafts take in a step, however many tokens they have."""
        if self.seconds <= 0:
            return 0.0
        return self.having * self.written / self.seconds

    @property
    def having(self) -> float:
        """The same in seconds."""
        return max(0.0, self.more.value - self.slope * self.drafted.value)
