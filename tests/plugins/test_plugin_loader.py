"""Plug-ins: modules, files, installed packages; on the command line and in the server."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import Server

from nucleate.parameters.parameter import ParameterError
from nucleate.plugins import plugin_loader
from nucleate.plugins.plugin_loader import load_plugins, set_stages
from nucleate.sampling.stages import STAGES

CODE = '''
from nucleate.sampling.maths import log
from nucleate.sampling.stage import Floor, param


class AboveAverage(Floor):
    """Keep the tokens with at least a times the average probability."""

    rank = 67.5
    a: float = param("Factor of the average probability", neutral=0.0, low=0.0)

    def floor(self, row):
        return row.top + log(self.a) + log(row.mass) - log(row.n)
'''


@pytest.fixture
def file(tmp_path: Path, registry: None) -> Path:
    path = tmp_path / "averages.py"
    path.write_text(CODE)
    return path


def test_files_modules_and_the_variable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(STAGES)
    monkeypatch.syspath_prepend(file.parent)
    for names, variable in (([str(file)], ""), (["averages"], ""), ([], "averages"), ([], f" , {file},")):
        monkeypatch.setenv(plugin_loader.VARIABLE, variable)
        assert [kind.name for kind in load_plugins(names)] == ["above_average"]
        assert load_plugins(names) == [] or variable or names[0].endswith(".py")
        set_stages(before)


def test_broken_modules_are_named(file: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "clash.py").write_text(CODE.replace("67.5", "70"))
    for name, message in (
        ("no_such_module", "the plug-in no_such_module cannot be loaded: ModuleNotFoundError"),
        (str(tmp_path / "nothing.py"), "is not a file"),
        (str(tmp_path / "broken.py"), "ZeroDivisionError: division by zero"),
        (str(tmp_path / "clash.py"), "AboveAverage.rank is 70, which top_p has"),
    ):
        with pytest.raises(ParameterError, match=message.replace("(", r"\(")):
            load_plugins([name])


def test_installed_packages(file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.syspath_prepend(file.parent)
    made = [
        importlib.metadata.EntryPoint("average", "averages:AboveAverage", plugin_loader.GROUP),
        importlib.metadata.EntryPoint("broken", "no_such_module:Stage", plugin_loader.GROUP),
    ]
    monkeypatch.setattr(plugin_loader, "entry_points", lambda group: made if group == plugin_loader.GROUP else [])
    assert [kind.name for kind in load_plugins()] == ["above_average"]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    command = [sys.executable, "-m", "nucleate", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_command_line(file: Path) -> None:
    flags = ("generate", "Once", "--above-average", "500", "--seed", "1", "--max-tokens", "8", "--json")
    done = run(*flags, "--plugin", str(file))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["params"]["above_average"] == 500.0
    other = run(*flags, NUCLEATE_PLUGINS=str(file))
    assert json.loads(other.stdout)["outputs"] == json.loads(done.stdout)["outputs"]
    table = run("stages", f"--plugin={file}").stdout
    assert "above_average" in table
    assert "Factor of the average probability" in table
    refused = run(*flags, "--plugin", "no_such_module")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "the plug-in no_such_module cannot be loaded" in refused.stderr


@pytest.mark.slow
def test_the_server(file: Path) -> None:
    with Server("--plugin", str(file)) as server:
        body = {"prompt": "Once", "max_tokens": 6, "seed": 1}
        field = server.request("POST", "/v1/completions", {**body, "above_average": 500}).json
        stages = [{"stage": "above_average", "a": 500}]
        given = server.request("POST", "/v1/completions", {**body, "pipeline": stages, "temperature": None}).json
        assert field["choices"][0]["text"]
        assert given["choices"][0]["finish_reason"] == "length"
        error = server.request("POST", "/v1/completions", {**body, "above_average": -1})
        assert (error.status, error.json["error"]["param"]) == (400, "above_average")
        schema = server.request("GET", "/openapi.json").data
        assert b'"above_average"' in schema
