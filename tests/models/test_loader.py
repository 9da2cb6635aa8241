"""Finding models and choosing a runtime; errors are one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf_files import random_folder
from huggingface_hub import constants

import nucleate as nc
from nucleate.models import loader, paged_cache
from nucleate.models.loader import EMBEDDED, load, resolve
from nucleate.models.model_files import recommended
from nucleate.models.protocol import ModelError
from nucleate.models.transformers import transformers_model
from nucleate.models.transformers.transformers_model import check_device
from nucleate.parameters.parameter import ParameterError


def test_none_is_the_embedded_model_and_folders_are_used_directly(tmp_path: Path) -> None:
    assert resolve(None) == EMBEDDED
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == resolve(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (name, r"not a model folder|no model folder|no config\.json")
            for name in ("missing", "./missing", "../x", "")
        ),
        *((name, "no model folder") for name in ("/missing/folder", "a/b/c")),
        ("gpt2", "no model folder 'gpt2' .the Hugging Face id of that name is now 'openai-community/gpt2'"),
        ("distilgpt2", "is now 'distilbert/distilgpt2'"),
        ("gpt3", "there is no model folder 'gpt3' .a Hugging Face id has the form 'owner/name'"),
    ],
)
def test_a_missing_folder(name: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message):
        resolve(name)


def test_a_folder_without_config(tmp_path: Path) -> None:
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
def test_invalid_paths_are_not_looked_up_on_the_hub(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EMBEDDED.parent)
    with pytest.raises(ModelError, match=f"is not a model folder: .*{message}"):
        resolve(name)


def test_a_failed_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="no folder 'owner/name', and the download from the hub failed"):
        resolve("owner/name")


def test_auto_chooses_numpy_for_the_embedded_model() -> None:
    assert load(EMBEDDED).runtime == "numpy float32"
    assert load(EMBEDDED, device="cpu", dtype="float32").runtime == "numpy float32"


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "bfloat16"), ("cpu", "float16")])
def test_auto_chooses_torch_for_types_without_numpy_support(device: str, dtype: str) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'torch'")
    assert load(EMBEDDED, device, dtype).runtime == f"torch cpu {dtype}"


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "auto"), ("auto", "float16")])
def test_numpy_rejects_unsupported_devices_and_types(device: str, dtype: str) -> None:
    with pytest.raises(ModelError, match=r"device .cpu. and dtype .float32. only"):
        load(EMBEDDED, device, dtype, runtime="numpy")


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:1x", "CPU", "cpu:0", "", None, 0])
def test_an_unknown_device_is_found_without_torch(device: Any) -> None:
    code = (
        f"import sys, nucleate as nc\ntry: nc.LLM('owner/name', device={device!r})\nexcept nc.ParameterError as error: "
    )
    code += "print(error, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"device must be auto, cpu, cuda, cuda:N, xpu, xpu:N or mps, got {device!r} False\n"


@pytest.mark.parametrize("device", ["cuda:99", "xpu:99"])
def test_a_device_that_is_not_there_is_found_before_the_model(device: str) -> None:
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    with pytest.raises(
        ParameterError, match=f"device '{device}' is not available: torch .*; allowed: auto, cpu, "
    ) as error:
        nc.LLM("owner/name", device=device)  # there is no such model, and no download begins
    assert error.value.field == "device"


@pytest.mark.parametrize(
    ("device", "built", "count", "message"),
    [
        ("cuda", None, 0, r"device 'cuda' is not available: torch 2\.9 is built without CUDA"),
        ("cuda", "12.8", 0, "device 'cuda' is not available: torch finds no cuda devices;"),
        ("cuda:1", "12.8", 1, "device 'cuda:1' is not available: torch finds 1 cuda device;"),
        ("cuda:2", "12.8", 2, "device 'cuda:2' is not available: torch finds 2 cuda devices;"),
        ("cuda:1", "12.8", 2, None),
        ("cuda", "12.8", 1, None),
    ],
)
def test_why_a_device_is_not_available(
    device: str, built: str | None, count: int, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = SimpleNamespace(
        cuda=SimpleNamespace(device_count=lambda: count),
        version=SimpleNamespace(cuda=built, hip=None),
        __version__="2.9",
    )
    monkeypatch.setattr(transformers_model, "import_torch", lambda: torch)
    if message is None:
        check_device(device)
    else:
        with pytest.raises(ParameterError, match=message):
            check_device(device)


@pytest.fixture
def quantized(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes the embedded model with other types of weights and another quantization_config."""
    torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
    pytest.importorskip("transformers", reason="needs the extra 'torch'")
    from safetensors.torch import load_file, save_file

    def write(dtype: str, quantization: Any = None, scale: str = "") -> Path:
        shutil.copytree(EMBEDDED, tmp_path, dirs_exist_ok=True)
        weights = load_file(EMBEDDED / "model.safetensors")
        for name in [name for name in weights if "_proj" in name]:
            weights[name] = weights[name].to(getattr(torch, dtype))
            if scale:
                weights[name.removesuffix("weight") + scale] = torch.ones(1)
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((EMBEDDED / "config.json").read_text())
        if quantization is not None:
            config["quantization_config"] = quantization
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def test_auto_chooses_torch_for_float8_weights(quantized: Callable[..., Path]) -> None:
    folder = quantized("float8_e4m3fn")
    assert load(folder).runtime.startswith("torch cpu ")  # bfloat16 where the CPU has instructions for it
    with pytest.raises(ModelError, match="its weights have the type F8_E4M3, not BF16, F16, F32"):
        load(folder, runtime="numpy")


