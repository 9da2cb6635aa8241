"""The embedded model as GGUF files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gguf_files import EXACT, write_gguf

import nucleate as nc
from nucleate.models.loader import EMBEDDED


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the type of the weights."""
    if os.environ.get("NUCLEATE_TEST_GGUF") != "required":
        pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (make setup-gguf)")
    folder, found = tmp_path_factory.mktemp("gguf"), {}
    for kind in ("f32", "f16", "q8_0"):
        found[kind] = folder / f"tiny-{kind}.gguf"
        write_gguf().write(EMBEDDED, found[kind], kind)
    return found


@pytest.fixture(scope="session")
def exact(files: dict[str, Path]) -> nc.LLM:
    """The embedded model, run by llama.cpp in float32."""
    return nc.LLM(files["f32"], gguf_options=EXACT)
