"""``nucleate bench`` and ``nucleate warm`` run and report what they measured or compiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.cli.bench import CHAINS, KINDS, history, logits, medians, recreate_every, sampler_call
from nucleate.jit import kernel_libraries
from nucleate.jit.kernel_libraries import ALL


def test_bench_prints_a_line_per_chain(run: Any) -> None:
    first, _, *lines = run("bench --vocabulary 3000 --rows 2 --seconds 0 --logits ties").out.splitlines()
    assert first == "2 x 3000 logits, ties: microseconds per call"
    assert [line[:44].rstrip() for line in lines] == list(CHAINS)
    for line in lines:
        own, floor, ratio = map(float, line[44:].split())
        assert own > 0
        assert ratio == pytest.approx(own / floor, rel=0.2, abs=0.1)


def test_bench_in_json(run: Any) -> None:
    found = json.loads(run("bench --vocabulary 300 --seconds 0 --json").out)
    assert [case["chain"] for case in found] == list(CHAINS)
    assert all(set(case["microseconds"]) == {"nucleate", "numpy max"} for case in found)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_have_the_named_distribution(kind: str) -> None:
    x = logits(kind, 2, 4000)
    assert x.shape == (2, 4000)
    assert x.dtype == np.float32
    assert (len(np.unique(x)) < 40) == (kind == "ties")
    assert (x.mean() > 40) == (kind == "shifted")
    assert (x.max() - x.mean() > 12) == (kind in ("peaked", "shifted"))


def test_calls_are_timed_alternately() -> None:
    called: list[str] = []
    times = medians({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, 0.0)
    assert "".join(called).startswith("ab" + "aaaaaabbbbbb")
    assert times.keys() == {"a", "b"}
    assert all(0 < time < 1e4 for time in times.values())


def test_recreate_every_recreates_after_that_many_calls() -> None:
    made: list[list[int]] = []

    def make() -> object:
        made.append([])
        return lambda: made[-1].append(1)

    call = recreate_every(make, 3)  # type: ignore[arg-type]
    for _ in range(7):
        call()
    assert list(map(len, made)) == [3, 3, 1]


@pytest.mark.parametrize(("chain", "params"), CHAINS.items())
def test_the_name_of_a_pipeline_lists_its_stages_in_order(chain: str, params: dict[str, object]) -> None:
    default = "top_k 40, top_p .95, min_p .05, T .8"
    expected = chain.replace("the same", default if params.get("order") else "T .8, top_k 40, min_p .05, top_p .95")
    for text, name in {"repetition +": "repetition,", "T .": "temperature .", "mirostat v2": "mirostat"}.items():
        expected = expected.replace(text, name)
    if expected != "greedy":
        names = [stage.name for stage in nc.SamplingParams(**params).build_pipeline()[:-1]]  # type: ignore[arg-type]
        assert names == [part.split()[0] for part in expected.split(", ")]


def test_penalties_look_back_as_many_tokens_as_the_name_states() -> None:
    assert len(history(CHAINS["repetition over 64, the same"], 500)) == 64
    assert max(history(CHAINS["repetition over 1024, the same"], 500)) < 500
    assert history(CHAINS["greedy"], 500) == []


def test_the_sampler_call_returns_a_token_per_row() -> None:
    x = logits("peaked", 3, 500)
    assert sampler_call(x, CHAINS["greedy"])().tolist() == x.argmax(1).tolist()  # type: ignore[attr-defined]
    tokens = [sampler_call(x, CHAINS["repetition over 64, the same"])() for _ in range(2)]
    assert np.array_equal(*tokens)


@pytest.mark.parametrize("size", [32_000, 128_256, 256_000])
def test_the_head_of_peaked_logits_has_nine_tenths_of_the_probability(size: int) -> None:
    for x in logits("peaked", 4, size).astype(float):
        p = np.exp(x - x.max())
        assert np.sort(p)[-40:].sum() > 0.9 * p.sum()


def test_warm_reports_the_compiled_kernels_and_the_cache(run: Any) -> None:
    *lines, last = run("warm").out.splitlines()
    assert [line.partition(":")[0].strip() for line in lines] == [library.name for library in ALL]
    assert last.startswith("CPU kernels ready after ")
    assert Path(last.partition(" s, cached in ")[2]) == ALL[0].folder.parent


def test_warm_compiles_nothing_if_the_cache_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("NUCLEATE_CACHE", str(file))
    monkeypatch.setattr(kernel_libraries, "warm", None)
    captured = run("warm", status=2)
    assert captured.out == ""
    assert captured.err.startswith(f"nucleate: the kernel cache {file} is not writable")
    assert "NUCLEATE_CACHE" in captured.err
