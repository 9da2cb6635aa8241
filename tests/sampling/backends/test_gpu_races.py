"""Data races of GPU kernels are found in the interpreter, without false positives.

All kernel tests check for them, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from race_detector import RaceError
from triton_interpreter import Interpreted

pytest.importorskip("torch", reason="the kernels are launched with torch's tensors")
pytest.importorskip("triton", reason="the kernels are Triton's: pip install triton (Linux only)")


@pytest.fixture(scope="module")
def kernels() -> Iterator[Interpreted]:
    kernels = Interpreted(str(Path(__file__).parents[2] / "support" / "racing_kernels.py"))
    yield kernels
    kernels.close()


@pytest.mark.parametrize(
    ("name", "grid", "message"),
    [
        ("step", 1, r"before a barrier: racing_kernels.py:\d+ reads; racing_kernels.py:\d+ writes"),
        ("shift", 1, "before a barrier: .* reads; .* writes"),
        ("handed", 1, "before a barrier: .* writes; .* reads"),
        ("in_place", 1, "before a barrier: .* reads; .* writes"),
        ("one_for_all", 1, r"before a barrier: racing_kernels.py:\d+ writes"),
        ("programs", 3, "in two programs: .* writes; .* reads"),
        ("added", 3, "in two programs: .* changes; .* reads"),
        ("changed", 3, "before a barrier: .* changes; .* reads"),
    ],
)
@pytest.mark.fast_cases(0)
def test_races_are_reported_and_correct_kernels_are_not(
    name: str, grid: int, message: str, kernels: Interpreted
) -> None:
    kernels.call("run", name, True, grid)
    with pytest.raises(RaceError, match=message):
        kernels.call("run", name, False, grid)
    kernels.call("run", name, True, grid)
