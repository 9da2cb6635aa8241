"""What all tests share: one deterministic hypothesis profile, and the embedded model, loaded once."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import nucleate as nc
from nucleate import plan

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")


@pytest.fixture(scope="session")
def llm() -> nc.LLM:
    return nc.LLM()


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """The CPU kernels, compiled before anything is timed: 15 seconds, unless an earlier run has left them."""
    nc.sample(np.zeros((1, 256), np.float32), nc.SamplingParams(), backend="cpu")


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """A test that leaves the log as others would not find it fails, and not those that run after it."""
    loggers = [logging.getLogger(name) for name in ("nucleate", "nucleate.server")]
    before = [(logger.level, logger.propagate, logger.disabled) for logger in loggers]
    yield
    assert [(logger.level, logger.propagate, logger.disabled) for logger in loggers] == before


@pytest.fixture(autouse=True)
def cold(log: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernels draw depends on no test that was run before, such as one of ``warm``."""
    monkeypatch.setattr(plan.KERNELS, "warm", False)
