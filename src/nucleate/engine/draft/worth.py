"""Whether drafts save time at all: steps with them beside steps without. Knows numbers only.

That a step takes a time for each token is a guess which may hold on either side of a bend, but not across it: a product
of matrices may have one way for few rows and another for many. So steps without drafts are looked at, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

AFRESH = 64
"""Steps after which one without drafts is made, if there was none."""

PAUSE, LONGEST = 128, 1024
"""Steps in which no draft is read after drafts were found to cost time: at first, and found so again and again."""

TRIED = 4
"""Steps with drafts that are looked at before they are judged."""

KEPT, KEPT_PLAIN = 0.96, 0.8
"""What is left of the weight of a step after another one: with drafts, and without."""

DOUBT = 0.5
"""What a token may seem to cost too much, by the square root of the tokens that were looked at: luck, maybe."""


@dataclass
class Worth:
    """Told of each step; says for each whether drafts are made."""

    plain: dict[int, float] = field(default_factory=dict)
    """Seconds of a step without drafts, by the number of sequences."""
    spent: float = 0.0  #: time of steps with drafts, in seconds that a sequence has in one without
    said: float = 0.0  #: tokens that were written in them
    seen: float = 0.0  #: and would have been without drafts, in as many steps
    tried: int = 0  #: steps since drafts are made again
    since: int = 0  #: steps since one without drafts
    paused: int = 0  #: steps until drafts are made again
    pause: int = PAUSE

    def allows(self) -> bool:
        """Whether drafts are read in the step that begins."""
        return not self.paused and self.since < AFRESH

    def resume(self) -> None:
        """Drafts are not what they were: look at them again."""
        self.paused, self.pause = 0, PAUSE

    def stepped(self, sequences: int, read: int, written: int, seconds: float) -> None:
        """A step of so many sequences read so many tokens, those of drafts too, and wrote so many."""
        if read == sequences:
            self.paused = max(0, self.paused - 1)
            before = self.plain.get(sequences, seconds)
            self.plain[sequences] = before + (1 - KEPT_PLAIN) * (min(seconds, 2 * before) - before)
            self.since = 0
            return
        self.since += 1
        if sequences not in self.plain:
            self.since = AFRESH
            return
        spent = min(seconds * sequences / self.plain[sequences], 2.0 * written)
        self.spent = KEPT * self.spent + spent
        self.said = KEPT * self.said + written
        self.seen = KEPT * self.seen + sequences
        self.tried += 1
        if self.tried < TRIED:
            return
        if self.cost > 1 + DOUBT * self.seen**-0.5:
            self.paused, self.pause, self.tried = self.pause, min(LONGEST, 2 * self.pause), 0
            self.spent = self.said = self.seen = 0.0
        elif self.cost < 0.9:
            self.pause = PAUSE

    @property
    def cost(self) -> float:
        """Seconds of a token in steps with drafts, by those in steps without."""
        return self.spent / self.said if self.said else 1.0
