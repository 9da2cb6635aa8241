"""How many examples a test takes: few in `make test`, all in `make test-all`."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_COMMON: dict[str, Any] = {
    "derandomize": True,
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "database": None,
}
settings.register_profile("fast", max_examples=25, **_COMMON)
settings.register_profile("full", max_examples=100, **_COMMON)


def choose(full: bool) -> None:
    """Choose the tier of this run. This comes before test modules are imported, as their decorators call `count`."""
    settings.load_profile("full" if full else "fast")


def count(fast: int, full: int) -> int:
    """The number of examples, rows or trials in this run: `fast` in `make test`, `full` in `make test-all`."""
    return fast if settings.get_current_profile_name() == "fast" else full


def mark_slow_cases(items: list[pytest.Item]) -> None:
    """Mark as slow all cases of a parametrised test beyond the number in its marker `fast_cases`.

    The cases that stay have as many different parameters as possible; otherwise chance decides, always in the same way.
    """
    cases = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("fast_cases") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, left in cases.items():
        number = left[0].get_closest_marker("fast_cases").args[0]
        random.Random(name).shuffle(left)
        seen: set[tuple[str, int]] = set()
        for _ in range(min(number, len(left))):
            best = max(left, key=lambda item: len(_parameters(item) - seen))
            seen |= _parameters(best)
            left.remove(best)
        for item in left:
            item.add_marker("slow")


def _parameters(case: pytest.Function) -> set[tuple[str, int]]:
    return {(name, id(value)) for name, value in case.callspec.params.items()}
