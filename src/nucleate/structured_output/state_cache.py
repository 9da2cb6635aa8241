"""The initial llguidance matcher of a constraint, recreated when its lexer states are used up.

All copies of a matcher share lexer states, which makes masks faster with use; but llguidance limits their total number.
When it is exceeded, one copy gets an error, and the others may get wrong empty masks. Then no copy can be trusted, and
all sequences continue from a new initial matcher.
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
    """The state shared by all sequences of a constraint. ``now``: the initial LLMatcher and its generation number.

    ``make`` creates another. ``ends_W`` is the mask of the EOS ids ``ends``; ``budget`` is for slow calls.
    """

    def __init__(
        self, make: Callable[[], Any], ends: frozenset[int], ends_W: NDArray[np.int32], budget: TimeBudget
    ) -> None:
        self.now: tuple[Any, int] = make(), 0
        self.ends, self.ends_W, self.budget = ends, ends_W, budget
        self._make = make
        self._lock = threading.Lock()

    def after(self, number: int) -> None:
        """Replace the initial matcher of this generation, unless another thread has done so."""
        with self._lock:
            if self.now[1] == number:
                self.now = self._make(), number + 1
