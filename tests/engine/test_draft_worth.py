"""Whether drafts save time at all, in worlds whose clock bends."""

from __future__ import annotations

import pytest

from nucleate.engine.draft.worth import AFRESH, LONGEST, PAUSE, TRIED, Worth


def drive(
    worth: Worth, steps: int, seconds: float, written: float, sequences: int = 8, drafted: int = 32
) -> list[bool]:
    """Steps without drafts take a second, those with drafts as long as is said. In which of them there are drafts."""
    made = []
    for _ in range(steps):
        drafts = worth.allows()
        made.append(drafts)
        if drafts:
            worth.stepped(sequences, sequences + drafted, int(written * sequences), seconds)
        else:
            worth.stepped(sequences, sequences, sequences, 1.0)
    return made


def test_drafts_that_save_time_are_made() -> None:
    made = drive(Worth(), 1000, 1.5, 3.0)
    assert sum(made) > 1000 * (1 - 2 / AFRESH)
    assert not all(made[2 * AFRESH :])  # and one without is looked at now and then


def test_drafts_that_cost_time_are_paused() -> None:
    """More tokens for each, and longer yet: less and less often they are tried."""
    made = drive(Worth(), 4000, 3.0, 2.0)
    assert sum(made) < 4000 * 0.03
    assert sum(made[:PAUSE]) <= TRIED + 1
    assert sum(made[1000:]) > 0
    spent = sum(3.0 if drafts else 1.0 for drafts in made)
    said = sum(2.0 if drafts else 1.0 for drafts in made)
    assert spent / said < 1.03


@pytest.mark.parametrize("first", [0.5, 3.0])
def test_it_finds_out_when_it_changes(first: float) -> None:
    worth = Worth()
    drive(worth, 1000, first, 2.0)
    made = drive(worth, 3 * LONGEST, 3.5 - first, 2.0)
    assert (sum(made[-LONGEST:]) > LONGEST / 2) is (first > 1)


def test_each_number_of_sequences_is_for_itself() -> None:
    worth = Worth()
    drive(worth, 30, 1.2, 2.0, sequences=8)
    assert worth.since < AFRESH
    worth.stepped(3, 9, 6, 1.0)  # of three nothing is known
    assert not worth.allows()
    worth.stepped(3, 3, 3, 0.5)
    assert worth.allows()
    assert set(worth.plain) == {8, 3}


def test_a_step_that_took_long_for_once_changes_little() -> None:
    worth = Worth()
    for _ in range(50):
        worth.stepped(1, 1, 1, 1.0)
    worth.stepped(1, 1, 1, 1000.0)
    assert worth.plain[1] < 1.3
    for _ in range(20):
        worth.stepped(1, 5, 3, 1.0)
    cost = worth.cost
    worth.stepped(1, 5, 3, 1000.0)
    assert worth.cost < cost + 0.4
    assert worth.allows()
