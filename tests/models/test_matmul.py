"""Matrix products on several threads equal those of NumPy."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from nucleate.models import cpu_operations as module
from nucleate.models.cpu_operations import matmul


def random_array(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 64])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_equals_numpy(count: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MULTIPLICATIONS_PER_THREAD", 100)
    monkeypatch.setattr(module, "cores", lambda: threads)
    x, weight = random_array(count, 20), random_array(20, 30)
    out = np.full((count, 30), np.nan, np.float32)
    assert matmul(x, weight, out) is out
    assert out == pytest.approx(x @ weight, abs=1e-4)
    assert matmul(x, weight) == pytest.approx(x @ weight, abs=1e-4)


def test_unstarted_parts_run_on_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy:
        def submit(self, *_: object, **__: object) -> Future[None]:
            return Future()

    monkeypatch.setattr(module, "MULTIPLICATIONS_PER_THREAD", 100)
    monkeypatch.setattr(module, "cores", lambda: 3)
    monkeypatch.setattr(module, "thread_pool", Busy)
    x, weight = random_array(9, 20), random_array(20, 30)
    assert matmul(x, weight) == pytest.approx(x @ weight, abs=1e-4)
