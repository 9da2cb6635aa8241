"""The time for shadow drafts: a small share of the time of all steps."""

from __future__ import annotations

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
