"""The plug-in package in examples/: built, installed into a folder, and used by every part of nucleate."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_process import Server

pytestmark = pytest.mark.slow

PACKAGE = Path(__file__).parents[2] / "examples" / "nucleate_example_stages"
FIELDS = {"collision_floor": 0.3, "fading_temperature": 0.6, "fading_rate": 0.8, "seed": 5, "max_tokens": 24}
PROMPT = "Once upon a time"
LLM = f"""
import sys
import nucleate as nc
from nucleate.plugins.plugin_loader import load_plugins
print(*sorted(stage.name for stage in load_plugins()))
fields = {FIELDS!r}
params = [nc.SamplingParams(temperature=1, **{{**fields, "seed": seed}}) for seed in (5, 6, 7)]
models = [nc.LLM(generation_config="none", **options) for options in (
    {{}}, {{"speculative_config": "ngram"}}, {{"speculative_config": "draft"}}, {{"kv_cache_memory": 1 << 20}},
)]
texts = [[one.text for one in model.generate([{PROMPT!r}] * 3, params)] for model in models]
assert len(set(texts[0])) == 3 and texts == [texts[0]] * 4, texts
from nucleate_example_stages.collision_floor import CollisionFloor
from nucleate_example_stages.fading_temperature import FadingTemperature
stages = FadingTemperature(0.6, rate=0.8), CollisionFloor(0.3), nc.stages.Gumbel(seed=5)
assert models[0].generate({PROMPT!r}, stages, max_tokens=24)[0].text == texts[0][0]
sys.stdout.buffer.write(texts[0][0].encode())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which the package is installed."""
    names = {one.name for one in importlib.metadata.distributions()}  # find_spec("pip") would remove distutils
    if not {"setuptools", "pip"} <= names:
        pytest.skip("building the package needs pip and setuptools, which the extra 'dev' installs")
    source, target = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("target")
    shutil.copytree(PACKAGE, source)  # a build writes into the source
    command = "-m pip install --disable-pip-version-check --quiet --no-index --no-deps --no-build-isolation --target"
    run(*command.split(), str(target), str(source), environment={**os.environ})
    shutil.rmtree(source)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])}


def run(*arguments: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=570, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def text(installed: dict[str, str]) -> str:
    """The text of ``LLM``: the same with speculation, with little memory, and as a pipeline."""
    names, _, text = run("-c", LLM, environment=installed).partition("\n")
    assert names == "collision_floor fading_temperature"
    return text


def flags(values: dict[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def test_the_command_line(installed: dict[str, str], text: str) -> None:
    command = ("-m", "nucleate", "generate", PROMPT, "--generation-config", "none")
    assert run(*command, *flags(FIELDS), environment=installed) == text + "\n"
    pipeline = "fading_temperature(0.6, fading_rate=0.8) | collision_floor(0.3) | gumbel(5)"
    assert run(*command, "--pipeline", pipeline, "--max-tokens", "24", environment=installed) == text + "\n"
    assert run(*command, "--speculative", "ngram", *flags(FIELDS), environment=installed) == text + "\n"


def test_the_table_of_stages_and_the_check(installed: dict[str, str]) -> None:
    stages = {one["name"]: one for one in json.loads(run("-m", "nucleate", "stages", "--json", environment=installed))}
    assert stages["collision_floor"]["shape"] == "floor"
    assert [one["name"] for one in stages["fading_temperature"]["parameters"]] == [
        "fading_temperature",
        "fading_rate",
    ]
    run("-m", "nucleate", "stages", "--check", "collision_floor", environment=installed)


def test_the_server_with_speculation(installed: dict[str, str], text: str) -> None:
    environment = {"PYTHONPATH": installed["PYTHONPATH"]}
    with Server("--speculative", "ngram", "--generation-config", "none", environment=environment) as server:
        stages = [{"stage": "fading_temperature", "extra": 0.6, "rate": 0.8}, {"stage": "collision_floor", "a": 0.3}]
        bodies: list[dict[str, Any]] = [FIELDS, {"pipeline": stages, "seed": 5, "max_tokens": 24}]
        for body in bodies:
            answer = server.request("POST", "/v1/completions", {"prompt": PROMPT, **body})
            assert answer.status == 200, answer.json
            assert answer.json["choices"][0]["text"] == text
        wrong = server.request("POST", "/v1/completions", {"prompt": PROMPT, "collision_floor": 2})
        assert wrong.status == 400
        assert "collision_floor must be a number >= 0 and <= 1, got 2" in wrong.json["error"]["message"]


def test_its_own_tests_pass(installed: dict[str, str]) -> None:
    folder, tests = str(PACKAGE), str(PACKAGE / "tests")
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder, tests, environment=installed)
