"""What all tests share: the tier (see `tests/support/tiers.py`), the compiled kernels and the embedded model."""

from __future__ import annotations

import fcntl
import logging
import signal
from collections.abc import Iterator

import pytest
import tiers

import nucleate as nc
from nucleate.jit import readiness


def pytest_configure(config: pytest.Config) -> None:
    """Reduce the numbers of examples in a run that leaves out slow or exhaustive tests."""
    tiers.choose(config.option.markexpr)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.mark_slow_cases(items)


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as of what a shell starts in the background: no program
    signal.signal(signal.SIGINT, signal.default_int_handler)  # that a test starts would heed Ctrl-C


@pytest.fixture(scope="session")
def llm() -> nc.LLM:
    return nc.LLM()


@pytest.fixture(scope="session", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile all kernels, which takes half a minute, unless they are cached. Other xdist workers wait meanwhile."""
    with (tmp_path_factory.getbasetemp().parent / "warm.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        nc.warm()


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """A test that leaves the log as others would not find it fails, and not those that run after it."""
    loggers = [logging.getLogger(name) for name in ("nucleate", "nucleate.server")]
    before = [(logger.level, logger.propagate, logger.disabled) for logger in loggers]
    yield
    assert [(logger.level, logger.propagate, logger.disabled) for logger in loggers] == before


class Held(readiness.KernelReadiness):
    """As if none were in memory, however long one waits."""

    ready = False

    def record_fallback(self, logits: int) -> None:
        """Nobody gets them."""


@pytest.fixture(autouse=True)
def cold(log: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernels draw depends neither on tests that were run before, nor on how much is: "auto" takes none."""
    monkeypatch.setattr(readiness, "KERNELS", Held(()))
