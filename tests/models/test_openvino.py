"""A folder for OpenVINO gives the tokens of the NumPy runtime: the embedded model, converted here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import random_folder, training_script
from test_batch_invariance import check_chaos
from toy_requests import check_prefix_to_the_token, run_tokens

import nucleate as nc
from nucleate.cli.main import main
from nucleate.engine.request import Request
from nucleate.models.loader import EMBEDDED
from nucleate.models.openvino_model import OpenVinoModel
from nucleate.models.runner import Fork, ModelInput

pytest.importorskip("openvino", reason="pip install openvino")

EXACT = {"KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
PROMPTS = ("Once upon a time", "The little dog", "Tom and his friend went to the park. They saw a", "Mom said")
STORY = "Once upon a time there was a little girl named Lily. She loved to play outside in the park with her dog."
LOGITS = 3e-5
"""The largest difference of logits in float32; they are up to 30."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target: Path = tmp_path_factory.mktemp("openvino") / "embedded"
    training_script("write_openvino").write(EMBEDDED, target)
    return target


@pytest.fixture(scope="module")
def exact(folder: Path) -> Iterator[nc.LLM]:
    llm = nc.LLM(folder, dtype="float32", openvino_properties=EXACT)
    yield llm
    llm.close()


def params(count: int, **values: Any) -> list[nc.SamplingParams]:
    values = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "max_tokens": 40, "ignore_eos": True, **values}
    return [nc.SamplingParams(**values, seed=seed) for seed in range(count)]


def tokens(llm: nc.LLM, prompts: list[str], given: list[nc.SamplingParams]) -> list[list[tuple[int, ...]]]:
    return [[output.token_ids for output in one.outputs] for one in llm.generate(prompts, given)]


def test_logits_differ_by_rounding_only(llm: nc.LLM, exact: nc.LLM) -> None:
    ids = llm.encode(PROMPTS[2])
    expected = llm.model.begin().forward_all(ids)
    assert np.abs(exact.model.begin().forward_all(ids) - expected).max() < LOGITS
    context = exact.model.begin()
    rows = [context.forward([token]).copy() for token in ids]
    assert np.abs(np.stack(rows) - expected).max() < LOGITS


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0, "max_tokens": 100},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_p": 0.05},
        {"structured_outputs": {"regex": '[{]"name": "[a-z]{3,9}"[}]'}, "ignore_eos": False},
        {"guidance_scale": 1.5, "negative_prompt": "The bad dog"},
        {"n": 3},
    ],
    ids=["plain", "greedy", "penalties", "regex", "guidance", "n"],
)
def test_tokens_equal_those_of_the_numpy_runtime(llm: nc.LLM, exact: nc.LLM, fields: dict[str, Any]) -> None:
    prompts, given = [*PROMPTS, *PROMPTS], params(8, **fields)
    assert tokens(exact, prompts, given) == tokens(llm, prompts, given)


@pytest.mark.slow
def test_preemption_chunks_and_shared_prefixes(llm: nc.LLM, exact: nc.LLM) -> None:
    prompts = [f"{STORY} {STORY} One day, {name}" for name in ("she", "Lily", "the dog", "her mom", "a boy", "it")]
    wanted = params(6, max_tokens=60)
    expected = [ids for [ids] in tokens(llm, prompts, wanted)]
    requests = [Request(llm.encode(prompt), one) for prompt, one in zip(prompts, wanted, strict=True)]
    memory = 8 * exact.model.block_bytes
    engine = exact.new_engine(kv_cache_memory=memory, max_num_seqs=6, max_num_batched_tokens=24)
    for _ in range(2):
        assert [tuple(ids) for ids in run_tokens(engine, requests)] == expected
    assert engine.stats.num_preemptions
    assert engine.stats.prefix_cache_hit_rate > 0.2


@pytest.mark.slow
def test_a_prefix_may_end_within_a_block(exact: nc.LLM) -> None:
    check_prefix_to_the_token(exact)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_speculation_gives_the_same_tokens(exact: nc.LLM, method: str) -> None:
    ids = exact.encode("The dog ran to the big tree. The dog ran to the big tree. The dog ran to")
    requests = [Request(ids, one) for one in params(3, temperature=0.3, max_tokens=60)]
    expected = run_tokens(exact.new_engine(), requests)
    engine = exact.new_engine(speculative_config=nc.Speculation(method, adaptive=False))
    assert run_tokens(engine, requests) == expected
    assert engine.stats.speculative.accepted_tokens > 20


