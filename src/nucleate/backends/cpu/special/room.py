"""How much room the chain takes, see ``work``. Knows no compiler."""

from __future__ import annotations

from typing import Any

from nucleate.core.noise import GROUP_SIZE as GROUP

DOUBTS = 64
"""So many tokens may be in doubt."""


def room_for(size: Any) -> Any:
    """How many float64 a ``Work`` takes for rows of so many scores."""
    groups = -(-size // GROUP)
    return 6 * GROUP * groups + 6 * groups + (GROUP * (groups + 1) + 2 * groups + 8) // 2 + GROUP + DOUBTS + 25
