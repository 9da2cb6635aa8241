"""The number of worker threads."""

from __future__ import annotations

import os

import pytest

from nucleate.jit.thread_pool import cores, pool
from nucleate.parameters.parameter import ParameterError


@pytest.mark.parametrize("setting", ["0", "-1", "two", "1.5"])
def test_an_invalid_number_of_threads_is_an_explained_error(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUCLEATE_THREADS", setting)
    with pytest.raises(ParameterError, match=f"NUCLEATE_THREADS must be an integer >= 1, got '{setting}'"):
        cores.__wrapped__()


def test_the_number_of_threads_is_configured_or_that_of_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUCLEATE_THREADS", "3")
    assert cores.__wrapped__() == 3
    monkeypatch.setenv("NUCLEATE_THREADS", " ")
    assert 1 <= cores.__wrapped__() <= (os.cpu_count() or 1)


def test_a_process_has_one_pool() -> None:
    assert pool() is pool()
    assert pool().submit(os.getpid).result() == os.getpid()
