"""The examples of docs/custom_stages.md run, and their stages pass the checks."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tiers

import nucleate as nc
from nucleate.plugins.stage_check import check_stage
from nucleate.sampling.stage import SHAPES
from nucleate.sampling.stages import STAGES

PAGE = (Path(__file__).parents[2] / "docs" / "custom_stages.md").read_text("utf-8")
BLOCKS = dict[str, list[str]]()
for language, block in re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
    BLOCKS.setdefault(language, []).append(block)


@pytest.fixture
def names(page_names: dict[str, Any]) -> dict[str, Any]:
    """What the Python of the page defines."""
    exec("\n".join(BLOCKS["python"]), page_names)
    return page_names


@pytest.mark.slow
def test_the_python_runs_and_has_a_stage_of_every_shape(names: dict[str, Any]) -> None:
    stages = [value for value in names.values() if isinstance(value, type) and value.__module__ == "page"]
    assert {shape for shape in SHAPES for stage in stages if issubclass(stage, shape)} == {*SHAPES}
    assert "above_average" in STAGES
    for stage in stages:
        nc.register_stage(stage)
    for stage in stages[: tiers.count(1, len(stages))]:
        assert not [one for one in check_stage(stage) if one.holds is False]


def test_the_json_is_valid() -> None:
    body = json.loads(BLOCKS["json"][0])
    assert nc.SamplingParams(pipeline=body["pipeline"]).seed == 1
    assert "nucleate.stages" in tomllib.loads(BLOCKS["toml"][0])["project"]["entry-points"]
