"""Lines of several threads on one engine, the seeds of lines, and the messages without Ray."""

from __future__ import annotations

import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import nucleate as nc
from nucleate.batch.batch_records import JsonLine, LineReader, read_line
from nucleate.batch.batch_runner import line_seed
from nucleate.cli.main import main
from nucleate.scale import ray_extra
from nucleate.scale.data import LineEngine


def line(number: int, value: object) -> JsonLine:
    return JsonLine(number, number * 7919, json.dumps(value).encode())


def test_a_seed_depends_on_the_line_and_nothing_else() -> None:
    seeds = [line_seed(line(number, "x").id) for number in range(1, 1000)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert line_seed("line-1-0000000000000001") == 13971031248556969145  # records of earlier runs depend on it


@pytest.mark.slow
def test_threads_share_an_engine_and_get_their_own_lines(llm: nc.LLM) -> None:
    engine = LineEngine({}, {"max_num_seqs": 4}, {"max_tokens": 12}, "tiny")
    blocks = [[line(10 * block + n, f"Story {n}") for n in range(1, 7)] for block in range(4)]
    blocks[2][3] = line(99, {"prompt": 3})
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda block: engine.run([read_line(one) for one in block]), blocks))
    for block, results in zip(blocks, found, strict=True):
        for one, result in zip(block, results, strict=True):
            assert result.record["id"] == one.id
            if one.number == 99:
                assert result.failure is not None
                continue
            seed = line_seed(one.id)
            expected = llm.generate(result.record["prompt"], nc.SamplingParams(max_tokens=12, seed=seed))[0]
            count = len(expected.outputs[0].token_ids)
            assert (result.record["text"], result.record["seed"], result.tokens) == (expected.text, seed, count)
    assert engine.run([]) == []


def test_a_seed_of_the_line_or_of_the_run_has_precedence() -> None:
    entries = [read_line(line(1, {"prompt": "x", "seed": 5})), read_line(line(2, "x"))]
    engine = LineEngine({}, {}, {"max_tokens": 1}, "tiny")
    assert [result.record["seed"] for result in engine.run(entries)] == [5, line_seed(entries[1].id)]
    engine = LineEngine({}, {}, {"max_tokens": 1, "seed": 3}, "tiny")
    assert [result.record["seed"] for result in engine.run(entries)] == [5, 3]


def test_an_invalid_constraint_is_an_error_at_the_start() -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(nc.ParameterError, match=r"regex: at offset 0: \[ is never closed"):
        LineEngine({}, {}, {"structured_outputs": nc.StructuredOutputs(regex="[")}, "tiny")


def test_duplicate_ids_are_found_over_all_lines() -> None:
    reader = LineReader()
    entries = [reader.read(line(n, {"custom_id": name, "prompt": "x"})) for n, name in enumerate(["a", "b", "a"], 1)]
    codes = [entry.failure and entry.failure.code for entry in entries]
    assert codes == [None, None, "duplicate_custom_id"]


def test_without_ray_the_command_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(ray_extra.importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    (tmp_path / "in.jsonl").write_text('"x"\n')
    files = str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")
    assert main(["batch", *files, "--ray", "local"]) == 2
    assert capsys.readouterr().err == (
        "nucleate: --ray: Ray is not installed: install the extra 'ray' (in the source tree: pip install -e '.[ray]')\n"
    )
    from nucleate.scale.data import pool_options
    from nucleate.scale.serve import app

    for call in (lambda: pool_options(1), app):
        with pytest.raises(nc.ParameterError, match=r"pip install -e '\.\[ray\]'"):
            call()


@pytest.mark.parametrize("flags", [["--ray-actors", "2"], ["--ray", "local", "--ray-actors", "0"]], ids=" ".join)
def test_the_number_of_actors_needs_ray(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *flags]) == 2
    assert "--ray-actors needs --ray, and must be at least 1" in capsys.readouterr().err
