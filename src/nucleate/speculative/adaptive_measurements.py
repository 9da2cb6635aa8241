"""What adaptive speculation measures: acceptance rates, the time that drafts cost, and what they have lost or may take.

Having drafts adds a fixed time to a step (the draft method and verification), and each draft token adds more (mostly
in the forward pass). Both are estimated from step times with and without drafts. Whatever is predicted, the loss limit
compares steps with drafts with the steps without drafts around them.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from nucleate.speculative.draft import NO_DRAFT, ROOT, Draft

PRIOR_WEIGHT = 2.0
"""Weight of the acceptance rate of all sequences in that of one, in drafts."""

PRIOR_RATE = 0.5
"""The acceptance probability assumed without data."""


@dataclass
class AcceptanceCounts:
    """Acceptance counts by position in the draft (in a tree: depth), given that all tokens before were accepted."""

    decay: float  #: factor on the weight of older drafts, per draft
    verified: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """Count a draft of which the first ``accepted`` tokens were accepted."""
        for position in range(min(drafted, accepted + 1)):  # tokens after a rejected one were not verified
            if position == len(self.verified):
                self.verified.append(0.0)
                self.accepted.append(0.0)
            self.verified[position] = self.decay * self.verified[position] + 1.0
            self.accepted[position] = self.decay * self.accepted[position] + (position < accepted)

    def rate(self, position: int, prior: float, weight: float) -> float:
        """The acceptance probability at a position, with a prior that counts as ``weight`` drafts."""
        has_data = position < len(self.verified)
        verified, accepted = (self.verified[position], self.accepted[position]) if has_data else (0.0, 0.0)
        return (accepted + weight * prior) / (verified + weight)


class AcceptanceRates:
    """The acceptance rates of one sequence."""

    def __init__(self, shared: AcceptanceCounts) -> None:
        self.drafted = 0  # depth of the draft that is being verified
        self.retry_wait, self.retry_step = 0, 0  # steps to wait after an empty proposal, and the step to ask again
        self.shadow_draft, self.shadow_start = NO_DRAFT, 0  # a shadow draft, and its position in the output
        self._counts, self._shared_counts = AcceptanceCounts(0.9), shared

    def best_length(self, max_tokens: int, token_cost: float, fixed_cost: float = 0.0) -> tuple[int, float]:
        """The number of tokens to draft, and the expected number of accepted ones.

        token_cost: the cost of each draft token; fixed_cost: the cost of having a draft at all; both in tokens.
        """
        length, expected, rate, probability = 0, 0.0, PRIOR_RATE, 1.0  # of the last token, and of all tokens up to it
        while length < max_tokens:
            rate = self._counts.rate(length, self._shared_counts.rate(length, rate, PRIOR_WEIGHT), PRIOR_WEIGHT)
            probability *= rate
            if probability <= token_cost:
                break
            length, expected = length + 1, expected + probability
        return (length, expected) if expected > token_cost * length + fixed_cost else (0, 0.0)

    def record(self, drafted: int, accepted: int) -> None:
        """Record a draft of which the first ``accepted`` tokens were accepted, or would have been."""
        self._shared_counts.add(drafted, accepted)
        self._counts.add(drafted, accepted)

    def compare(self, token_ids: Sequence[int], num_prompt_tokens: int = 0) -> None:
        """Compare the shadow draft with the tokens of the sequence, if enough have been generated since."""
        if not self.shadow_draft:
            return
        start = num_prompt_tokens + self.shadow_start
        num_matched = num_matching_tokens(self.shadow_draft, token_ids, start)
        if start + num_matched < len(token_ids) or num_matched == self.shadow_draft.depth:
            self.record(self.shadow_draft.depth, num_matched)
            self.shadow_draft = NO_DRAFT


def num_matching_tokens(draft: Draft, token_ids: Sequence[int], start: int) -> int:
    """The number of tokens of a sequence, from ``start`` on, that a draft predicted."""
    children = draft.children()
    node, num_matched = ROOT, 0
    while start + num_matched < len(token_ids):
        token = token_ids[start + num_matched]
        node = next((child for child in children.get(node, ()) if draft.tokens[child] == token), ROOT)
        if node == ROOT:
            break
        num_matched += 1
    return num_matched


BASELINE_INTERVAL, TRIAL_INTERVAL = 32, 6
"""After so many steps with drafts, one without is made to measure it: where drafts pay, and until that is known."""

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
"""Cap on the time of a step, as a multiple of a step without drafts and per token: others delayed a longer one."""


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


MAX_LOSS, MAX_GAIN = 5.0, 6.0
"""Steps that drafts may lose before they pause, and that they can have gained when losses are counted against them."""

MAX_LOSS_AGAIN = 2.5
"""Steps that they may lose before the next pause, if they have not gained in between."""

RATE_RISE = 0.2
"""The rise of the acceptance rate that ends a pause. It must also halve the share of rejected drafts."""

FIRST_PAUSE, MAX_PAUSE = 128, 8192
"""Steps of the first pause and of the longest one. Each pause is twice as long, until drafts have gained MAX_GAIN."""

REQUIRED_SPEEDUP = 1.05
"""A step with drafts must generate this many times the tokens of normal steps in its time."""


@dataclass
class LossLimit:
    """The steps that drafts have lost, in units of a step without drafts now, and the pause after too many.

    This is independent of the predictions that select the draft length. It holds for any error in them, and where the
    cost of a draft relative to a step changes, as with other processes on the machine.
    """

    loss: float = 0.0  #: since the last pause; negative for a gain
    pause: int = 0  #: remaining steps without verified drafts
    next_pause: int = FIRST_PAUSE
    acceptance_rate: float = 0.0  #: when the pause began

    @property
    def gained(self) -> bool:
        """Whether drafts have clearly gained time lately."""
        return self.loss < -MAX_GAIN / 2

    def record_plain(self, steps: int = 1) -> None:
        self.pause = max(0, self.pause - steps)

    def end_pause_if_risen(self, acceptance_rate: float) -> None:
        """End the pause if the acceptance rate, that of shadow drafts, has clearly risen since it began."""
        rise = acceptance_rate - self.acceptance_rate
        if self.pause and rise > max(RATE_RISE, (1 - self.acceptance_rate) / 2):
            self.loss, self.pause = 0.0, 0

    def record_drafts(self, duration: float, tokens: float, acceptance_rate: float = 0.0) -> None:
        """Record a step with drafts: its duration in steps without drafts, and its tokens per sequence."""
        self.loss += duration * REQUIRED_SPEEDUP - tokens
        if self.loss <= -MAX_GAIN:
            self.loss, self.next_pause = -MAX_GAIN, FIRST_PAUSE
        elif self.loss > MAX_LOSS:
            self.loss, self.pause = MAX_LOSS - MAX_LOSS_AGAIN, self.next_pause
            self.acceptance_rate = acceptance_rate
            self.next_pause = min(2 * self.next_pause, MAX_PAUSE)


SHADOW_TIME_SHARE = 0.005
"""The share of the time that shadow drafts may take."""

MAX_CREDIT_STEPS, MAX_DEBT_STEPS = 8, 1000
"""Steps for which unused time for shadow drafts is saved, and for which overspent time is carried over."""

WARMUP_STEPS = 32
"""Number of steps before a shadow draft in which the proposer receives hidden states, which takes time, too."""


class ShadowBudget:
    """The seconds that are left for shadow drafts.

    hidden_states: whether the draft method reads hidden states. It then receives those of some steps before each
    shadow draft. What these steps cost is spent with the draft.
    """

    def __init__(self, *, hidden_states: bool) -> None:
        self.seconds = 0.0
        self._warmup_steps = WARMUP_STEPS if hidden_states else 0
        self._steps_observed = self._warmup_steps  # steps since hidden states are received again, for a shadow draft,
        self._observe_seconds = 0.0  # and seconds that this took

    @property
    def due(self) -> bool:
        """Whether shadow drafts may be made now."""
        return self.seconds >= 0 and self._steps_observed >= self._warmup_steps

    def observe(self) -> None:
        """Count a step in which the proposer received hidden states."""
        self._steps_observed += 1

    def charge(self, seconds: float) -> None:
        """Spend seconds with the next draft."""
        self._observe_seconds += seconds

    def spend(self, seconds: float, *, settle: bool) -> None:
        """Spend seconds now. settle: there was a draft, so also those that were charged."""
        self.seconds -= seconds
        if settle:
            self.seconds, self._observe_seconds = self.seconds - self._observe_seconds, 0.0
        if self.seconds < 0:
            self._steps_observed = 0

    def earn(self, step_seconds: float, steps: int) -> None:
        """Add the share of some steps of this duration."""
        share = SHADOW_TIME_SHARE * step_seconds
        saved = min(self.seconds + steps * share, MAX_CREDIT_STEPS * share)
        self.seconds = max(-MAX_DEBT_STEPS * share, saved)

    def steps_to_earn(self, step_seconds: float) -> float:
        """The number of steps of this duration after which the overspent time is earned again."""
        return -self.seconds / (SHADOW_TIME_SHARE * step_seconds)
