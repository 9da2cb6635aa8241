"""The noise as tensor code has the bits of ``core.noise``, also when compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nucleate.sampling import noise

torch = pytest.importorskip("torch", reason="tensor code needs torch")
from nucleate.sampling.gpu import batch_sampling as tensors  # noqa: E402

WORDS = st.one_of(st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
IDS = np.array([0, 1, 255, 256, 128_255, 2**31, 2**32 - 1])


def bits(*words: int) -> torch.Tensor:
    """64-bit integers as int64."""
    return torch.from_numpy(np.array(words, np.uint64).view(np.int64))


def uniform(seed: Any, step: Any, stream: int, index: torch.Tensor, *more: torch.dtype) -> torch.Tensor:
    return tensors.uniform(tensors.make_keys(seed), step[:, None], stream, index, *more)


@given(WORDS, WORDS, st.integers(0, 5))
def test_uniforms_have_the_same_bits(seed: int, step: int, stream: int) -> None:
    [got] = uniform(bits(seed), bits(step), stream, torch.from_numpy(IDS))
    assert got.dtype == torch.float64
    assert got.numpy().tolist() == noise.uniform(seed, step, stream, IDS).tolist()


def test_rows_are_broadcast_over_ids() -> None:
    seeds, steps = [5, 2**64 - 1, 7], [2**40, 0, 2**64 - 2]
    got = uniform(bits(*seeds), bits(*steps), noise.GROUP, torch.arange(300))
    for row, (seed, step) in enumerate(zip(seeds, steps, strict=True)):
        assert got[row].tolist() == noise.uniform(seed, step, noise.GROUP, np.arange(300)).tolist()


def test_float32_is_the_same_number_rounded_and_never_0_or_1() -> None:
    ids = np.arange(200_000)
    exact = noise.uniform(3, 4, noise.TOKEN, ids)
    got = uniform(bits(3), bits(4), noise.TOKEN, torch.from_numpy(ids), torch.float32)[0].numpy()
    assert got.dtype == np.float32
    assert (abs(got - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    assert got.min() > 0
    assert got.max() < 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_uniform_numbers_stay_inside_the_open_interval(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that occur once in 2**64 numbers."""
    for word in (0, 2**32 - 1):
        monkeypatch.setattr(tensors, "words", lambda *_, word=word: (torch.tensor([word]), torch.tensor([word])))
        u = float(uniform(bits(0), bits(0), 0, bits(0), dtype))
        assert 0 < u < 1
        assert 0 < -np.log1p(-u) < np.inf
