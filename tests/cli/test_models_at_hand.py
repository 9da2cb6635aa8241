"""``nucleate list`` and ``nucleate pull`` with a hub on this machine; the names that they print are those of -m."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, fake_hub
from huggingface_hub import constants

import nucleate as nc
from nucleate.cli.main import main
from nucleate.models.gguf.gguf_file import find_gguf, hub_files, local_path
from nucleate.models.loader import EMBEDDED, resolve
from nucleate.models.model_store import read_hub_name, stored_models

TINY = {file.name: file.read_bytes() for file in EMBEDDED.iterdir() if file.is_file()}
LARGE = b"GGUF" + bytes(range(256)) * 100_000  # 25 MB: the hub's client writes 10 MB at a time
REPOSITORIES = {
    "me/tiny": TINY,
    "me/several": {
        "a-Q8_0.gguf": b"GGUF8",
        "a-Q4_K_M.gguf": b"GGUF4",
        "b/c-Q2_K-00001-of-00002.gguf": b"GGUF1",
        "b/c-Q2_K-00002-of-00002.gguf": b"GGUF22",
        "chat_template.jinja": b"{{ messages[0].content }}",
    },
    "me/one": {"README.md": b"x", "only.gguf": b"GGUF"},
    "me/unclear": {"x-IQ1.gguf": b"GGUF", "y-IQ2.gguf": b"GGUF"},
    "me/text": {"README.md": b"x", "weights.safetensors": b"no config"},
    "me/large": {"m-Q4_0.gguf": LARGE},
}


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with fake_hub(REPOSITORIES) as found:
        yield found


def nucleate(hub: FakeHub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **hub.environment, "HF_HOME": str(home), "HF_TOKEN": "hf_secret"}
    command = [sys.executable, "-m", "nucleate", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "no cache"))


def folder(path: Path, **files: bytes) -> Path:
    path.mkdir(parents=True)
    for name, data in files.items():
        (path / name.replace("__", ".")).write_bytes(data)
    return path


@pytest.mark.usefixtures("no_cache")
def test_models_in_folders_and_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = folder(tmp_path / "1", m__gguf=b"GGUF", mmproj__gguf=b"GGUF", notes__txt=b"x"), tmp_path / "2"
    folder(second, m__gguf=b"GGUF other")
    folder(first / "own" / "tiny", **{name.replace(".", "__", 1): data for name, data in TINY.items()})
    (first / "own" / "tiny" / "tokenizer_config.json").write_bytes(TINY["tokenizer_config.json"])
    folder(first / "own" / "empty", config__json=b"{}")
    deep = folder(first / "a" / "b" / "c", d__gguf=b"GGUF")
    folder(deep / "e", too_deep__gguf=b"GGUF")
    split = folder(tmp_path / "3")
    for number in (1, 2):
        (split / f"s-0000{number}-of-00002.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("NUCLEATE_MODELS", os.pathsep.join(map(str, (first, second, split, tmp_path / "none"))))
    found = stored_models()
    assert [(one.name, one.kind, one.size) for one in found] == [
        ("nucleate-tiny", "embedded", len(TINY["model.safetensors"])),
        ("a/b/c/d.gguf", "GGUF", 4),
        ("m.gguf", "GGUF", 4),
        ("own/tiny", "folder", len(TINY["model.safetensors"])),
        ("s-00001-of-00002.gguf", "GGUF", 8),
    ]
    for one in found[1:]:
        assert one.path == local_path(one.name)
    assert find_gguf("m") == find_gguf("m.gguf") == first / "m.gguf"
    assert resolve("own/tiny") == first / "own" / "tiny"
    assert resolve("nucleate-tiny") == EMBEDDED
    assert nc.LLM("own/tiny").folder == first / "own" / "tiny"
    assert main(["list"]) == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == ["name", *(one.name for one in found)]
    assert "NUCLEATE_MODELS: there is no folder" in printed.err
    monkeypatch.chdir(second)
    assert find_gguf("m.gguf") == Path("m.gguf")  # a path that exists has precedence
    monkeypatch.setenv("NUCLEATE_MODELS", "")
    assert [one.name for one in stored_models()] == ["nucleate-tiny"]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("a/b", ("a/b", None)),
        ("a/b:Q4_K_M", ("a/b", "Q4_K_M")),
        ("a/b:sub/x-Q4.gguf", ("a/b", "sub/x-Q4.gguf")),
        ("hf.co/a/b:Q4", ("a/b", "Q4")),
        ("https://huggingface.co/a/b", ("a/b", None)),
    ],
)
def test_names_on_the_hub(given: str, read: tuple[str, str | None]) -> None:
    assert read_hub_name(given) == read


@pytest.mark.parametrize("given", ["", "a", "a/b/c", "a/b:", "a/b:c:d", "http://evil/a/b", "a/b\n"])
def test_other_names_are_errors(given: str) -> None:
    with pytest.raises(nc.ParameterError, match="model must be OWNER/NAME or OWNER/NAME:FILE, got"):
        read_hub_name(given)


def test_the_files_of_a_model_begin_with_its_first() -> None:
    listed = ["x-Q4-00002-of-00002.gguf", "chat_template.jinja", "x-Q4-00001-of-00002.gguf", "x-Q8.gguf"]
    assert hub_files("a/b", listed, "Q4") == [listed[2], listed[0], listed[1]]


@pytest.mark.slow
def test_pull_downloads_what_its_name_says(hub: FakeHub, tmp_path: Path) -> None:
    for name, printed in {
        "me/tiny": r"me/tiny: folder, 6\.\d MB, checksums verified",
        "me/several": "me/several:Q4_K_M: GGUF, 0.0 MB, checksums verified",
        "me/several:q8_0": "me/several:Q8_0: GGUF, 0.0 MB, checksums verified",
        "hf.co/me/several:b/c-Q2_K.gguf": "me/several:Q2_K: GGUF, 0.0 MB, checksums verified",
        "me/one": "me/one:only: GGUF, 0.0 MB, checksums verified",
    }.items():
        done = nucleate(hub, tmp_path, "pull", name)
        assert re.fullmatch(printed, done.stdout.strip()), done
        assert done.stderr.rstrip().endswith(f"nucleate chat -m {done.stdout.partition(': ')[0]}")
    for name, status, words in (
        ("me/unclear", 1, "several GGUF models; choose one as me/unclear:FILE: x-IQ1.gguf, y-IQ2.gguf"),
        ("me/several:Q3_K", 1, "me/several has no GGUF model 'Q3_K'; it has a-Q4_K_M.gguf"),
        ("me/text", 1, "me/text has no GGUF files, and no config.json with weights"),
        ("me/nothing", 1, "the hub has no repository me/nothing, or it is private"),
        ("tiny", 2, "model must be OWNER/NAME or OWNER/NAME:FILE, got 'tiny'"),
    ):
        done = nucleate(hub, tmp_path, "pull", name)
        assert (done.returncode, done.stdout) == (status, "")
        assert words in done.stderr
    listed = nucleate(hub, tmp_path, "list").stdout
    names = [line.split()[0] for line in listed.splitlines()[1:]]
    several = ["me/several:Q4_K_M", "me/several:Q8_0", "me/several:Q2_K"]
    assert names == ["nucleate-tiny", "me/one:only", *several, "me/tiny"]
    done = nucleate(hub, tmp_path, "generate", "-m", "me/tiny", "Once", "--max-tokens", "3")
    assert (done.returncode, bool(done.stdout.strip())) == (0, True)
    template = [*tmp_path.rglob("chat_template.jinja")]
    assert [one.read_text() for one in template] == ["{{ messages[0].content }}"]


@pytest.mark.slow
def test_pull_resumes_and_checks_the_sum(hub: FakeHub, tmp_path: Path) -> None:
    hub.cut_after = 15_000_000
    hub.requests.clear()
    done = nucleate(hub, tmp_path / "1", "pull", "me/large")
    assert "me/large:Q4_0: GGUF, 25.6 MB, checksums verified" in done.stdout, done.stderr
    assert any(one.endswith("storage/me/large/m-Q4_0.gguf from 10485760") for one in hub.requests)
    assert not hub.leaked
    hub.corrupt = True
    done = nucleate(hub, tmp_path / "2", "pull", "me/large")
    assert (done.returncode, done.stdout) == (1, "")
    assert "the checksum of m-Q4_0.gguf is not that of the hub; deleted" in done.stderr
    assert not [one for one in (tmp_path / "2").rglob("*") if one.is_file() and one.stat().st_size > 1_000_000]
    assert nucleate(hub, tmp_path / "2", "pull", "me/large").returncode == 0


@pytest.mark.slow
def test_a_download_that_ended_is_resumed_by_the_next_pull(hub: FakeHub, tmp_path: Path) -> None:
    hub.cut_after = 15_000_000
    environment = {**os.environ, **hub.environment, "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "nucleate", "pull", "me/large"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "Error while downloading" in line:
                process.kill()
    [part] = tmp_path.rglob("*.part")
    assert part.stat().st_size == 10_485_760
    hub.requests.clear()
    assert "checksums verified" in nucleate(hub, tmp_path, "pull", "me/large").stdout
    assert any(one.startswith("GET ") and one.endswith(" from 10485760") for one in hub.requests)
    assert not [*tmp_path.rglob("*.part")]


@pytest.mark.slow
def test_without_a_hub(tmp_path: Path) -> None:
    with fake_hub({}) as gone:
        pass
    done = nucleate(gone, tmp_path, "pull", "me/tiny")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("nucleate: cannot list the files of me/tiny: ")
