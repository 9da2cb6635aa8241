"""The guides are correct: their code runs and prints what they show, and their commands exist."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import page_runner
import pytest

from nucleate.cli.main import command_parser
from nucleate.jit import kernel_libraries
from nucleate.plugins.plugin_loader import set_stages
from nucleate.sampling.stages import STAGES

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path for folder in ("tutorials", "how-to", "explanation") for path in (DOCS / folder).glob("*.md"))


def page_marks(path: Path) -> list[pytest.MarkDecorator]:
    """Pages with commands are slow: each starts a process."""
    return [pytest.mark.slow] if "```console" in path.read_text("utf-8") else []


@pytest.fixture
def names(cold: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """The namespace of a page, with kernels. Stages that the page registers are removed afterwards."""
    monkeypatch.setattr(kernel_libraries, "KERNELS", kernel_libraries.KernelReadiness(kernel_libraries.SAMPLER))
    before, module = dict(STAGES), ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    yield vars(module)
    set_stages(before)


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize("path", [pytest.param(p, marks=page_marks(p), id=f"{p.parent.name}-{p.stem}") for p in PAGES])
def test_the_code_of_a_page_runs(
    path: Path, names: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = path.read_text("utf-8")
    for module in re.findall(r"^(?:import|from) (torch|transformers|openai)\b", page, re.MULTILINE):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with page_runner.PageRunner(names, tmp_path) as runner:
        for block in page_runner.blocks(page):
            runner.run(block)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_commands_of_a_page_exist(path: Path) -> None:
    for block in page_runner.blocks(path.read_text("utf-8")):
        if block.language == "sh":
            for line in block.code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["nucleate"]:
                    flags = {flag for action in command_parser(words[1]).actions for flag in action.option_strings}
                    given = {word.partition("=")[0] for word in words[2:] if word.startswith("--")}
                    assert given - {"--"} <= flags


def test_outputs_are_compared() -> None:
    [first, second, _] = page_runner.blocks(
        "```python\nprint(1)\n```\n\n```console\n$ a \\\nb\nc\n```\n```text\nx\n```\n"
    )
    assert (first.output, second.output) == (None, "x\n")
    assert list(page_runner.commands(second)) == [("a \\\nb\n", "c\n")]
    assert page_runner.fits("a 1.5 s\nb  \n", "a ... s\nb")
    assert not page_runner.fits("a\nb", "a\n...c")
