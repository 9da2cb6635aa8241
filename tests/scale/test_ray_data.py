"""``Generate``: the columns that it adds, in Ray Data. Needs the extra ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from ray_programs import ENVIRONMENT, require_ray

import nucleate as nc

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
