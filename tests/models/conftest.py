"""Fixtures of the tests of models."""

from __future__ import annotations

import pytest

from nucleate.models.loader import EMBEDDED
from nucleate.models.numpy_llama import Llama


@pytest.fixture(scope="session")
def model() -> Llama:
    """The embedded model."""
    return Llama(EMBEDDED)
