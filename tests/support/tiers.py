"""The number of test examples: few in `make test`, more in `make test-all`, all in `make test-exhaustive`."""

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
settings.register_profile("fast", max_examples=15, **_COMMON)
settings.register_profile("more", max_examples=25, **_COMMON)
settings.register_profile("full", max_examples=100, **_COMMON)


def choose(markers: str) -> None:
    """Choose the tier of a run by its marker expression. Decorators in test modules call `count`: call this before."""
    tier = "fast" if "not slow" in markers else "more" if "not exhaustive" in markers else "full"
    settings.load_profile(tier)


def count(fast: int, full: int) -> int:
    """The number of examples, rows or trials in this run.

    `fast` in `make test`, `full` in `make test-exhaustive`, and in `make test-all` a number between them.
    """
    between = round(fast ** (3 / 4) * full ** (1 / 4))
    return {"fast": fast, "more": between, "full": full}[settings.get_current_profile_name()]


def mark_slow_cases(items: list[pytest.Item]) -> None:
    """Mark the cases of a test with `fast_cases(n)`: n are fast, n (at least one) slow, the others exhaustive.

    Those that are chosen cover as many different parameters as possible; otherwise the choice is pseudorandom. All
    exhaustive tests are slow.
    """
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive") is not None:
            item.add_marker("slow")
        if isinstance(item, pytest.Function) and item.get_closest_marker("fast_cases") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, left in cases.items():
        number = left[0].get_closest_marker("fast_cases").args[0]
        random.Random(name).shuffle(left)
        seen: set[tuple[str, int]] = set()
        for i in range(min(number + max(number, 1), len(left))):
            best = max(left, key=lambda item: len(_parameters(item) - seen))
            seen |= _parameters(best)
            left.remove(best)
            if i >= number:
                best.add_marker("slow")
        for item in left:
            item.add_marker("slow")
            item.add_marker("exhaustive")


def _parameters(case: pytest.Function) -> set[tuple[str, int]]:
    return {(name, id(value)) for name, value in case.callspec.params.items()}
