"""Where the texts of one form begin in llguidance, made anew once its states are used up. Knows no vocabulary.

All copies of a matcher share the states of its lexer, so that masks get quicker with use; and the library counts the
states of all answers there ever were. When there are too many it tells the one that asked, and remembers for all the
others that nothing can follow there. So no copy is to be believed after that, and all go on from a new beginning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from nucleate.structured_output.time_budget import TimeBudget

USED_UP = "too many states"


@final
class Beginning:
    """What all answers of a form share. ``now``: an LLMatcher, never moved, and how many there were before it.

    ``make`` gives another. ``ends_W`` is the mask of the EOS ids ``ends``; ``budget`` is for slow calls.
    """

    def __init__(
        self, make: Callable[[], Any], ends: frozenset[int], ends_W: NDArray[np.int32], budget: TimeBudget
    ) -> None:
        self.now: tuple[Any, int] = make(), 0
        self.ends, self.ends_W, self.budget = ends, ends_W, budget
        self._make = make
        self._lock = threading.Lock()

    def after(self, number: int) -> None:
        """Make the one that comes after this number, whose states are used up, unless another has."""
        with self._lock:
            if self.now[1] == number:
                self.now = self._make(), number + 1
