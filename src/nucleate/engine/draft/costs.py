"""What a step of an engine takes, and one more token in it. Knows numbers only."""

from __future__ import annotations

from dataclasses import dataclass

DOUBT = 0.5
"""How much the guess weighs, as a spread of the tokens that steps read."""


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
        """A step read so many tokens, those of drafts too, and wrote so many, in this time, drafting included."""
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
        guess = self.seconds / (self.read + 20.0)
        slope = (self.together + DOUBT * guess) / (self.spread + DOUBT)
        slope = min(max(0.0, slope), self.seconds / self.read)  # a step of no tokens takes no less than no time
        return slope * self.written / self.seconds