@pytest.mark.slow
def test_beam_search(llm: nc.LLM, exact: nc.LLM) -> None:
    found = [
        [beam.token_ids for beam in each.beam_search(PROMPTS[0], num_beams=4, max_tokens=30)[0].outputs]
        for each in (llm, exact)
    ]
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_fork_continues_from_a_copied_block(exact: nc.LLM) -> None:
    runner = exact.model.new_runner(8 * exact.model.block_bytes)
    ids = exact.encode(STORY)[:20]
    whole = runner.forward([ModelInput(0, ids, 0, 20, [0], 1)]).copy()
    runner.forward([ModelInput(0, ids, 0, 10, [1], 1)])
    runner.fork([Fork(0, 1, (1, 2))])
    runner.forward([ModelInput(0, [5] * 12, 0, 12, [1], 1)])
    assert np.abs(runner.forward([ModelInput(1, ids, 10, 20, [2], 1)]) - whole).max() < LOGITS


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.fast_cases(0)
def test_the_same_bits_in_every_batch(folder: Path, threads: int, seed: int) -> None:
    model = OpenVinoModel(folder, properties={"INFERENCE_NUM_THREADS": threads}, plain=True)
    assert model.least_rows
    check_chaos(lambda: model.new_runner(200 * model.block_bytes, batch_invariant=True), seed)


@pytest.mark.slow
def test_batch_invariance_needs_keys_and_values_that_are_not_quantised(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert nc.LLM(folder, batch_invariant=True).new_engine().batch_invariant
    llm = nc.LLM(folder, batch_invariant=True, openvino_properties={"KV_CACHE_PRECISION": "u8"})
    assert not llm.new_engine().batch_invariant
    assert "not batch-invariant" in caplog.text


@pytest.mark.slow
def test_quantised_keys_and_values_are_close(llm: nc.LLM, folder: Path) -> None:
    other = nc.LLM(folder, openvino_properties={"KV_CACHE_PRECISION": "u8"})
    assert other.model.token_bytes < 0.5 * 2 * 6 * 2 * 32 * 4
    ids = llm.encode(STORY)
    difference = np.abs(other.model.begin().forward_all(ids) - llm.model.begin().forward_all(ids))
    assert np.median(difference) < 0.2


def test_lm_heads_of_their_own_and_grouped_queries(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    reference = random_folder("llama", tmp_path / "model")
    training_script("write_openvino").write(tmp_path / "model", tmp_path / "openvino")
    ids = [(i * 389 + 7) % 4096 for i in range(70)]
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0].numpy()
    found = OpenVinoModel(tmp_path / "openvino", "float32", EXACT).begin().forward_all(ids)
    assert np.abs(found - expected).max() < 1e-4


def test_wrong_ids_and_positions_are_errors(exact: nc.LLM) -> None:
    runner = exact.model.new_runner(64 * exact.model.block_bytes)
    for ids, start, message in (([4096], 0, "token ids"), ([-1], 0, "token ids"), ([1] * 1025, 1024, "context length")):
        with pytest.raises(ValueError, match=message):
            runner.forward([ModelInput(0, ids, start, len(ids), range(33), 1)])
    assert runner.forward([]).shape == (0, 4096)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"openvino_properties": {"KV_CACHE_PRECISION": "q9"}}, nc.ModelError, "OpenVINO cannot load"),
        ({"openvino_properties": ["a"]}, nc.ParameterError, "must be a dict"),
        ({"device": "cuda"}, (nc.ParameterError, nc.ModelError), "cuda"),
        ({"tensor_parallel": 2}, nc.ParameterError, "one for OpenVINO"),
        ({"gguf_options": {}}, nc.ParameterError, "needs a GGUF model"),
    ],
)
def test_bad_arguments(folder: Path, arguments: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        nc.LLM(folder, **arguments)


def test_other_folders_and_files(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(nc.ModelError, match="optimum-cli export openvino"):
        nc.LLM(runtime="openvino")
    with pytest.raises(nc.ParameterError, match="openvino_properties needs a folder"):
        nc.LLM(openvino_properties=EXACT)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(nc.ParameterError, match="openvino_properties needs a folder"):
        nc.LLM(tmp_path / "a.gguf", openvino_properties=EXACT)
    for name in ("config.json", "openvino_model.xml"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())  # without weights
    with pytest.raises(nc.ModelError, match="OpenVINO cannot load"):
        OpenVinoModel(tmp_path)


def test_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "-m", str(folder), "--temperature", "0", "--max-tokens", "8", PROMPTS[0]]
    assert main([*arguments, "--openvino-property", "KV_CACHE_PRECISION=u8"]) == 0
    found = capsys.readouterr().out
    assert main(["generate", *arguments[3:]]) == 0
    assert found == capsys.readouterr().out
    assert main([*arguments, "--openvino-property", "KV_CACHE_PRECISION"]) == 2
    assert "NAME=VALUE" in capsys.readouterr().err
    assert main(["info", str(folder)]) == 0
    assert re.search(r"weights +OpenVINO f32, [\d.]+ MiB", capsys.readouterr().out)
