"""nucleate inside llama-cpp-python: the tokens of LLM with the same file, seed for seed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.models.loader import EMBEDDED

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (make setup-gguf)")

from gguf_files import EXACT, write_gguf  # noqa: E402

from nucleate.integrations.llama_cpp import SamplingLogitsProcessor, custom_sampler, generate_tokens, model_sampler  # noqa: E402

COUNT = 24
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 0},
    {"repetition_penalty": 1.3, "dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05, "min_p": 0.02, "order": "llama.cpp"},
    {"mirostat_tau": 3.0, "bad_words": [" was"]},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf().write(EMBEDDED, found, "f32")
    return found


@pytest.fixture(scope="module")
def llama(path: Path) -> Iterator[Any]:
    made = llama_cpp.Llama(str(path), n_ctx=256, flash_attn=True, verbose=False, n_threads=1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def sampler(llama: Any) -> nc.Sampler:
    return model_sampler(llama)


@pytest.fixture(scope="module")
def expected(path: Path) -> Any:
    llm = nc.LLM(path, gguf_options=EXACT)

    def tokens(prompt: list[int], fields: dict[str, Any]) -> list[int]:
        params = nc.SamplingParams(**fields, max_tokens=COUNT)
        return list(llm.generate([prompt], params)[0].token_ids)

    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: next(iter(fields)))
def test_all_forms_sample_the_tokens_of_llm(
    llama: Any, sampler: nc.Sampler, expected: Any, fields: dict[str, Any]
) -> None:
    prompt = llama.tokenize(b"Once upon a time")
    params = nc.SamplingParams(**fields, seed=7)
    wanted = expected(prompt, {**fields, "seed": 7})
    assert [*islice(generate_tokens(llama, prompt, params, sampler), COUNT)] == wanted

    processor = SamplingLogitsProcessor(llama, params, sampler)
    processors = llama_cpp.LogitsProcessorList([processor])
    made = llama.generate(prompt, temp=0.8, repeat_penalty=1.3, logits_processor=processors)
    assert [*islice(made, len(wanted))] == wanted

    chain = llama_cpp._internals.LlamaSampler()
    chain.add_custom(custom_sampler(llama, params, prompt, sampler))
    llama.reset()
    llama.eval(prompt)
    tokens = []
    for _ in wanted:
        tokens.append(chain.sample(llama._ctx, -1))
        llama.eval([tokens[-1]])
    assert tokens == wanted


def test_completions_end_where_llama_cpp_python_ends_them(llama: Any, sampler: nc.Sampler) -> None:
    texts = []
    for _ in range(2):
        processor = SamplingLogitsProcessor(llama, nc.SamplingParams(seed=3, temperature=0.9), sampler)
        processors = llama_cpp.LogitsProcessorList([processor])
        made = llama.create_completion("The fox", max_tokens=30, temperature=0, stop=["."], logits_processor=processors)
        texts.append(made["choices"][0]["text"])
    assert texts[0] == texts[1] != ""
    assert "." not in texts[0]


def test_what_does_not_fit_is_refused(llama: Any, sampler: nc.Sampler, caplog: pytest.LogCaptureFixture) -> None:
    before = len(sampler)
    with pytest.raises(nc.ParameterError, match="max_tokens is for LLM"):
        SamplingLogitsProcessor(llama, nc.SamplingParams(max_tokens=3), sampler)
    with pytest.raises(nc.ParameterError, match="stop is for LLM"):
        next(generate_tokens(llama, [1], nc.SamplingParams(stop=["x"]), sampler))
    processor = SamplingLogitsProcessor(llama, nc.SamplingParams(temperature=0), sampler)
    scores = np.zeros(llama.n_vocab(), np.float32)
    scores[9] = 3
    assert np.flatnonzero(processor(np.array([1, 2]), scores) > -np.inf).tolist() == [9]
    processor(np.array([1, 2, 9]), scores)
    with pytest.raises(nc.ParameterError, match="make a new SamplingLogitsProcessor for each call"):
        processor(np.array([1, 2, 8]), scores)
    scores[5] = np.nan
    with pytest.raises(nc.LogitsError, match="NaN at token 5"):
        processor(np.array([1, 2, 9, 9]), scores)
    [*islice(generate_tokens(llama, [1], nc.SamplingParams(), sampler), 2)]
    assert len(sampler) == before + 1
    data = (llama_cpp.llama_token_data * llama.n_vocab())()
    for token in range(llama.n_vocab()):
        data[token] = llama_cpp.llama_token_data(token, float("nan"), 0.0)
    array = llama_cpp.llama_token_data_array(data, llama.n_vocab(), -1, False)
    custom_sampler(llama, None, (), sampler)(llama_cpp.ctypes.pointer(array))
    assert (array.size, array.selected, array.data[0].id) == (1, 0, sampler.eos_token_ids[0])
    assert "NaN at token 0" in caplog.text
