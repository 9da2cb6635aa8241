"""The location of cached kernels on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from nucleate.jit import native_library


def test_kernels_of_other_sources_or_versions_have_another_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUCLEATE_CACHE", str(tmp_path))
    source = tmp_path / "a.py"
    source.write_text("x = 1")
    first = native_library.cache_folder("1.0", [source])
    assert first.parent == tmp_path
    assert first == native_library.cache_folder("1.0", [source]) != native_library.cache_folder("1.1", [source])
    source.write_text("x = 2")
    assert first != native_library.cache_folder("1.0", [source])


def test_a_folder_that_is_a_file_is_not_writable(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    assert not native_library.writable(path)
    assert native_library.writable(tmp_path / "folder")
