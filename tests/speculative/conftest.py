"""Fixtures of the tests of speculative decoding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from toy_requests import SIZE

import nucleate as nc
from nucleate.models.loader import EMBEDDED
from nucleate.models.numpy_llama import Llama
from nucleate.structured_output import GrammarCompiler, guide


@pytest.fixture(scope="module", autouse=True)
def _patient() -> Iterator[None]:
    """Grammars may take their time on a machine that is busy with other work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guide, "VALIDATION_SECONDS", 60.0)
        yield


@pytest.fixture(scope="session")
def grammars(llm: nc.LLM) -> GrammarCompiler:
    return GrammarCompiler(llm.tokenizer, SIZE)


@pytest.fixture(scope="session")
def model() -> Llama:
    """The embedded model."""
    return Llama(EMBEDDED)
