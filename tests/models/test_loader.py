"""A model is found, or a line says why not; the runtime is the one that suits it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nucleate.models.loader import EMBEDDED, load, recommended, resolve
from nucleate.models.protocol import ModelError
from nucleate.parameters.parameter import ParameterError


def test_none_is_the_embedded_model_and_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve(None) == EMBEDDED
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == resolve(tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["missing", "./missing", "/missing/folder", "a/b/c", "../x", ""])
def test_a_missing_folder_is_said_so(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"not a model folder|no model folder|no config\.json"):
        resolve(name)


def test_a_folder_without_config_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not a model folder: it has no config\.json"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("embedded/config.json", "it is a file"),
        ("a" * 5000, "File name too long"),
        ("~nobody-here/x", "home directory"),
    ],
)
def test_what_cannot_be_a_folder_is_said_so_and_not_looked_for_on_the_hub(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EMBEDDED.parent)
    with pytest.raises(ModelError, match=f"is not a model folder: .*{message}"):
        resolve(name)


def test_an_id_that_cannot_be_downloaded_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="no folder 'owner/name', and the download from the hub failed"):
        resolve("owner/name")


def test_auto_chooses_numpy_for_the_embedded_model() -> None:
    assert load(EMBEDDED).runtime == "numpy float32"
    assert load(EMBEDDED, device="cpu", dtype="float32").runtime == "numpy float32"


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "bfloat16"), ("cpu", "float16")])
def test_auto_chooses_torch_where_numpy_has_no_such_type(device: str, dtype: str) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'torch'")
    assert load(EMBEDDED, device, dtype).runtime == f"torch cpu {dtype}"


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "auto"), ("auto", "float16")])
def test_numpy_refuses_what_it_has_not(device: str, dtype: str) -> None:
    with pytest.raises(ModelError, match=r"device .cpu. and dtype .float32. only"):
        load(EMBEDDED, device, dtype, runtime="numpy")


@pytest.mark.parametrize(("device", "dtype"), [("gpu", "auto"), ("cuda:99", "auto")])
def test_torch_errors_are_one_line(device: str, dtype: str) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'torch'")
    with pytest.raises(ModelError) as caught:
        load(EMBEDDED, device, dtype, runtime="torch")
    assert "\n" not in str(caught.value)


def test_an_unknown_runtime_is_refused() -> None:
    with pytest.raises(ParameterError, match="auto, numpy, torch"):
        load(EMBEDDED, runtime="jax")
    with pytest.raises(ParameterError, match="bfloat16"):
        load(EMBEDDED, dtype="int7")


def test_recommended_parameters_are_those_of_the_folder(tmp_path: Path) -> None:
    assert recommended(EMBEDDED) == {"temperature": 0.7, "top_p": 0.9, "top_k": 50}
    assert recommended(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.1}))  # do_sample is not set
    assert recommended(tmp_path) == {}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"nonsense", b"[]", b"null", b"\xff\xfe"])
def test_a_file_that_holds_no_json_object_is_one_clear_error(name: str, content: bytes, tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=rf"/{name} (is not valid JSON|must contain a JSON object)"):
        (load if name == "config.json" else recommended)(tmp_path)


def test_do_sample_is_true_or_false(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": "false", "temperature": 0.5}')
    with pytest.raises(ModelError, match="do_sample must be true or false, got 'false'"):
        recommended(tmp_path)


def test_the_embedded_model_is_small_and_says_where_it_comes_from() -> None:
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) <= 8_000_000
    card = (EMBEDDED / "README.md").read_text("utf-8")
    for fact in ("CDLA-Sharing-1.0", "CC BY", "public domain", "nats per token", "per byte"):
        assert fact in card
