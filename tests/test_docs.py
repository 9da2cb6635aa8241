"""The documentation is correct: code in README runs, commands exist, and the page of stages matches the stages."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from nucleate.cli.sampling_flags import STRUCTURED_FLAGS
from nucleate.sampling.stages import STAGES
from nucleate.structured_output.json_schema import FORMATS, SUPPORTED
from nucleate.structured_output.spec import OnUnsupported, Whitespace

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PAGES = {
    name: (ROOT / "docs" / name).read_text("utf-8")
    for name in (
        *("engine.md", "server.md", "structured.md", "beam.md", "speculation.md", "guidance.md", "cuda.md"),
        *("compare.md", "conformance.md", "tools.md", "cli.md", "scale.md"),
    )
}
MORE = [code for page in PAGES.values() for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]


def commands(page: str) -> list[str]:
    return [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]


CLI_COMMANDS = commands(PAGES["cli.md"])
STRUCTURED_COMMANDS = commands(PAGES["structured.md"])
COMPARE_COMMANDS = commands(PAGES["compare.md"])


@pytest.mark.slow
@pytest.mark.parametrize("code", EXAMPLES + MORE, ids=lambda code: code.strip().splitlines()[-1][:40])
def test_an_example_of_the_docs_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "import torch" in code:
        pytest.importorskip("torch", reason="it is about tensors")
    exec(compile(code, "<example>", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize(
    "command",
    [c for c in CLI_COMMANDS if c.startswith(("nucleate generate", "printf"))] + COMPARE_COMMANDS + STRUCTURED_COMMANDS,
)
def test_a_command_of_the_docs_runs(command: str) -> None:
    script = command.replace("nucleate", f"{shlex.quote(sys.executable)} -m nucleate")
    done = subprocess.run(script, shell=True, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > (2 if "--regex" in command or "--choice" in command else 40)


def test_the_page_of_structured_output_lists_all_enforced_keywords() -> None:
    page = PAGES["structured.md"]
    enforced, _, rest = page.partition("These keywords are enforced: ")[2].partition("### Formats")
    assert set(re.findall(r"`([^`]+)`", enforced)) >= SUPPORTED
    formats, _, unsupported = rest.partition("### Unsupported keywords")
    rows = re.findall(r"^\|([^|]+)\|", formats, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == set(FORMATS)
    assert not set(re.findall(r"`([^`]+)`", unsupported.partition("| `on_unsupported` |")[0])) & SUPPORTED
    assert all(flag.names[0] in page for flag in STRUCTURED_FLAGS.values())
    for name in (*get_args(OnUnsupported), *get_args(Whitespace)):
        assert f"`{name}`" in page


@pytest.mark.slow
def test_the_page_of_stages_and_all_links_are_correct() -> None:
    script = [sys.executable, str(ROOT / "docs" / "build.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_has_a_description_and_a_source(name: str) -> None:
    semantics = (ROOT / "docs" / "semantics.md").read_text("utf-8")
    assert f"`{name}`" in semantics
    assert (STAGES[name].__doc__ or "").strip().endswith(".")
    assert (sys.modules[STAGES[name].__module__].__doc__ or "").strip()


EXPLANATION = "".join(path.read_text("utf-8") for path in (ROOT / "docs" / "explanation").glob("*.md"))


@pytest.mark.parametrize("name", sorted(set(re.findall(r"/([\w-]+\.svg)", EXPLANATION))))
def test_a_picture_is_small_and_has_a_dark_form(name: str) -> None:
    content = (ROOT / "docs" / "pictures" / name).read_text("utf-8")
    assert len(content) < 30_000
    assert "prefers-color-scheme:dark" in content
    assert "<title>" in content
