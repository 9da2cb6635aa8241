"""The initial llguidance matcher of a constraint, recreated when its lexer states are exhausted.

All copies of a matcher share lexer states, which makes masks faster with use; but llguidance limits their total number.
When the limit is exceeded, one copy gets an error, and others may compute wrong, empty masks. All sequences then
continue from a new initial matcher.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from nucleate.structured_output.number_digits import DigitLimit
from nucleate.structured_output.time_budget import TimeBudget

STATES_EXHAUSTED = "too many states"
POISONED = "PoisonError"
"""In the errors of all copies after llguidance failed in one of them."""


@final
class InitialMatcher:
    """The state shared by all sequences of a constraint. ``current``: the initial LLMatcher and its generation number.

    create: creates an initial LLMatcher. ``eos_mask_W`` is the bitmask of ``eos_ids``. ``budget`` limits slow calls.
    ``digit_limit`` limits the digits of numbers in JSON.
    """

    def __init__(
        self,
        create: Callable[[], Any],
        eos_ids: frozenset[int],
        eos_mask_W: NDArray[np.int32],
        budget: TimeBudget,
        digit_limit: DigitLimit | None = None,
    ) -> None:
        self.current: tuple[Any, int] = create(), 0
        self.eos_ids, self.eos_mask_W, self.budget = eos_ids, eos_mask_W, budget
        self.digit_limit = digit_limit
        self._create = create
        self._lock = threading.Lock()

    def replace(self, generation: int) -> None:
        """Replace the initial matcher of this generation, unless another thread has done so already."""
        with self._lock:
            if self.current[1] == generation:
                self.current = self._create(), generation + 1
