"""``sample`` and ``probabilities`` of one row [V] are those of the row in a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nucleate as nc

ROW = np.random.default_rng(1).normal(0, 3, 64).astype(np.float32)
MASK = np.array([-1, 0x0F0F], np.int32)


@pytest.mark.parametrize("kind", ["numpy", "list", "torch"])
@pytest.mark.parametrize("backend", ["auto", "reference", "cpu"])
def test_one_row(kind: str, backend: str) -> None:
    params: Any = nc.SamplingParams(seed=3, repetition_penalty=1.4, top_p=0.9)
    row: Any = ROW
    if kind == "torch":
        row = pytest.importorskip("torch").tensor(ROW)
    elif kind == "list":
        row = ROW.tolist()
    for own, batch in (
        ({}, {}),
        ({"prompt_ids": [3, 5], "output_ids": [7]}, {"prompt_ids": [[3, 5]], "output_ids": [[7]]}),
        ({"mask": MASK}, {"mask": MASK[None]}),
    ):
        for step in range(4):
            token = nc.sample(row, params, step=step, backend=backend, **own)
            assert token.shape == ()
            assert type(token).__module__.startswith("torch" if kind == "torch" else "numpy")
            assert int(token) == nc.sample(ROW[None], params, step=step, backend=backend, **batch).tolist()[0]
        p = nc.probabilities(row, params, backend=backend, **own)
        assert p.tolist() == nc.probabilities(ROW[None], params, backend=backend, **batch)[0].tolist()


def test_errors_of_one_row() -> None:
    with pytest.raises(nc.LogitsError):
        nc.sample(np.full(8, np.nan, np.float32), nc.SamplingParams())
    with pytest.raises(ValueError, match="shape"):
        nc.sample(np.zeros(0, np.float32), nc.SamplingParams())
    with pytest.raises(ValueError, match="shape"):
        nc.sample(np.float32(1), nc.SamplingParams())
