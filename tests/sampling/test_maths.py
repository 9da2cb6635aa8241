"""The functions of maths agree for numbers, arrays and tensors."""

from __future__ import annotations

import numpy as np
import pytest

from nucleate.sampling import maths

SOME = [-np.inf, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, np.inf, np.nan]


def values(given):
    return np.asarray(given, np.float64)


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")
def test_arrays_and_tensors_agree():
    torch = pytest.importorskip("torch")
    array, tensor = np.array(SOME), torch.tensor(SOME, dtype=torch.float64)
    for name in ("exp", "log", "log1p", "sqrt", "absolute", "ones"):
        function = getattr(maths, name)
        np.testing.assert_allclose(values(function(tensor)), function(array), rtol=1e-15)
        for number in SOME:
            np.testing.assert_array_equal(values(function(number)), function(np.array(number)))
    for name in ("minimum", "maximum"):
        function = getattr(maths, name)
        for other in SOME:
            expected = function(array, other)
            for given in ((tensor, other), (other, tensor), (tensor, torch.tensor(other, dtype=torch.float64))):
                np.testing.assert_array_equal(values(function(*given)), expected)
    for condition in (True, False, array > 0, tensor > 0):
        for a, b in ((tensor, 7.0), (7.0, tensor), (tensor, tensor * 2), (1.0, 0.0)):
            actual = maths.where(condition, a, b)
            numpy_result = np.where(np.asarray(condition), np.asarray(a), np.asarray(b))
            np.testing.assert_array_equal(np.broadcast_to(values(actual), numpy_result.shape), numpy_result)
