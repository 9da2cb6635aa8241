"""The ``llm`` plug-in in the program ``llm``: prompts, conversations, schemas, errors, without a network.

It needs the package ``llm``, and nucleate installed so that ``llm`` finds its entry point: `make test-clients`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import nucleate as nc
from nucleate.models.loader import EMBEDDED

FOUND = importlib.util.find_spec("llm") is not None and any(
    entry.name == "nucleate" for entry in entry_points(group="llm")
)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOUND, reason="llm is not installed, or not after nucleate")]

QUESTION = "Tell me a story about a cat."
SAMPLED = {"temperature": 0.9, "seed": 7, "max_tokens": 16, "min_p": 0.02}
OFFLINE = Path(__file__).parents[1] / "server" / "clients" / "offline"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """A function that runs ``llm`` with these arguments in a folder of its own, and returns its output."""

    def call(*arguments: str, code: int = 0) -> str:
        variables = {"LLM_USER_PATH": str(tmp_path), "OFFLINE_LOG": str(tmp_path / "attempts"), "HOME": str(tmp_path)}
        path = os.pathsep.join([str(OFFLINE), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "llm", *arguments],
            env={**os.environ, **variables, "PYTHONPATH": path}, capture_output=True, text=True, timeout=570,
            check=False, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert not (tmp_path / "attempts").exists()
        return done.stdout if code == 0 else done.stderr

    return call


def options(values: dict[str, Any]) -> list[str]:
    return [part for name, value in values.items() for part in ("-o", name, str(value))]


def test_prompts_conversations_and_options(run: Callable[..., str], llm: nc.LLM) -> None:
    asked = [{"role": "user", "content": QUESTION}]
    expected = llm.chat(asked, **SAMPLED)
    common = ("prompt", "-m", "nucleate-tiny", *options(SAMPLED))
    for more in ((), ("--no-stream",), ("--async",)):
        assert run(*common, QUESTION, *more) == expected.text + "\n"
    messages = [*asked, {"role": "assistant", "content": expected.text}, {"role": "user", "content": "And then?"}]
    run(*common, QUESTION)
    assert run(*common, "And then?", "--continue") == llm.chat(messages, **SAMPLED).text + "\n"
    with_system = [{"role": "system", "content": "Be brief."}, *asked]
    assert run(*common, QUESTION, "--system", "Be brief.") == llm.chat(with_system, **SAMPLED).text + "\n"
    logged = json.loads(run("logs", "--json", "-n", "1"))[0]
    assert logged["output_tokens"] == 16
    assert logged["response_json"]["seed"] == 7
    assert logged["options_json"] == SAMPLED
    stages = run(*common[:3], QUESTION, "-o", "pipeline", "temperature(0.9) | gumbel(7)", "-o", "max_tokens", "16")
    assert stages == llm.chat(asked, (nc.stages.Temperature(0.9), nc.stages.Gumbel(7)), max_tokens=16).text + "\n"


def test_schemas(run: Callable[..., str]) -> None:
    pytest.importorskip("llguidance", reason="needs the extra 'structured'")
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    schema["additionalProperties"] = False
    text = run("prompt", "-m", "nucleate-tiny", "-o", "seed", "1", "--schema", json.dumps(schema), QUESTION)
    assert isinstance(json.loads(text)["age"], int)


def test_models_and_options_are_listed(run: Callable[..., str], tmp_path: Path) -> None:
    folders = {"tale": str(EMBEDDED), "fast": {"model": str(EMBEDDED), "speculative_config": "ngram"}}
    (tmp_path / "nucleate-models.json").write_text(json.dumps(folders))
    listed = run("models", "list", "--options")
    for text in ("nucleate: nucleate-tiny", "nucleate: tale", "nucleate: fast", "dry_multiplier", "mirostat_tau"):
        assert text in listed
    texts = [run("prompt", "-m", name, QUESTION, *options(SAMPLED)) for name in ("nucleate-tiny", "tale", "fast")]
    assert len(set(texts)) == 1


def test_errors_are_one_line(run: Callable[..., str], tmp_path: Path) -> None:
    assert "temperature must be" in run("prompt", "-m", "nucleate-tiny", "x", "-o", "temperature", "-1", code=1)
    assert "min_tokens must be at most" in run(
        "prompt", "-m", "nucleate-tiny", "x", "-o", "max_tokens", "3", "-o", "min_tokens", "5", code=1
    )
    (tmp_path / "nucleate-models.json").write_text('{"lost": "/no/such/folder"}')
    assert "there is no model folder" in run("prompt", "-m", "lost", "x", code=1)
    (tmp_path / "nucleate-models.json").write_text("[]")
    assert "nucleate-tiny" in run("models", "list")
