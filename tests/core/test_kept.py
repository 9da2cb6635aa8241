"""Kernels on disk: where they are kept, who they serve, and when they are worth their time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from runpy import run_path

import numba
import pytest

from nucleate.core import kept
from nucleate.core.compiling import compiled
from nucleate.core.kept import Patience

LOAD = """
import sys
from nucleate.core import kept
if sys.argv[1] == "reader":
    kept.writable = lambda place: False
from nucleate.models import kernels
rotate = kernels.rotate()
print(sum(rotate.stats.cache_hits.values()), kept.prepared(kernels.folder(), "", 0))
"""


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
    assert kept.prepared(place, "something", 3) is None
    assert "cannot be written: not kept" in caplog.text
    assert kept.prepared(tmp_path / "folder", "something", 3) == tmp_path / "folder"
    assert "compiling something, once: about 3 seconds" in caplog.text


def test_kernels_that_cannot_be_written_are_read_from_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="nucleate")
    monkeypatch.setattr(kept, "writable", lambda place: False)
    place, empty = tmp_path / "place", tmp_path / "empty"
    (place / "below").mkdir(parents=True)
    empty.mkdir()
    (place / "below" / "a.nbi").write_bytes(b"1")
    (place / "below").chmod(0o555)
    copy = kept.prepared(place, "copies", 3)
    assert copy is not None
    assert copy != place
    assert (copy / "below" / "a.nbi").read_bytes() == b"1"
    (copy / "below" / "b.nbi").write_bytes(b"2")
    assert copy.stat().st_mode & 0o077 == 0  # of nobody else, as it is code
    assert kept.prepared(place, "copies", 3) == copy
    assert not caplog.text
    assert kept.prepared(empty, "copies", 3) is None
    assert "compiling copies: about 3 seconds" in caplog.text


def test_without_room_for_a_copy_they_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "writable", lambda place: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    (tmp_path / "a.nbi").write_bytes(b"1")
    assert kept.prepared(tmp_path, "roomless", 3) is None


def test_one_user_compiles_for_another(tmp_path: Path) -> None:
    """As where ``nucleate warm`` has made the image of a container that another user runs."""
    environment = {**os.environ, "NUCLEATE_CACHE": str(tmp_path / "kernels"), "TMPDIR": str(tmp_path)}

    def run(who: str) -> tuple[int, Path, str]:
        command = [sys.executable, "-c", LOAD, who]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
        hits, place = done.stdout.split()
        return int(hits), Path(place), done.stderr

    hits, place, said = run("writer")
    assert (hits, place.parent) == (0, tmp_path / "kernels")
    assert "compiling" in said
    hits, copy, said = run("reader")
    assert (hits, said) == (1, "")
    assert copy.parent == tmp_path
    assert not copy.exists()


def test_a_copy_of_the_sources_elsewhere_has_the_same_kernels(tmp_path: Path) -> None:
    """As another environment, a fresh checkout, a new version whose kernels are the old ones."""
    hits = []
    for name in ("one", "two"):
        source = tmp_path / name / "inside" / "a.py"
        source.parent.mkdir(parents=True)
        source.write_text("def twice(x):\n    return x * 2\n")
        kernel = compiled(run_path(str(source))["twice"], numba.njit, tmp_path / "kernels", "twice", 1)
        assert kernel(21) == 42
        hits.append(sum(kernel.stats.cache_hits.values()))
    assert hits == [0, 1]


def when(patience: Patience, work: int = 1, most: int = 100) -> int:
    """How much work was done when the patience ended."""
    while not patience.ends(work):
        assert patience.done < most
    return patience.done


@pytest.mark.parametrize(("there", "end"), [(True, 5), (False, 20)])
def test_patience_is_shorter_where_kernels_are_kept(there: bool, end: int, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / ("some.nbi" if there else "some.txt")).touch()
    assert kept.holds(tmp_path) == there
    patience = Patience(lambda: tmp_path, 5, 20)
    assert when(patience) == end
    assert patience.ends(0)
    assert patience.ends(1)
    assert when(Patience(lambda: tmp_path, 5, 20), 100, 1000) == 100


def test_a_folder_that_is_not_there_holds_none(tmp_path: Path) -> None:
    assert not kept.holds(tmp_path / "none")
    assert when(Patience(lambda: tmp_path / "none", 1, 3)) == 3


def test_the_disk_is_asked_once_and_not_before_it_matters(tmp_path: Path) -> None:
    asked = []
    patience = Patience(lambda: asked.append(patience.done) or tmp_path, 5, 20)
    assert when(patience) == 20
    assert asked == [5]
