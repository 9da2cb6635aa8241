"""How many threads work, and where kernels are kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nucleate.core import kept
from nucleate.core.parameter import ParameterError
from nucleate.core.threads import cores, pool


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


def test_kernels_of_other_sources_or_versions_are_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUCLEATE_CACHE", str(tmp_path))
    source = tmp_path / "a.py"
    source.write_text("x = 1")
    first = kept.folder("1.0", [source], "models-")
    assert first.parent == tmp_path
    assert first.name.startswith("models-")
    assert first == kept.folder("1.0", [source], "models-") != kept.folder("1.1", [source], "models-")
    source.write_text("x = 2")
    assert first != kept.folder("1.0", [source], "models-")


def test_a_folder_that_is_a_file_keeps_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="nucleate")  # whatever it was set to by others
    place = tmp_path / "file"
    place.write_text("")
    assert not kept.prepared(place, "something", 3)
    assert "cannot be written: not kept" in caplog.text
    assert kept.prepared(tmp_path / "folder", "something", 3)
    assert "compiling something, once: about 3 seconds" in caplog.text
