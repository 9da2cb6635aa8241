"""What all tests share: one deterministic hypothesis profile, and the embedded model, loaded once."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

import nucleate as nc
from nucleate.jit import readiness

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as of what a shell starts in the background: no program
    signal.signal(signal.SIGINT, signal.default_int_handler)  # that a test starts would heed Ctrl-C


@pytest.fixture(scope="session")
def llm() -> nc.LLM:
    return nc.LLM()


@pytest.fixture(scope="session", autouse=True)
def warm() -> None:
    """All kernels, compiled before anything is timed: half a minute, unless an earlier run has left them."""
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

    def missed(self, scores: int) -> None:
        """Nobody gets them."""


@pytest.fixture(autouse=True)
def cold(log: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernels draw depends neither on tests that were run before, nor on how much is: "auto" takes none."""
    monkeypatch.setattr(readiness, "KERNELS", Held(()))
