"""Ray Data: ``nucleate batch --ray`` and ``Generate`` give the texts of the library, whatever is killed. Needs Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from ray_programs import ENVIRONMENT, descendants, require_ray, wait_for
from server_process import begun

import nucleate as nc
from nucleate.batch.batch_runner import line_seed

pytestmark = pytest.mark.slow

COUNT = 600
WORKER = "ray::MapWorker(MapBatches(_Worker))"


def lines(count: int) -> list[Any]:
    """Lines of all kinds; every third has no seed."""
    chat = [{"role": "user", "content": "Tell me a story."}]
    made: list[Any] = []
    for number in range(count):
        seed = {} if number % 3 == 0 else {"seed": number}
        body = {"messages": chat, "max_tokens": 30, "ignore_eos": True, **seed}
        request = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        plain = {"prompt": f"Story {number}:", "max_tokens": 40, "ignore_eos": True, **seed}
        made.append(request if number % 2 else plain)
    return [*made, {"prompt": 3}, made[1]]  # two that fail


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    require_ray()
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines(COUNT)))
    return tmp_path


def started(folder: Path, *flags: str) -> AbstractContextManager[subprocess.Popen[str]]:
    arguments = ["-m", "nucleate", "batch", str(folder / "in.jsonl"), str(folder / "out.jsonl"), *flags]
    environment = {**os.environ, **ENVIRONMENT}
    return begun(*arguments, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL, env=environment)


def records(folder: Path, name: str = "out.jsonl") -> list[dict[str, Any]]:
    """The complete records of a file in the order of the lines."""
    path = folder / name
    found = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return sorted(found, key=lambda record: int(record["id"].split("-")[1]))


def output(record: dict[str, Any]) -> tuple[Any, Any]:
    """The text and the seed of a record; None for a failed line."""
    response = record.get("response")
    choice = record if response is None else response["body"].get("choices", [{}])[0]
    return choice.get("text", choice.get("message", {}).get("content")), choice.get("seed")


def expected(folder: Path) -> list[tuple[Any, Any]]:
    """The outputs without Ray, of the same lines with the seeds that they get with Ray."""
    path = folder / "seeded.jsonl"
    with path.open("w") as file:
        for line, record in zip(lines(COUNT), records(folder), strict=True):
            line.get("body", line).setdefault("seed", line_seed(record["id"]))
            file.write(json.dumps(line) + "\n")
    command = [sys.executable, "-m", "nucleate", "batch", str(path), str(folder / "alone.jsonl")]
    subprocess.run(command, check=False, capture_output=True)
    return [output(record) for record in records(folder, "alone.jsonl")]


@pytest.mark.exhaustive
def test_every_line_has_one_result_though_actors_and_the_command_are_killed(folder: Path) -> None:
    with started(folder, "--ray", "local", "--ray-actors", "2") as process:
        killed: set[int] = set()
        for count in (1, 150):
            wait_for(lambda count=count: (folder / "out.jsonl").exists() and len(records(folder)) > count, 200)
            worker = wait_for(lambda: [one for one in descendants(process, WORKER) if one.pid not in killed])[0]
            killed.add(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)
        before = len(records(folder))
        wait_for(lambda: len(records(folder)) > before + 100, 200)  # it goes on
        process.send_signal(signal.SIGKILL)
        process.wait()
    first = records(folder)
    assert 250 < len(first) < COUNT + 2
    with started(folder, "--ray", "local") as process:
        _, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert f"{len(first)} lines done before" in err
    found = records(folder)
    assert [int(record["id"].split("-")[1]) for record in found] == list(range(1, COUNT + 3))
    assert sum(record.get("error") is not None for record in found) == 2
    assert [output(record) for record in found] == expected(folder)


@pytest.mark.exhaustive
def test_an_error_of_the_model_ends_the_command(folder: Path) -> None:
    with started(folder, "--ray", "local", "--model", str(folder / "missing")) as process:
        _, err = process.communicate(timeout=200)
    assert process.returncode not in (0, None)
    assert "missing" in err


PROGRAM = """
import json, ray.data
from nucleate.scale.data import Generate, pool_options
from nucleate.scale.ray_extra import start_ray
start_ray()
rows = [{"id": n, "prompt": f"Story {n % 4}:", "max_tokens": 8, "seed": n if n % 2 else None} for n in range(40)]
rows.append({"id": 40, "prompt": "x", "max_tokens": -1, "seed": None})
options = {"fields": ["prompt", "max_tokens", "seed"], "key": "id", "params": {"min_p": 0.05}}
table = ray.data.from_items(rows).map_batches(Generate, batch_size=16, fn_constructor_kwargs=options, **pool_options(1))
lines = ray.data.from_items([{"text": json.dumps("Once upon")}, {"text": "{"}])
options = {"lines": "text", "params": {"max_tokens": 4}}
more = lines.map_batches(Generate, fn_constructor_kwargs=options, **pool_options(1))
print(json.dumps([table.take_all(), more.take_all()]))
"""


@pytest.mark.slow
def test_the_columns_of_a_dataset(llm: nc.LLM) -> None:
    require_ray()
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    rows, lines = json.loads(done.stdout.splitlines()[-1])
    assert sorted(row["id"] for row in rows) == list(range(41))
    seeds = set()
    for row in rows:
        if row["id"] == 40:
            assert (row["generated_text"], "max_tokens" in row["error"]) == (None, True)
            continue
        record: dict[str, Any] = json.loads(row["record"])
        assert row["seed"] in (None, record["seed"])
        params = nc.SamplingParams(max_tokens=8, min_p=0.05, seed=record["seed"])
        assert llm.generate(row["prompt"], params)[0].text == row["generated_text"] == record["text"]
        seeds.add(record["seed"])
    assert len(seeds) == 40  # also where the prompts are equal
    assert [bool(line["error"]) for line in lines] == [False, True]
    assert json.loads(lines[1]["record"])["error"]["code"] == "invalid_json"
