"""Fixtures of the tests of models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nucleate.models.loader import EMBEDDED
from nucleate.models.numpy_llama import Llama


@pytest.fixture(scope="session")
def model() -> Llama:
    """The embedded model."""
    return Llama(EMBEDDED)


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
