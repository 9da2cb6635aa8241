"""nucleate inside onnxruntime-genai: the tokens of LLM, seed for seed, with the embedded model as ONNX."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.models.loader import EMBEDDED
from nucleate.sampling import stages

og = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed (its extra)")

from nucleate.integrations.onnxruntime_genai import append_next, generate_tokens, model_sampler  # noqa: E402

COUNT = 20
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 0},
    {"repetition_penalty": 1.3, "dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"mirostat_tau": 3.0, "bad_words": [" was"], "min_tokens": 20},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("torch", "transformers", "onnx", "onnx_ir"):
        pytest.importorskip(name, reason=f"the export needs {name}")
    made = tmp_path_factory.mktemp("onnx")
    options = ["-i", EMBEDDED, "-o", made, "-p", "fp32", "-e", "cpu", "-c", tmp_path_factory.mktemp("cache")]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", *map(str, options)]
    subprocess.run(command, check=True, capture_output=True)
    return made


@pytest.mark.filterwarnings("ignore")
def test_the_tokens_are_those_of_llm(folder: Path) -> None:
    model, sampler, llm = og.Model(str(folder)), model_sampler(folder), nc.LLM()
    prompt = llm.tokenizer.encode("Once upon a time")
    for fields in FIELDS:
        params = nc.SamplingParams(**fields, seed=5)
        wanted = list(llm.generate([prompt], params.replace(max_tokens=COUNT, ignore_eos=False))[0].token_ids)
        found = [*islice(generate_tokens(model, prompt, params, sampler, len(prompt) + COUNT), COUNT)]
        assert found == wanted, fields
    assert len(sampler) == 0
    own = nc.load_sampler()
    assert sampler.stages(sampler.add()) == own.stages(own.add())
    assert sampler.eos_token_ids == own.eos_token_ids


class Generator:
    """A generator with these logits."""

    def __init__(self, logits: Any) -> None:
        self.logits, self.tokens = logits, list[int]()

    def get_logits(self) -> Any:
        return self.logits

    def append_tokens(self, tokens: Any) -> None:
        assert tokens.dtype == np.int32
        self.tokens += tokens.tolist()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    sampler = nc.load_sampler()
    row, logits = sampler.add(nc.SamplingParams(temperature=0)), np.zeros((1, 1, sampler.vocab_size), np.float32)
    logits[0, 0, 7] = 1
    generator = Generator(logits)
    assert append_next(generator, sampler, row) == 7
    assert generator.tokens == [7]
    with pytest.raises(ValueError, match="the generator must have one sequence"):
        append_next(Generator(np.zeros((2, 1, 5))), sampler, row)
    logits[0, 0, 3] = np.nan
    with pytest.raises(nc.LogitsError, match="NaN at token 3"):
        append_next(generator, sampler, row)
    assert generator.tokens == [7]
    for prompt, most in (([], 5), ([1, 2], 2)):
        with pytest.raises(nc.ParameterError, match="max_length must be greater than"):
            next(generate_tokens(None, prompt, None, sampler, most))
    with pytest.raises(nc.ParameterError, match="stop is for LLM"):
        next(generate_tokens(None, [1], nc.SamplingParams(stop=["x"]), sampler, 5))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((EMBEDDED / name).read_bytes())
    search = {"do_sample": False, "temperature": 0.3, "top_k": 3, "repetition_penalty": 1.1}
    (tmp_path / "genai_config.json").write_text(
        json.dumps({"model": {"vocab_size": 4096, "eos_token_id": 0}, "search": search})
    )
    own = model_sampler(tmp_path)
    assert own.stages(own.add()) == (stages.Repetition(1.1), stages.Gumbel())
    (tmp_path / "genai_config.json").write_text("{}")
    with pytest.raises(nc.ModelError, match="has no vocab_size"):
        model_sampler(tmp_path)