@pytest.mark.parametrize(
    ("dtype", "quantization", "scale", "numpy_message", "torch_message"),
    [
        ("int8", None, "", "the type I8, not", r"quantized \(.*, I8\), but config.json has no quantization_config"),
        (
            "float8_e4m3fn", None, "weight_scale", "the type F8_E4M3, not",
            r"quantized \(.*, F\d.*\), but config.json has no quantization_config",
        ),
        ("float8_e4m3fn", {"quant_method": "fbgemm_fp8"}, "weight_scale", r"quantized \(fbgemm_fp8\)", "requires"),
        ("int8", {"quant_method": "compressed-tensors"}, "", r"quantized \(compressed-tensors\)", "required"),
        ("int8", "int8", "", r"quantized \(int8\)", "cannot load the model"),
    ],
)  # fmt: skip
def test_quantized_weights_that_cannot_be_loaded_are_one_error(
    dtype: str, quantization: Any, scale: str, numpy_message: str, torch_message: str, quantized: Callable[..., Path]
) -> None:
    folder = quantized(dtype, quantization, scale)
    for runtime, message in (("numpy", numpy_message), ("auto", torch_message)):
        with pytest.raises(ModelError, match=message) as caught:
            load(folder, device="cpu", runtime=runtime)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("has", "saved", "expected"),
    [
        (True, "bfloat16", "bfloat16"),
        (False, "bfloat16", "float32"),
        (True, "float16", "float32"),
        (True, "float32", "float32"),
    ],
)
def test_bfloat16_stays_where_the_cpu_has_instructions_for_it(
    has: bool, saved: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(transformers_model, "has_bfloat16", lambda: has)
    random_folder("llama", tmp_path).to(getattr(torch, saved)).save_pretrained(tmp_path)
    assert load(tmp_path, "cpu", runtime="torch").runtime == f"torch cpu {expected}"
    assert load(tmp_path, "cpu", "float32", "torch").runtime == "torch cpu float32"


def test_unknown_runtimes_are_rejected() -> None:
    with pytest.raises(ParameterError, match="auto, numpy, torch"):
        load(EMBEDDED, runtime="jax")
    with pytest.raises(ParameterError, match="bfloat16"):
        load(EMBEDDED, dtype="int7")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"nonsense", b"[]", b"null", b"\xff\xfe"])
def test_a_file_without_a_json_object_is_one_error(name: str, content: bytes, tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=rf"/{name} (is not valid JSON|must contain a JSON object)"):
        (load if name == "config.json" else recommended)(tmp_path)


def test_the_embedded_model_is_small() -> None:
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) <= 8_000_000


# the default size of the KV cache


def test_free_memory_is_between_zero_and_the_total() -> None:
    assert 1 << 20 < paged_cache.free_memory() < 1 << 50


def test_free_memory_without_proc_meminfo(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 10}.__getitem__)
    assert paged_cache.free_memory() == 40960
    monkeypatch.delattr(os, "sysconf")
    assert paged_cache.free_memory() == paged_cache.DEFAULT_FREE_MEMORY


def test_the_kv_cache_takes_at_most_a_quarter(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "free_memory", lambda: 1 << 20)
    block = 16 * llm.model.token_bytes
    assert loader.runner_of(llm.model, tokens=32).blocks == 2
    assert loader.runner_of(llm.model).blocks == (1 << 18) // block


def test_the_kv_cache_is_not_larger_than_its_sequences(llm: nc.LLM) -> None:
    assert llm.new_engine(max_num_seqs=2).stats.num_kv_blocks == 2 * 1024 // 16
    assert llm.new_engine(kv_cache_memory=1 << 20).stats.num_kv_blocks < 100
    with pytest.raises(nc.ModelError, match="needs at least"):
        llm.new_engine(kv_cache_memory=1000)
    with pytest.raises(nc.ParameterError, match="kv_cache_memory must be an integer >= 1"):
        llm.new_engine(kv_cache_memory=0)
