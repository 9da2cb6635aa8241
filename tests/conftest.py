"""What all tests share: one deterministic hypothesis profile, and the embedded model, loaded once."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import nucleate as nc
from nucleate import kernels
from nucleate.core.kept import Patience

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as of what a shell starts in the background: no program
    signal.signal(signal.SIGINT, signal.default_int_handler)  # that a test starts would heed Ctrl-C


@pytest.fixture(scope="session")
def llm() -> nc.LLM:
    return nc.LLM()


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """The CPU kernels, compiled before anything is timed: 40 seconds, unless an earlier run has left them."""
    nc.sample(np.zeros((1, 256), np.float32), nc.SamplingParams(), backend="cpu")


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """A test that leaves the log as others would not find it fails, and not those that run after it."""
    loggers = [logging.getLogger(name) for name in ("nucleate", "nucleate.server")]
    before = [(logger.level, logger.propagate, logger.disabled) for logger in loggers]
    yield
    assert [(logger.level, logger.propagate, logger.disabled) for logger in loggers] == before


@pytest.fixture(autouse=True)
def cold(log: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Which kernels draw depends neither on tests that were run before, such as one of ``warm``, nor on how much is.

    What a test has begun to compile in the background ends with it: until then, "auto" takes no kernels.
    """
    monkeypatch.setattr(kernels.KERNELS, "warm", False)
    monkeypatch.setattr(kernels.KERNELS, "patience", Patience(Path, sys.maxsize, sys.maxsize))
    yield
    for thread in list(kernels.KERNELS.warming):
        thread.join(120)
        assert thread not in kernels.KERNELS.warming
