"""A cost model of drafts: the time that they add to a step, estimated from step times with and without drafts.

Having drafts adds a fixed time to a step (the draft method and verification), and each draft token adds more (mostly
in the forward pass).
"""

from __future__ import annotations

from dataclasses import dataclass, field

AFRESH = 64
"""After so many steps with drafts, one without drafts is made to measure it."""

REST = 20
"""Initial guess of the time of a step that does not depend on its tokens, in tokens."""

KEPT, KEPT_PLAIN = 0.97, 0.8
"""Factors on the weight of older steps, with and without drafts."""

TRUST = 0.9993
"""Factor on the measured cost per step without drafts: a bad measurement is forgotten slowly."""

DOUBT = 0.001
"""Weight of the initial guess of the slope, as a variance of x."""

LATE = 2.0
"""Cap on the time of a step, as a multiple of a step without drafts and per token: a longer one was delayed by other
processes.
"""


@dataclass
class StepCosts:
    """Estimates from recorded steps. The unit of time is a step without drafts of as many sequences.

    For steps with drafts, x is the expected and y the measured added time. A line is fitted through these; while all
    steps have about as many draft tokens, its slope is mostly the initial guess.
    """

    plain: dict[int, float] = field(default_factory=dict)
    """Seconds of a step without drafts, by the number of sequences."""
    since: int = 0  #: steps since the last one without drafts
    tried: bool = False  #: whether there was a step with drafts; the first one is ignored, as it may load kernels
    weight: float = 1.0  #: of the steps with drafts; initially one with x = y = 0
    x: float = 0.0  #: moving averages of x, y, x * x and x * y
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def usual(self, sequences: int, computed: int, seconds: float) -> float:
        """The duration of a step, capped by LATE."""
        plain = self.plain.get(sequences)
        return seconds if plain is None else min(seconds, LATE * plain * computed / sequences)

    def record(self, sequences: int, computed: int, seconds: float) -> None:
        """Record a step: its sequences, computed tokens (drafts included) and duration (drafting included)."""
        plain = self.plain.get(sequences)
        if computed == sequences:
            before = seconds if plain is None else plain
            self.plain[sequences] = before + (1 - KEPT_PLAIN) * (seconds - before)
            self.y, self.xy, self.since = TRUST * self.y, TRUST * self.xy, 0
        elif plain is None:
            self.since = AFRESH
        else:
            self.since += 1
            if self.tried:
                self._added((computed - sequences) / (sequences + REST), seconds / plain - 1)
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
        """The cost of one more draft token, in tokens that are generated in that time without drafts; at most 1."""
        return min(1.0, self._slope * sequences / (sequences + REST))

    @property
    def fixed(self) -> float:
        """The fixed cost of drafts per step, in tokens that a sequence generates in that time without drafts."""
        return max(0.0, self.y - self._slope * self.x)
