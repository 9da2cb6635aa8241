"""The guides are correct: their code runs and prints what they show, and their commands exist."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from server_process import Server

from nucleate.cli.main import command_parser
from nucleate.jit import kernel_libraries

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path for folder in ("tutorials", "how-to", "explanation") for path in (DOCS / folder).glob("*.md"))


def page_marks(path: Path) -> list[pytest.MarkDecorator]:
    """Pages with commands are slow: each starts a process."""
    return [pytest.mark.slow] if "```console" in path.read_text("utf-8") else []


@pytest.fixture
def names(cold: None, page_names: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The namespace of a page, with kernels."""
    monkeypatch.setattr(kernel_libraries, "KERNELS", kernel_libraries.KernelReadiness(kernel_libraries.SAMPLER))
    return page_names


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("path", [pytest.param(p, marks=page_marks(p), id=f"{p.parent.name}-{p.stem}") for p in PAGES])
def test_the_code_of_a_page_runs(
    path: Path, names: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = path.read_text("utf-8")
    for module in re.findall(r"^(?:import|from) (torch|transformers|openai)\b", page, re.MULTILINE):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with PageRunner(names, tmp_path) as runner:
        for block in blocks(page):
            runner.run(block)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_commands_of_a_page_exist(path: Path) -> None:
    for block in blocks(path.read_text("utf-8")):
        if block.language == "sh":
            for line in block.code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["nucleate"]:
                    flags = {flag for action in command_parser(words[1]).actions for flag in action.option_strings}
                    given = {word.partition("=")[0] for word in words[2:] if word.startswith("--")}
                    assert given - {"--"} <= flags


def test_outputs_are_compared() -> None:
    [first, second, _] = blocks("```python\nprint(1)\n```\n\n```console\n$ a \\\nb\nc\n```\n```text\nx\n```\n")
    assert (first.output, second.output) == (None, "x\n")
    assert list(commands(second)) == [("a \\\nb\n", "c\n")]
    assert fits("a 1.5 s\nb  \n", "a ... s\nb")
    assert not fits("a\nb", "a\n...c")


BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# ([\w./-]+\.\w+)")
ADDRESS = "http://127.0.0.1:8000"


class Block(NamedTuple):
    """A block of code, and its output: the text block right after it."""

    language: str
    code: str
    line: int
    output: str | None = None

    @property
    def file_name(self) -> str | None:
        """The name under which the block is to be saved."""
        found = FILE.fullmatch(self.code.partition("\n")[0])
        return found and found[1]


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page with their outputs."""
    found: list[Block] = []
    end = 0
    for match in BLOCK.finditer(page):
        block = Block(match[1], match[2], page[: match.start()].count("\n") + 1)
        if found and block.language == "text" and not page[end : match.start()].strip():
            found[-1] = found[-1]._replace(output=block.code)
        found.append(block)
        end = match.end()
    return found


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """Return the commands of a console block with their outputs."""
    for part in re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]:
        lines = part.splitlines(keepends=True)
        count = 1 + next(i for i, line in enumerate(lines) if not line.endswith("\\\n"))
        yield "".join(lines[:count]), "".join(lines[count:])


def fits(output: str, shown: str) -> bool:
    """Return whether an output is the one that is shown, in which "..." is any text."""
    pattern = ".*?".join(re.escape(part) for part in without_trailing_space(shown).split("..."))
    return re.fullmatch(pattern, without_trailing_space(output), re.DOTALL) is not None


def without_trailing_space(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


class PageRunner(contextlib.ExitStack):
    """Runs the blocks of one page. names: the namespace of its Python. folder: the working directory.

    ``python`` blocks share one namespace. A ``text`` block right after one is its output. In a ``console`` block, lines
    after "$ " are commands for a shell, and the lines below are their output. "..." in an output is any text. A block
    whose first line is a comment with only a file name is saved under this name. ``nucleate serve`` starts a server on
    a free port, which then stands for 127.0.0.1:8000.
    """

    def __init__(self, names: dict[str, object], folder: Path) -> None:
        super().__init__()
        self.names, self.folder, self.address = names, folder, ADDRESS
        tools = folder / ".tools"
        tools.mkdir()
        for name, arguments in (("nucleate", " -m nucleate"), ("python", "")):
            (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{arguments} "$@"\n')
            (tools / name).chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}

    def run(self, block: Block) -> None:
        """Run a block. Raises AssertionError if its output differs."""
        if block.file_name:
            (self.folder / block.file_name).write_text(block.code)
        elif block.language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block.code.replace(ADDRESS, self.address), "<page>", "exec"), self.names)
            self._compare(block, block.code, printed.getvalue(), block.output)
        elif block.language == "console":
            for command, shown in commands(block):
                if command.startswith("nucleate serve"):
                    server = self.enter_context(Server(*shlex.split(command)[2:], seconds=120))
                    self.address = server.url
                else:
                    self._compare(block, command, self._shell(command), shown)

    def _shell(self, command: str) -> str:
        done = subprocess.run(
            command.replace(ADDRESS, self.address), shell=True, cwd=self.folder, env=self.environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
        )  # fmt: skip
        return done.stdout.replace(self.address, ADDRESS)

    def _compare(self, block: Block, code: str, output: str, shown: str | None) -> None:
        assert shown is None or fits(output, shown), f"line {block.line}: {code}\nprints:\n{output}"
