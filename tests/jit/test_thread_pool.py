"""How many threads work."""

from __future__ import annotations

import os

import pytest

from nucleate.jit.thread_pool import cores, pool
from nucleate.parameters.parameter import ParameterError


@pytest.mark.parametrize("asked", ["0", "-1", "two", "1.5"])
def test_a_number_of_threads_that_makes_no_sense_is_an_error_that_says_so(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUCLEATE_THREADS", asked)
    with pytest.raises(ParameterError, match=f"NUCLEATE_THREADS must be an integer >= 1, got '{asked}'"):
        cores.__wrapped__()


def test_the_number_that_is_asked_for_or_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUCLEATE_THREADS", "3")
    assert cores.__wrapped__() == 3
    monkeypatch.setenv("NUCLEATE_THREADS", " ")
    assert 1 <= cores.__wrapped__() <= (os.cpu_count() or 1)


def test_a_process_has_one_pool() -> None:
    assert pool() is pool()
    assert pool().submit(os.getpid).result() == os.getpid()
