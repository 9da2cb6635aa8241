"""Drafts that lose time pause, whatever was predicted; drafts that gain time do not."""

from __future__ import annotations

import random

import pytest
from timed_proposers import Slow, append_tokens

from nucleate.speculative.adaptive_measurements import (
    FIRST_PAUSE,
    MAX_GAIN,
    MAX_LOSS,
    MAX_LOSS_AGAIN,
    MAX_PAUSE,
    LossLimit,
)
from nucleate.speculative.adaptive_proposer import AdaptiveProposer
from nucleate.speculative.draft import Draft, DraftContext


def drafted_share(speedup: float, noise: float, steps: int = 50_000) -> tuple[float, float]:
    """The share of steps with drafts, and the speed relative to none, if drafts run whenever they are not paused.

    A step with drafts generates two tokens. Its duration is doubled by other processes in some of the steps.
    """
    limit, rng, drafted, tokens, seconds = LossLimit(), random.Random(1), 0, 0.0, 0.0
    for _ in range(steps):
        if limit.pause:
            limit.record_plain()
            tokens, seconds = tokens + 1, seconds + 1
            continue
        duration = 2 / speedup * (1 + (rng.random() < noise)) / (1 + noise)
        limit.record_drafts(duration, 2.0)
        drafted, tokens, seconds = drafted + 1, tokens + 2, seconds + duration
    return drafted / steps, tokens / seconds


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("speedup", [0.25, 0.5, 0.7, 0.9, 1.0])
def test_losses_are_small_for_any_cost(speedup: float, noise: float) -> None:
    share, speed = drafted_share(speedup, noise)
    assert speed > 0.99
    assert share < 0.2


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("speedup", [1.3, 2.0])
def test_gains_are_kept(speedup: float, noise: float) -> None:
    share, speed = drafted_share(speedup, noise)
    assert share > 0.9
    assert speed > 1 + 0.8 * (speedup - 1)


def test_pauses_double_until_drafts_have_gained() -> None:
    limit, pauses = LossLimit(), []
    for _ in range(8):
        limit.record_drafts(MAX_LOSS + 3, 1.0)
        pauses.append(limit.pause)
        limit.pause = 0
    assert pauses == [min(FIRST_PAUSE * 2**i, MAX_PAUSE) for i in range(8)]
    limit.record_drafts(1.0, MAX_GAIN + MAX_LOSS + 3)
    assert (limit.loss, limit.next_pause) == (-MAX_GAIN, FIRST_PAUSE)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6])
def test_a_pause_ends_when_the_acceptance_rate_has_clearly_risen(rate: float) -> None:
    limit = LossLimit()
    limit.record_drafts(MAX_LOSS + 3, 1.0, rate)
    for lower in (0.0, rate, rate + 0.15, (1 + rate) / 2 - 0.01):
        limit.end_pause_if_risen(lower)
        assert limit.pause == FIRST_PAUSE
    limit.end_pause_if_risen((1 + rate) / 2 + 0.06)
    assert (limit.loss, limit.pause, limit.next_pause) == (0.0, 0, 2 * FIRST_PAUSE)


def test_a_second_loss_pauses_sooner() -> None:
    limit = LossLimit()
    limit.record_drafts(MAX_LOSS + 3, 1.0)
    limit.pause = 0
    limit.record_drafts(1 + MAX_LOSS_AGAIN, 1.0)
    assert limit.pause == 2 * FIRST_PAUSE


class OneToken(Slow):
    """Drafts one token."""

    def draft(self, start: int, count: int) -> Draft:
        return super().draft(start, min(count, 1))


@pytest.mark.parametrize("slowdown", [1.0, 4.0])
def test_the_time_of_shadow_drafts_is_not_part_of_a_step_without_drafts(
    slowdown: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would make drafts look cheap after each shadow draft."""
    inner, ids = OneToken(monkeypatch, 3.0, lambda: 1.0), [0]
    proposer = AdaptiveProposer(inner)
    tokens, drafted = 0, 0
    for step in range(2000):
        busy = slowdown if step > 400 else 1.0
        inner.seconds = 3.0 * busy
        begin = inner.clock
        [draft] = proposer.propose([DraftContext(0, ids)], [4]) if proposer.active() else [Draft()]
        inner.clock += busy * (1 + 0.1 * len(draft))
        if draft:
            proposer.accepted(0, 1)
        append_tokens(ids, 1 + len(draft))
        tokens, drafted = tokens + 1 + len(draft), drafted + bool(draft)
        proposer.end_step(1, 1 + len(draft), inner.clock - begin)
        if step == 400:
            before = inner.clock
            tokens = 0
    assert proposer.costs.baseline[1] == pytest.approx(slowdown)
    assert drafted < 20
    assert tokens * slowdown / (inner.clock - before) > 0.97
