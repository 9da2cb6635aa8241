"""``benchmarks/``: all programs run the same pipelines, and the page shows the measurements."""

from __future__ import annotations

import copy
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from nucleate.cli.bench import CHAINS, logits
from nucleate.sampling.presets import PRESETS, REQUESTABLE

FOLDER = Path(__file__).parents[2] / "benchmarks"
GREEDY = dict(logits="peaked", vocabulary=1000, rows=1, chain="greedy")
TOP_K = dict(logits="peaked", vocabulary=1000, rows=8, chain="top_k 1000")
RESULTS = {
    "machine": "a machine",
    "versions": {"nucleate": "1.2"},
    "fill": {"1000": 4.4},
    "two threads": {},
    "cases": [
        dict(GREEDY, microseconds={"numpy max": 5.0, "nucleate": 10.0, "llama.cpp": 45.0, "torch": 80.0}),
        dict(TOP_K, microseconds={"numpy max": 5.0, "nucleate": 80.0, "Transformers": 4800.0}),
    ],
}


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


@pytest.mark.slow
def test_torch_and_transformers_run_the_same_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = module("contenders", monkeypatch)
    contenders.check({"torch": contenders.by_torch, "Transformers": contenders.by_transformers})


def test_a_different_pipeline_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = module("contenders", monkeypatch)
    with pytest.raises(RuntimeError, match="the third does not run the chain greedy"):
        contenders.check({"the third": lambda x, stages, before: lambda: np.argsort(-x, axis=1)[:, 2]})


def test_a_peer_leaves_out_unsupported_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    import nucleate as nc

    pytest.importorskip("torch", reason="needs the extra 'torch'")
    contenders = module("contenders", monkeypatch)
    x = logits("flat", 1, 100)
    stages = {chain: nc.SamplingParams(seed=0, **params).build_pipeline() for chain, params in CHAINS.items()}
    without = {
        "by_torch": {"typical .95, T .8", "mirostat v2"},
        "by_transformers": {
            *("greedy", "repetition + frequency over 1024, the same", "mirostat v2"),
            *("T .8, top_n_sigma 1", "top_n_sigma 1, T .8"),
        },
    }
    for name, left_out in without.items():
        assert {c for c in CHAINS if getattr(contenders, name)(x, stages[c], [1]) is None} == left_out


def test_the_page_has_the_measurements_and_their_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    page = module("page", monkeypatch)
    text = page.page(RESULTS)
    assert "*a machine; nucleate 1.2.*" in text
    assert "4 µs at V = 1000" in text
    assert "| greedy | 10.0 | 2.0 | 45 (4.5x) | 80 (8.0x) |  |" in text
    assert "| llama.cpp | peaked, one row | 1 | 4.5 | 4.5 | 4.5 | 5x | 0 of 1 |" in text
    assert "| Transformers | peaked, more rows | 1 | 60.0 | 60.0 | 60.0 |  |  |" in text
    assert "| nucleate, µs per row | V = 1,000 | 8 rows |" in text
    assert "| top_k 1000 |  | 10.0 |" in text
    engine, speculation = page.stored("engine"), page.stored("speculation")
    assert f"| {engine['embedded']['tokens per second']['generate_batch']:.0f} | " in text
    found = speculation["again, temperature 0, 8 at once"]["suffix"]
    [line] = re.findall(r"\| again, temperature 0, 8 sequences \|.*", text)
    assert f"{found['ratio']:.2f} ({found['tau']:.1f})" in line


def test_the_page_counts_cells_that_miss_their_target(monkeypatch: pytest.MonkeyPatch) -> None:
    page = module("page", monkeypatch)
    assert page.misses(RESULTS)[2:] == ["| llama.cpp | 5x | greedy | peaked | 1000 | 4.5x |"]
    assert "missed their target, by pipeline: greedy (1)." in page.page(RESULTS)
    better = copy.deepcopy(RESULTS)
    better["cases"][0]["microseconds"]["nucleate"] = 9.0  # type: ignore[index]
    assert page.misses(better) == []
    assert "missed" not in page.page(better)


def test_the_plots_are_those_of_the_stored_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'plot'")
    page, plots = module("page", monkeypatch), module("plots", monkeypatch)
    plots.write(*map(page.stored, ("sampler", "engine", "gguf", "speculation")), tmp_path)
    written = {path.name for path in tmp_path.iterdir()}
    assert written == set(re.findall(r"\(pictures/(benchmarks-[a-z]+\.svg)\)", page.page(page.stored("sampler"))))
    for name in written:
        assert len((tmp_path / name).read_text("utf-8")) > 20_000


def test_the_table_of_the_readme_has_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    readme_table = module("readme_table", monkeypatch)
    text = readme_table.README.read_text("utf-8")
    assert readme_table.with_table(text) == text
    with pytest.raises(ValueError, match="does not have the comments"):
        readme_table.with_table(text.replace(readme_table.END, ""))


