"""The examples of docs/integrations.md run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import nucleate as nc
from nucleate.sampling_params import FIELDS

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'torch'")
    names: dict[str, Any] = {}
    lines = []
    for block in blocks("python"):
        exec(block, names)
        lines.append(capsys.readouterr().out.strip())
    assert all(lines)
    own = nc.LLM(names["model"], names["tokenizer"])
    prompts = [row[-count:] for row, count in _prompts(names["inputs"])]
    expected = own.generate(prompts, [params.replace(max_tokens=20) for params in names["params"]])
    assert lines[1] == str([completion.text for completion in expected])


def _prompts(inputs: Any) -> list[tuple[list[int], int]]:
    return list(zip(inputs["input_ids"].tolist(), inputs["attention_mask"].sum(-1).tolist(), strict=True))


def test_the_json_is_a_configuration() -> None:
    found = json.loads(blocks("json")[0])
    assert {type(value) for value in found.values()} == {str, dict}


def test_options_in_the_commands_exist() -> None:
    assert {name for block in blocks("sh") for name in re.findall(r"-o (\w+)", block)} <= FIELDS.keys()
