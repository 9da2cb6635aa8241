"""The examples of docs/other_engines.md run, with the engines that are installed, and print the text of LLM."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_interfaces
import numpy as np
import pytest

import nucleate as nc
from nucleate.models.loader import EMBEDDED

PAGE = (Path(__file__).parents[2] / "docs" / "other_engines.md").read_text("utf-8")
BLOCKS = {
    heading: re.search(r"^```python\n(.*?)^```", part, re.DOTALL | re.MULTILINE)
    for heading, part in re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
}


def expected() -> str:
    params = nc.SamplingParams(temperature=0.9, dry_multiplier=0.8, xtc_probability=0.5, seed=7, max_tokens=20)
    return nc.LLM().generate("Once upon a time", params)[0].text


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the example of an engine in a folder with the embedded model, and return what it prints."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EMBEDDED, "model")

    def runner(heading: str) -> str:
        block = BLOCKS[heading]
        assert block is not None
        assert len([line for line in block[1].splitlines() if line]) <= 13
        capsys.readouterr()
        exec(compile(block[1], heading, "exec"), {"__name__": "example"})
        return capsys.readouterr().out.rstrip("\n")

    return runner


def test_every_engine_has_an_example_and_an_extra() -> None:
    extras = re.findall(r"^pip install -e '\.\[(\S+)\]'", PAGE, re.MULTILINE)
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    assert len(BLOCKS) == len(extras) == 5
    assert all(BLOCKS.values())
    assert all(f"\n{extra} = [" in text for extra in extras)


@pytest.mark.slow
def test_llama_cpp_python(run: Any) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (make setup-gguf)")
    from gguf_files import EXACT, write_gguf

    write_gguf().write(EMBEDDED, Path("model.gguf"), "f32")
    fields = {"temperature": 0.9, "dry_multiplier": 0.8, "xtc_probability": 0.5, "seed": 7, "max_tokens": 20}
    [made] = nc.LLM("model.gguf", gguf_options=EXACT).generate("Once upon a time", **fields)
    assert run("llama-cpp-python") == made.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlx_lm(run: Any) -> None:
    mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed (the extra 'mlx-lm')")
    import mlx.core as mx

    load = mlx_lm.load

    def in_float32(path: str) -> Any:
        model, tokenizer = load(path)
        model.set_dtype(mx.float32)
        return model, tokenizer

    mlx_lm.load = in_float32
    try:
        assert run("mlx-lm") == expected()
    finally:
        mlx_lm.load = load


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_onnxruntime_genai(run: Any) -> None:
    for name in ("onnxruntime_genai", "torch", "transformers", "onnx", "onnx_ir"):
        pytest.importorskip(name, reason=f"needs {name}")
    options = ["-i", "model", "-o", "model-onnx", "-p", "fp32", "-e", "cpu", "-c", "cache"]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", *options]
    subprocess.run(command, check=True, capture_output=True)
    assert run("onnxruntime-genai") == expected()


@pytest.mark.slow
def test_vllm(run: Any) -> None:
    """With a model runner that makes vLLM's calls, in place of vLLM."""
    pytest.importorskip("torch", reason="vLLM passes tensors")
    from fake_engines import FakeRequest, SecondRunner

    class FakeLLM:
        def __init__(self, model: str, dtype: str) -> None:
            own = nc.LLM(model)
            kind = SimpleNamespace(model=model, tokenizer=model, get_vocab_size=lambda: own.model.vocab_size)
            config = SimpleNamespace(model_config=kind)
            self.tokenizer, self.runner = own.tokenizer, SecondRunner(adapter, config, np.random.default_rng(0))

        def generate(self, prompt: str, params: Any) -> Any:
            adapter.NucleateLogitsProcessor.validate_params(params)
            request = FakeRequest("0", self.tokenizer.encode(prompt), params, params.max_tokens)
            self.runner.run([request])
            text = self.tokenizer.decode(request.prompt + request.output)[len(prompt) :]
            return [SimpleNamespace(outputs=[SimpleNamespace(text=text)])]

    with engine_interfaces.vllm_interfaces(real=False) as adapter:
        sys.modules["vllm"].LLM = FakeLLM  # type: ignore[attr-defined]
        assert run("vLLM") == expected()


@pytest.mark.slow
def test_sglang(run: Any) -> None:
    """With a scheduler that makes SGLang's calls, in place of SGLang."""
    pytest.importorskip("torch", reason="SGLang passes tensors")
    from fake_engines import FakeRequest, SGLangRunner

    class FakeEngine:
        def __init__(self, model_path: str, dtype: str, enable_custom_logit_processor: bool) -> None:
            server = SimpleNamespace(model_path=model_path, tokenizer_path=None)
            sys.modules["sglang.srt.runtime_context"] = SimpleNamespace(get_server_args=lambda: server)  # type: ignore[assignment]
            self.tokenizer = nc.LLM(model_path).tokenizer

        def generate(self, prompt: str, params: Any, custom_logit_processor: str) -> Any:
            own = {"temperature": 1.0, "top_p": 1.0, "top_k": 1 << 30, "min_p": 0.0, "n": 1, "sampling_seed": None}
            given = SimpleNamespace(**own, custom_params=params["custom_params"])
            request = FakeRequest("0", self.tokenizer.encode(prompt), given, params["max_new_tokens"])
            runner = SGLangRunner(adapter, np.random.default_rng(0))
            assert runner.text == custom_logit_processor
            runner.run([request])
            return {"text": self.tokenizer.decode(request.prompt + request.output)[len(prompt) :]}

    with engine_interfaces.sglang_interfaces(real=False) as adapter:
        sys.modules["sglang"].Engine = FakeEngine  # type: ignore[attr-defined]
        assert run("SGLang") == expected()