def test_a_peer_skips_measurements_that_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = module("sampler", monkeypatch)
    found = [dict(GREEDY, microseconds={"fast": 100.0, "slow": 60_000.0})]
    cell = ("peaked", 1000, 32, "greedy")
    assert sampler.expected(found, *cell, "fast") == 3200
    assert sampler.expected(found, *cell, "slow") > sampler.LONGEST
    assert sampler.expected(found, *cell, "absent") > sampler.LONGEST
    assert sampler.expected([], *cell, "slow") == 0


def test_row_counts_grow_so_that_their_time_can_be_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = list(module("sampler", monkeypatch).cases(quick=False))
    for size in (32_000, 128_256, 151_936, 256_000):
        assert [rows for kind, s, rows in cases if (kind, s) == ("peaked", size)] == [1, 8, 32, 256]
        assert [kind for kind, s, rows in cases if (s, rows) == (size, 1)] == ["peaked", "flat", "shifted", "ties"]


@pytest.mark.exhaustive
def test_the_engines_generate_the_requested_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psutil", reason="Transformers uses it to measure memory")
    engine = module("engine", monkeypatch)
    embedded = engine.load(engine.EMBEDDED, dtype="float32", runtime="torch")
    requests = [one._replace(tokens=one.tokens % 9 + 1) for one in engine.workload(3, 4000)]
    runner = engine.runner_of(embedded, engine.MEMORY)
    tokenizer = engine.Tokenizer(engine.EMBEDDED, padded_size=4096)
    outputs = engine.by_engine(runner, tokenizer, requests, engine.GREEDY)
    assert [len(tokens) for tokens in outputs] == [one.tokens for one in requests]
    assert [len(tokens) for tokens in engine.by_generate(embedded.model, requests, 2)] == [
        one.tokens for one in requests
    ]
    assert engine.by_generate_batch(embedded.model, requests) == outputs


def test_the_stall_benchmark_covers_every_stage_and_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    stalls = module("stalls", monkeypatch)
    assert set(stalls.STAGES) == set(REQUESTABLE)
    assert set(stalls.PRESETS) == set(PRESETS)
    every = stalls.bodies(quick=False)
    for name, one in stalls.STAGES.items():
        assert any(body == one for body in every)
        for also, other in stalls.STAGES.items():
            assert name == also or {name, also} == stalls.EXCLUSIVE or {**one, **other} in every
    assert len(stalls.bodies(quick=True)) < len(every) / 4


@pytest.mark.exhaustive
def test_no_request_stalls_a_stream(tmp_path: Path) -> None:
    """Uses limits for a busy machine; the program's own limits assume an idle one."""
    pytest.importorskip("uvicorn", reason="needs the extra 'server'")
    found = tmp_path / "found.json"
    command = [sys.executable, str(FOLDER / "stalls.py"), "--quick", "--seconds", "120", "--json", str(found)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert found.is_file(), ran.stdout + ran.stderr
    results = json.loads(found.read_text("utf-8"))
    for name in ("cold", "warm"):
        phases = results[name]
        assert phases["unchanged"], name
        for phase in ("from the start", "kernels ready"):
            assert phases[phase]["others"].endswith(" 0 failed"), phases[phase]
            assert phases[phase]["longest"] < phases["alone"]["longest"] + 1.0, (name, phase)


@pytest.mark.parametrize("model_type", ["gemma3_text", "lfm2", "lfm3", "kolibri1", "jamba", "flint", "qwen3_next"])
def test_a_tiny_model_has_every_kind_of_layer(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'torch'")
    tiny_models = module("tiny_models", monkeypatch)
    whole, small = tiny_models.CONFIG_MAPPING[model_type](), tiny_models.config_of(model_type)
    names = {name for name, value in whole.to_dict().items() if name in {"layer_types", "mlp_layer_types"} and value}
    for name in names or {"layers_block_type"}:
        assert set(getattr(small, name)) >= set(getattr(whole, name))
    assert small.num_hidden_layers < whole.num_hidden_layers


def test_tiny_models_have_the_layers_of_published_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'torch'")
    tiny_models = module("tiny_models", monkeypatch)
    assert set(tiny_models.config_of("lfm2").layer_types) == {"conv", "full_attention"}
    assert set(tiny_models.config_of("lfm2_vl").text_config.layer_types) == {"conv", "full_attention"}
    assert tiny_models.config_of("phimoe").rope_parameters["rope_type"] == "longrope"
    for model_type in ("phi3", "starcoder2", "mistral", "gpt_oss"):
        assert 0 < tiny_models.config_of(model_type).sliding_window < 41  # the prompts of architectures.py are longer


def test_the_page_of_conformance_has_the_tables_of_its_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    conformance = module("conformance", monkeypatch)
    reports = conformance.read_reports()
    assert conformance.tables(reports) in conformance.PAGE.read_text("utf-8")
    own = [report for report in reports if report["name"].startswith("nucleate")]
    assert len(own) > 1
    assert {one["outcome"] for report in own for one in report["findings"]} == {"same"}
    assert len(reports) - len(own) >= 4
    assert all("/" not in report["command"].split(" -m ")[0] for report in reports)  # no paths of a machine
