"""The example of CONTRIBUTING.md works: one file and its test make a stage, a field, a flag and property tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
FILES = dict(re.findall(r"^`([\w/]+\.py)`:\n\n```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))

CONFTEST = """
import tiers

tiers.choose("not slow")
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the two files of the page added."""
    root = tmp_path_factory.mktemp("contributing")
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("properties", "support"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "tests" / name, root / "tests" / name, ignore=ignored)
    (root / "tests" / "conftest.py").write_text(CONFTEST, "utf-8")
    shutil.copy(ROOT / "pyproject.toml", root)
    for name, code in FILES.items():
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_text(code, "utf-8")
    return root


def run(copy: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_a_stage_and_its_test() -> None:
    assert list(FILES) == [
        "src/nucleate/sampling/stages/truncation/above_average.py",
        "tests/sampling/stages/test_above_average.py",
    ]


@pytest.mark.slow
def test_its_own_test_and_every_property_pass(copy: Path) -> None:
    report = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", "-k", "above_average or average")
    assert int(re.search(r"(\d+) passed", report)[1]) >= 12  # type: ignore[index]  # its own test and the property tests


@pytest.mark.slow
def test_the_stage_is_a_flag_and_a_row_of_the_table(copy: Path) -> None:
    table = run(copy, "-m", "nucleate", "stages")
    assert "above_average" in table
    assert "Factor of the average probability" in table
    seeded = ("--seed", "1", "--max-tokens", "8", "--json")
    generated = run(copy, "-m", "nucleate", "generate", "Once", "--above-average", "500", *seeded)
    assert '"above_average": 500.0' in generated


@pytest.mark.slow
def test_the_files_of_the_page_pass_the_linters(copy: Path) -> None:
    run(copy, "-m", "ruff", "check", *FILES)
    run(copy, "-m", "ruff", "format", "--check", *FILES)
    run(copy, "-m", "mypy", "src/nucleate/sampling/stages/truncation/above_average.py")
