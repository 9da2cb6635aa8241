"""Matrix products equal those of NumPy: with the kernel for small batches, and with BLAS on several threads."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from nucleate.jit.kernel_libraries import MODELS
from nucleate.models import cpu_operations
from nucleate.models.cpu_operations import MAX_KERNEL_ROWS, compiled_matmul, matmul


def random_array(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("count", [0, *range(1, MAX_KERNEL_ROWS + 3), 40])
@pytest.mark.parametrize(("size", "columns"), [(192, 1152), (512, 16), (4, 4096), (100, 48), (7, 32), (12, 30), (1, 1)])
def test_equals_numpy(count: int, size: int, columns: int) -> None:
    x, weight = random_array(count, size), random_array(size, columns)
    out = np.full((count, columns), np.nan, np.float32)
    assert compiled_matmul(x, weight, out) is out
    np.testing.assert_allclose(out, x @ weight, atol=2e-4)
    np.testing.assert_allclose(compiled_matmul(x, weight), x @ weight, atol=2e-4)


@pytest.mark.parametrize("count", range(1, MAX_KERNEL_ROWS + 6))
def test_the_kernel_supports_any_number_of_rows(count: int) -> None:
    x, weight, out = random_array(count, 8), random_array(8, 32), np.full((count, 32), np.nan, np.float32)
    MODELS.multiply(x, weight, out)
    np.testing.assert_allclose(out, x @ weight, atol=1e-5)


def test_rows_with_a_stride() -> None:
    wide, weight = random_array(6, 400), random_array(192, 64)
    np.testing.assert_allclose(compiled_matmul(wide[::2, 8:200], weight), wide[::2, 8:200] @ weight, atol=2e-4)


def test_nan_stays_in_its_row() -> None:
    x, weight = random_array(5, 64), random_array(64, 32)
    x[1, 3], x[2, 7] = np.nan, np.inf
    out = compiled_matmul(x, weight)
    assert np.isnan(out[1]).all()
    assert not np.isfinite(out[2]).any()
    np.testing.assert_allclose(out[[0, 3, 4]], (x @ weight)[[0, 3, 4]], atol=2e-4)


@pytest.mark.parametrize("count", range(2, MAX_KERNEL_ROWS + 1))
def test_a_row_does_not_depend_on_the_batch(count: int) -> None:
    x, weight = random_array(count, 192), random_array(192, 320)
    together = compiled_matmul(x, weight)
    for row in range(count):
        np.testing.assert_array_equal(compiled_matmul(x[row : row + 1], weight)[0], together[row])


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 64])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_several_threads_equal_numpy(count: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_operations, "MULTIPLICATIONS_PER_THREAD", 100)
    monkeypatch.setattr(cpu_operations, "cores", lambda: threads)
    x, weight = random_array(count, 20), random_array(20, 30)
    out = np.full((count, 30), np.nan, np.float32)
    assert matmul(x, weight, out) is out
    assert out == pytest.approx(x @ weight, abs=1e-4)
    assert matmul(x, weight) == pytest.approx(x @ weight, abs=1e-4)


def test_unstarted_parts_run_on_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy:
        def submit(self, *_: object, **__: object) -> Future[None]:
            return Future()

    monkeypatch.setattr(cpu_operations, "MULTIPLICATIONS_PER_THREAD", 100)
    monkeypatch.setattr(cpu_operations, "cores", lambda: 3)
    monkeypatch.setattr(cpu_operations, "thread_pool", Busy)
    x, weight = random_array(9, 20), random_array(20, 30)
    assert matmul(x, weight) == pytest.approx(x @ weight, abs=1e-4)
