"""Whether drafts save time at all: steps with them beside steps without. Knows numbers only.

That a step takes a time for each token is a guess which may hold on either side of a bend, but not across it: a product
of matrices may have one way for few rows and another for many. So steps without drafts are looked at, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

AFRESH = 64
"""Steps after which one without drafts is made, if there was none."""

PAUSE, LONGEST = 64, 1024
"""Steps without drafts after they were found to cost time: at first, and after that was found again and again."""

TRIED = 8
"""Steps with drafts that are looked at before they are judged."""

KEPT = 0.8
"""What is left of the weight of a step after another one."""


@dataclass
class Worth:
    """Told of each step; says for each whether drafts are made."""

    plain: dict[int, float] = field(default_factory=dict)
    """Seconds of a step without drafts, by the number of sequences."""
    cost: float = 1.0  #: seconds of a token in steps with drafts, by those in steps without
    tried: int = 0  #: steps since drafts are made again
    since: int = 0  #: steps since one without drafts
    paused: int = 0  #: steps until drafts are made again
    pause: int = PAUSE

    def allows(self) -> bool:
        """Whether drafts are made in the step that begins."""
        if self.paused:
            self.paused -= 1
            return False
        return self.since < AFRESH

    def stepped(self, sequences: int, read: int, written: int, seconds: float) -> None:
        """A step of so many sequences read so many tokens, those of drafts too, and wrote so many."""
        if read == sequences:
            before = self.plain.get(sequences, seconds)
            self.plain[sequences] = before + (1 - KEPT) * (min(seconds, 2 * before) - before)
            self.since = 0
            return
        self.since += 1
        if sequences not in self.plain:
            self.since = AFRESH
            return
        ratio = seconds * sequences / (self.plain[sequences] * max(written, 1))
        self.cost = KEPT * self.cost + (1 - KEPT) * min(ratio, 2.0)
        self.tried += 1
        if self.tried < TRIED:
            return
        if self.cost > 1:
            self.paused, self.pause, self.tried = self.pause, min(LONGEST, 2 * self.pause), 0
            self.cost = 1.0
        elif self.cost < 0.9:
            self.pause = PAUSE
