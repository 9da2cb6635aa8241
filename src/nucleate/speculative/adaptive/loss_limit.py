"""Limits what drafts may lose: compares steps with drafts with the steps without drafts around them."""

from __future__ import annotations

from dataclasses import dataclass

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
        """Record steps without drafts."""
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
