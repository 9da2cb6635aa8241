"""Fixtures and settings for all tests: the tier (see `tests/support/tiers.py`), the kernels and the bundled model."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import tiers

import nucleate as nc
from nucleate.jit import kernel_libraries
from nucleate.models.loader import EMBEDDED
from nucleate.models.numpy_llama import Llama
from nucleate.plugins.plugin_loader import set_stages
from nucleate.sampling.stages import STAGES
from nucleate.structured_output import GrammarCompiler

if "PYTEST_XDIST_WORKER" in os.environ:  # threads that wait for one another are slow where all cores are busy
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Reduce the numbers of examples in a run that leaves out slow or exhaustive tests."""
    tiers.choose(config.option.markexpr)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.mark_slow_cases(items)


# Shells start background jobs with SIGINT ignored, and the programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def llm() -> nc.LLM:
    return nc.LLM()


@pytest.fixture(scope="session")
def model() -> Llama:
    """The embedded model."""
    return Llama(EMBEDDED)


@pytest.fixture(scope="session")
def grammars() -> GrammarCompiler:
    """The compiler of grammars for the tokenizer of the embedded model."""
    pytest.importorskip("llguidance", reason="needs the extra 'structured'")
    from bundled_grammars import bundled_compiler

    return bundled_compiler()


@pytest.fixture
def registry() -> Iterator[None]:
    """Unregister the stages that a test has registered."""
    before = dict(STAGES)
    yield
    set_stages(before)


@pytest.fixture
def page_names(registry: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The namespace of the code of a page."""
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    return vars(module)


@pytest.fixture(scope="session", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile all kernels, which takes half a minute, unless they are cached. Other xdist workers wait."""
    with (tmp_path_factory.getbasetemp().parent / "warm.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        nc.warm()


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """Fail a test that leaves the logging configuration changed, instead of the tests after it."""
    loggers = [logging.getLogger(name) for name in ("nucleate", "nucleate.server")]
    before = [(logger.level, logger.propagate, logger.disabled) for logger in loggers]
    yield
    assert [(logger.level, logger.propagate, logger.disabled) for logger in loggers] == before


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Small models are faster so."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class NeverReady(kernel_libraries.KernelReadiness):
    """Kernel readiness in which no kernel is ever ready."""

    ready = False

    def record_fallback(self, logits: int) -> None:
        """Start no background load."""


@pytest.fixture(autouse=True)
def cold(log: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make kernels unavailable to "auto", so that its choice does not depend on earlier tests."""
    monkeypatch.setattr(kernel_libraries, "KERNELS", NeverReady(()))
