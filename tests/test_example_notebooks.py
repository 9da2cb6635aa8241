"""The notebooks in examples/ run from the top to the end, and are committed with small outputs."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from chromium import unavailable

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"), key=lambda path: path.name)
MAX_BYTES = 300_000
NEEDED = ("ipykernel", "matplotlib", "nbconvert")
PLOTS = {"sampling_course": 3, "decoding_research": 4, "structured_output": 2, "exercise_top_p": 0}
OUTPUT = {
    "sampling_course": (
        r"V = 4096, scores from -\d",
        r"temperature, then top-p: 1\d\d\d tokens left.*\ntop-p, then temperature:  3\d\d tokens left",
        r"Gumbel +the same token for 6\d\.\d% .*\nCategorical +the same token for [123]\d\.\d% ",
        r"nucleate: chi-square \d\d\.\d, .* p-value 0\.[1-9].*\ntemperature .* p-value 0\.0000",
        r"\[11, 12, 13\] True",
        r"\nTrue\n",
        r"\['[^\]]*', '', ''\]",
    ),
    "decoding_research": (
        r"setting +distinct_1 .*\nT 0\.5 ",
        r"min_p +log-likelihood -1\.\d\d at distinct-2 = 0\.8",
        r"difference +0\.\d\d  \[0\.\d\d, 0\.\d\d\]",
        r"(?m)^True$",
    ),
    "structured_output": (
        r"(?m)^\{\"name\":\".*\",\"animal\":\"(fox|owl|bear)\",\"age\":\d\d?\}$",
        r"Mask\(\) +9 +0 +4087 ",
        r"zebra' +p\(text \| valid\) 0\.0000, sampled 0\.[6-9].*(\n.*){2}",
        r"zebra' +p\(text \| valid\) 0\.0000, weighted 0\.00",
        r"[A-Z][a-z]+ likes (foxes|owls|very old .*)\.\n",
        r"error - no token satisfies the structured-output constraint",
        r"cannot enforce uniqueItems",
        r"has non-unique elements",
    ),
    "exercise_top_p": tuple(rf"{task}: correct" for task in ("softmax", "keep_top_p", "top_p_probabilities", "draw")),
}
"""Patterns of the outputs of each notebook; those of the exercise belong to the solution."""


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in code_cells(notebook) for output in cell["outputs"]]


def text_of(notebook: dict[str, Any]) -> str:
    """The text of all outputs. That of one cell may be split anywhere."""
    texts = []
    for cell in code_cells(notebook):
        parts = (output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell["outputs"])
        texts.append("".join("".join(part) for part in parts))
    return "\n".join(texts)


def check_outputs(notebook: dict[str, Any], name: str) -> None:
    """Check that all cells ran without errors and messages, and that the plots are there."""
    assert all(cell["execution_count"] for cell in code_cells(notebook))
    messages = ["".join(one["text"]) for one in outputs(notebook) if one.get("name") == "stderr"]
    assert [one for one in messages if not one.startswith("compiling the CPU kernels")] == []
    assert [one for one in outputs(notebook) if one["output_type"] == "error"] == []
    assert sum("image/png" in one.get("data", {}) for one in outputs(notebook)) == PLOTS[name]


def fill_in_the_solution(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the open tasks of the exercise by the functions of the solution."""
    monkeypatch.syspath_prepend(FOLDER)
    import top_p_solution

    notebook = json.loads(path.read_text("utf-8"))
    for cell in code_cells(notebook):
        for tag in cell["metadata"].get("tags", []):
            cell["source"] = inspect.getsource(getattr(top_p_solution, tag.removeprefix("task-")))
    path.write_text(json.dumps(notebook), "utf-8")


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(OUTPUT) == set(PLOTS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_small_outputs(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES
    notebook = json.loads(path.read_text("utf-8"))
    check_outputs(notebook, path.stem)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len({*ids}) == len(ids)
    if path.stem != "exercise_top_p":
        for pattern in OUTPUT[path.stem]:
            assert re.search(pattern, text_of(notebook)), pattern


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    anchors = {"#" + title.replace(" ", "-") for title in re.findall(r"^## (.+)$", text, re.MULTILINE)}
    links = re.findall(r"\]\((?!https:)([^)]+)\)", text)
    assert links
    for link in links:
        assert link in anchors if link.startswith("#") else (FOLDER / link).exists(), link


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        unavailable(f"{', '.join(missing)} not installed: make setup-notebooks")
    folder = tmp_path / "notebooks"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    if path.stem == "exercise_top_p":
        fill_in_the_solution(folder / path.name, monkeypatch)
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    command = [sys.executable, "-m", "nbconvert", "--execute", "--to", "notebook", "--output-dir", str(tmp_path)]
    done = subprocess.run([*command, str(folder / path.name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    notebook = json.loads((tmp_path / path.name).read_text("utf-8"))
    check_outputs(notebook, path.stem)
    for pattern in OUTPUT[path.stem]:
        assert re.search(pattern, text_of(notebook)), f"{pattern}\n{text_of(notebook)}"
    if path.stem == "exercise_top_p":
        assert "Once upon a time" in text_of(notebook)
        assert "not implemented" not in text_of(notebook)
