"""``nucleate detect`` and the watermark flags: exit status, output, key files and errors."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nucleate.cli.main import main

SECRET = "a key for the command line"


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("NUCLEATE_WATERMARK_KEY_FILE", raising=False)
    path = tmp_path / "key"
    path.write_text(SECRET)
    path.chmod(0o600)
    return str(path)


def generated(capsys: pytest.CaptureFixture[str], *flags: str, tokens: int = 150) -> str:
    assert (
        main(["generate", "Once upon a time", "--seed", "4", "--max-tokens", str(tokens), "--ignore-eos", *flags]) == 0
    )
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kgw(delta=4)", "gumbel", "synthid"])
def test_generated_text_is_detected(
    key: str, kind: str, tmp_path: Path, run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = kind.partition("(")[0]
    marked, plain = tmp_path / "marked", tmp_path / "plain"
    marked.write_text(generated(capsys, "--watermark", kind, "--watermark-key", key), "utf-8")
    plain.write_text(generated(capsys), "utf-8")
    assert run("detect", str(marked), "--watermark", name, "--watermark-key", key).out.startswith("detected: p-value ")
    monkeypatch.setenv("NUCLEATE_WATERMARK_KEY_FILE", key)
    found = json.loads(run("detect", str(plain), "--watermark", name, "--json", status=3).out)
    assert not found["detected"]
    assert found["p_value"] > 1e-3
    assert 50 < found["num_scored"] <= found["num_tokens"]
    assert main(["detect", str(plain), "--watermark", name, "--threshold", "0.9999999"]) == 0


def test_any_text_has_a_result(key: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "a", "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich 🥊 \U0010ffff\n" * 3):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        found = json.loads(run("detect --watermark-key", key, "--json", status=3).out)
        assert found["num_tokens"] >= bool(text)
        assert text or (found["p_value"], found["num_scored"]) == (1.0, 0)


def test_errors(key: str, tmp_path: Path, run: Any) -> None:
    short, text = tmp_path / "short", tmp_path / "text"
    short.write_text("short key")
    text.write_text("Hello")
    (tmp_path / "latin").write_bytes(b"\xe9")
    for arguments, message in {
        (str(text),): "a watermark needs a key: --watermark-key FILE",
        (str(text), "--watermark-key", str(short)): "has 9 bytes",
        (str(text), "--watermark-key", str(tmp_path / "none")): "No such file",
        (str(text), "--watermark-key", key, "--watermark", "kwg"): "did you mean kgw?",
        (str(text), "--watermark-key", key, "--threshold", "2"): "--threshold must be a number > 0 and < 1",
        (str(tmp_path / "latin"), "--watermark-key", key): "is not UTF-8",
    }.items():
        assert message in run("detect", *arguments, status=2).err
    assert main(["detect", str(tmp_path / "none"), "--watermark-key", key]) == 1
    for arguments, message in {
        ("--watermark", "kgw"): "a watermark needs a key",
        ("--watermark-key", key): "--watermark-key needs --watermark",
        ("--watermark", "kgw(delta=-1)", "--watermark-key", key): "delta must be a number >= 0",
    }.items():
        assert message in run("generate Once", *arguments, status=2).err
