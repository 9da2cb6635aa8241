"""A cost model of drafts: the time that they add to a step, estimated from step times with and without drafts.

Having drafts adds a fixed time to a step (the draft method and verification), and each draft token adds more (mostly
in the forward pass).
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

BASELINE_INTERVAL, TRIAL_INTERVAL = 32, 6
"""After so many steps with drafts, one without drafts is made to measure it: where drafts pay, and until that is known.
"""

FIXED_COST_TOKENS = 20
"""Initial guess of the time of a step that does not depend on its tokens, in tokens."""

DECAY = 0.97
"""Factor on the weight of older steps with drafts."""

BASELINE_STEPS = 9
"""Number of recent steps without drafts whose median counts: a mean would follow those that other processes delayed."""

ADDED_TIME_DECAY = 0.9985
"""Factor on the measured cost per step without drafts: a bad measurement is forgotten slowly."""

SLOPE_PRIOR_WEIGHT = 0.001
"""Weight of the initial guess of the slope, as a variance of x."""

MAX_SLOWDOWN = 2.0
"""Cap on the time of a step, as a multiple of a step without drafts and per token: a longer one was delayed by other
processes.
"""


@dataclass
class StepCosts:
    """Estimates from recorded steps. The unit of time is a step without drafts of as many sequences.

    For steps with drafts, x is the expected and y the measured added time. A line is fitted through these; while all
    steps have about as many draft tokens, its slope is mostly the initial guess.
    """

    baseline: dict[int, float] = field(default_factory=dict)
    """Seconds of a step without drafts, by the number of sequences: the median of ``recent``."""
    recent: dict[int, deque[float]] = field(default_factory=dict)
    """Seconds of the last steps without drafts, by the number of sequences."""
    steps_since_baseline: int = 0  #: steps since the last one without drafts
    first_step_seen: bool = False  #: whether there was a step with drafts; the first one may load kernels: ignored
    weight: float = 1.0  #: of the steps with drafts; initially one with x = y = 0
    x: float = 0.0  #: moving averages of x, y, x * x and x * y
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def capped_seconds(self, sequences: int, computed: int, seconds: float) -> float:
        """The duration of a step, capped by MAX_SLOWDOWN."""
        baseline = self.baseline.get(sequences)
        return seconds if baseline is None else min(seconds, MAX_SLOWDOWN * baseline * computed / sequences)

    def nearest_baseline(self, sequences: int) -> float | None:
        """Seconds of a step of so many sequences without drafts, or of the nearest known number; None: not known."""
        if sequences in self.baseline or not self.baseline:
            return self.baseline.get(sequences)
        return self.baseline[min(self.baseline, key=lambda known: abs(known - sequences))]

    def record(self, sequences: int, computed: int, seconds: float, steps: int = 1) -> None:
        """Record a step: its sequences, computed tokens (drafts included) and duration (drafting included).

        steps: how many such steps it stands for.
        """
        baseline = self.baseline.get(sequences)
        if computed == sequences:
            recent = self.recent.setdefault(sequences, deque(maxlen=BASELINE_STEPS))
            recent.append(seconds)
            self.baseline[sequences] = statistics.median_low(recent)
            decay, self.steps_since_baseline = ADDED_TIME_DECAY**steps, 0
            self.y, self.xy = decay * self.y, decay * self.xy
        elif baseline is None:
            self.steps_since_baseline = BASELINE_INTERVAL
        else:
            self.steps_since_baseline += 1
            if self.first_step_seen:
                self._record_added((computed - sequences) / (sequences + FIXED_COST_TOKENS), seconds / baseline - 1)
            self.first_step_seen = True

    def _record_added(self, x: float, y: float) -> None:
        self.weight = DECAY * self.weight + 1
        step_weight = 1 / self.weight
        self.x += step_weight * (x - self.x)
        self.y += step_weight * (y - self.y)
        self.xx += step_weight * (x * x - self.xx)
        self.xy += step_weight * (x * y - self.xy)

    @property
    def _slope(self) -> float:
        covariance, variance = self.xy - self.x * self.y, self.xx - self.x * self.x
        return max(0.0, (covariance + SLOPE_PRIOR_WEIGHT) / (variance + SLOPE_PRIOR_WEIGHT))

    def token_cost(self, sequences: int) -> float:
        """The cost of one more draft token, in tokens that are generated in that time without drafts; at most 1."""
        return min(1.0, self._slope * sequences / (sequences + FIXED_COST_TOKENS))

    @property
    def fixed_cost(self) -> float:
        """The fixed cost of drafts per step, in tokens that a sequence generates in that time without drafts."""
        return max(0.0, self.y - self._slope * self.x)
